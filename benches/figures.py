"""The pictures of a race, from the runs themselves or from what race.json holds of them.

draw_arms(axes, arms, spacing, "Held-out accuracy")         # on matplotlib axes
draw_race(common, tuned, spacing, out / "race.png")
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benches.standings import Arm, common_grid

STYLES = {  # of each arm of bench.py: its name and its colour, the same in every picture
    "grpo": ("GRPO", "tab:gray"),
    "grpo-ga": ("GRPO-GA", "tab:blue"),
    "pods": ("PODS (max-variance)", "tab:orange"),
    "random": ("random", "tab:green"),
    "max-reward": ("max-reward", "tab:red"),
    "percentile": ("percentile", "tab:purple"),
    "reinforce": ("REINFORCE", "tab:brown"),
    "2-grpo": ("2-GRPO", "tab:pink"),
    "pods-accuracy": ("PODS, selecting on accuracy", "gold"),
    "cppo": ("CPPO", "tab:cyan"),
    "reinforce-ada": ("Reinforce-Ada", "navy"),
    "maxrl": ("MaxRL", "teal"),
}
NAMES = {arm: name for arm, (name, _) in STYLES.items()}
COLORS = {arm: color for arm, (_, color) in STYLES.items()}


def draw_arms(ax, arms: dict[str, Arm], spacing: float, title: str) -> None:
    """Accuracy against training time, each arm at its best learning rate: mean over seeds."""
    # Arms without a colour of their own go from dark to light.
    ax.set_prop_cycle(color=matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(arms))))
    for name, arm in arms.items():
        label = NAMES.get(name, name)
        if len(arm.runs) > 1:
            label += f", lr {arm.best_rate:g}"
        times, accuracies = common_grid(arm.best, spacing)
        start = [run.curve["accuracy"][0] for run in arm.best]
        curves = np.column_stack([start, accuracies])  # [runs, times]
        draw_mean(ax, [0, *times], curves, label, COLORS.get(name))
    ax.set(title=title, ylabel="held-out accuracy (share right)", ylim=(0, 1.02))
    ax.set_xlabel("training time (seconds, evaluation excluded)")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower right")


def draw_mean(
    ax, times: Sequence[float], accuracies: np.ndarray, label: str, color: str | None
) -> None:
    """The mean of accuracies [runs, times], with its standard error as a band."""
    count, mean = len(accuracies), accuracies.mean(0)
    error = accuracies.std(0, ddof=1) / count**0.5 if count > 1 else 0 * mean
    (line,) = ax.plot(times, mean, color=color, label=label)
    ax.fill_between(times, mean - error, mean + error, color=line.get_color(), alpha=0.2, lw=0)


def draw_race(common: dict[str, Arm], tuned: dict[str, Arm], spacing: float, path: Path) -> None:
    """Accuracy against training time: the paper's figure."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    panels = {"one learning rate for all": common}
    if tuned:
        panels["each at its best learning rate"] = tuned
    figure = Figure(figsize=(5.2 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, (title, arms) in zip(axes, panels.items()):
        draw_arms(ax, arms, spacing, f"Held-out accuracy, {title}")
    figure.savefig(path, dpi=110)
