"""The pictures of a race, from the runs themselves or from what race.json holds of them.

    draw_arms(axes, arms, spacing, "Held-out accuracy")         # used by bench.py and notebook 3
    draw_race(common, tuned, spacing, out / "race.png")

Everything is drawn on matplotlib axes that the caller made, or written to the file named last.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benches.measure import new_figure
from benches.standings import Arm, Trace, common_grid
from support.run import PHASES

STYLES = {  # of each arm of bench.py: its name and its colour, the same in every picture
    "grpo": ("GRPO", "tab:gray"),
    "grpo-ga": ("GRPO-GA", "tab:blue"),
    "pods": ("PODS (max-variance)", "tab:orange"),
    "random": ("random", "tab:green"),
    "max-reward": ("max-reward", "tab:red"),
    "percentile": ("percentile", "tab:purple"),
    "reinforce": ("REINFORCE", "tab:brown"),
    "2-grpo": ("2-GRPO", "tab:pink"),
    "grpo-signal": ("GRPO, mean over groups with signal", "black"),
    "pods-signal": ("PODS, mean over groups with signal", "chocolate"),
    "pods-accuracy": ("PODS, selecting on accuracy", "gold"),
    "pods-all": ("PODS, advantages over all n", "tab:olive"),
    "cppo": ("CPPO", "tab:cyan"),
}
NAMES = {arm: name for arm, (name, _) in STYLES.items()}
COLORS = {arm: color for arm, (_, color) in STYLES.items()}
COLORS["max-variance"] = COLORS["pods"]  # the rule's name


def look(names: Sequence[str]) -> dict[str, dict]:
    """Label and colour of each arm; those of a sweep go from dark to light."""
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(names)))
    return {
        name: {
            "label": NAMES.get(name, name),
            "color": COLORS.get(name.replace("_", "-"), tuple(shade)),
        }
        for name, shade in zip(names, shades)
    }


def draw_arms(ax, arms: dict[str, Arm], spacing: float, title: str) -> None:
    """Accuracy against training time, each arm at its best learning rate."""
    for name, style in look(list(arms)).items():
        arm = arms[name]
        if len(arm.runs) > 1:
            style["label"] += f", lr {arm.best_rate:g}"
        draw_runs(ax, arm.best, spacing, **style)
    ax.set(title=title, ylabel="held-out accuracy (share right)", ylim=(0, 1.02))
    ax.set_xlabel("training time (seconds, evaluation excluded)")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower right")
    zoom(ax)


def zoom(ax) -> None:
    """Where two arms or more end above 0.9, an inset of what decides between them.

    Not if one of these comes late: the inset would hide its curve.
    """
    lines = [line for line in ax.get_lines() if line.get_ydata()[-1] > 0.9]
    if len(lines) < 2:
        return
    start = 0.35 * max(line.get_xdata()[-1] for line in lines)
    lowest = min(min(line.get_ydata()[line.get_xdata() >= start]) for line in lines)
    if lowest < 0.6:
        return
    inset = ax.inset_axes((0.45, 0.53, 0.53, 0.36))
    for line in lines:
        inset.plot(*line.get_data(), color=line.get_color())
    inset.set(xlim=(start, None), ylim=(max(0.85, lowest - 0.005), 1.002))
    inset.tick_params(labelsize=7)
    inset.patch.set_alpha(0.8)
    inset.grid(alpha=0.3)


def draw_runs(ax, runs: Sequence[Trace], spacing: float, label: str, color: str | tuple) -> None:
    """The mean over seeds, with its standard error as a band."""
    times, accuracies = common_grid(runs, spacing)
    start = [run.curve["accuracy"][0] for run in runs]
    accuracies = np.column_stack([start, accuracies])  # [runs, 1 + points]
    draw_mean(ax, [0, *times], accuracies, label, color)


def draw_mean(
    ax, times: Sequence[float], accuracies: np.ndarray, label: str, color: str | tuple
) -> None:
    """The mean of accuracies [runs, times], with its standard error as a band."""
    count, mean = len(accuracies), accuracies.mean(0)
    error = accuracies.std(0, ddof=1) / count**0.5 if count > 1 else 0 * mean
    ax.plot(times, mean, color=color, label=label)
    ax.fill_between(times, mean - error, mean + error, color=color, alpha=0.2, lw=0)


def draw_race(common: dict[str, Arm], tuned: dict[str, Arm], spacing: float, path: Path) -> None:
    """Accuracy against training time, and where the seconds of a step go: the paper's figure."""
    panels = [(common, "one learning rate for all")]
    if tuned:
        panels.append((tuned, "each at its best learning rate"))
    figure, axes = new_figure(len(panels) + 1)
    for ax, (arms, title) in zip(axes, panels):
        draw_arms(ax, arms, spacing, f"Held-out accuracy, {title}")
    seconds = {
        name: {p: statistics.fmean(run.seconds[p] for run in arm.best) for p in PHASES}
        for name, arm in common.items()
    }
    draw_phases(axes[-1], seconds)
    figure.savefig(path, dpi=110)


def draw_phases(ax, arms: dict[str, dict[str, float]]) -> None:
    """Stacked seconds of a step for each arm, by phase."""
    bottom = np.zeros(len(arms))
    for phase in PHASES:
        seconds = [by_phase.get(phase, 0.0) for by_phase in arms.values()]
        if max(seconds) > 0.001:
            ax.bar(list(arms), seconds, bottom=bottom, label=phase)
            bottom += seconds
    ax.set(title="Where a step's time goes", ylabel="seconds a step")
    ax.tick_params(axis="x", rotation=25)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)


def draw_account(arms: dict[str, Arm], account: dict[str, dict], path: Path) -> None:
    """Groups without signal, speed-up against the cost of generation, tolerance of the rate."""
    figure, (left, middle, right) = new_figure(3)
    for name, style in look(list(arms)).items():
        rates = arms[name].runs
        runs = next(iter(rates.values()))
        width = max(1, min(run.curve["step"][-1] for run in runs) // 20)  # steps averaged over
        grid, idle = common_grid(runs, width, "step", "idle")
        left.plot(grid, np.diff(idle.mean(0), prepend=0.0) / width, **style)
        if len(rates) > 1:
            final = [[run.curve["accuracy"][-1] for run in runs] for runs in rates.values()]
            right.plot(list(rates), np.mean(final, 1), marker="o", **style)
    left.set(title="Groups without signal", xlabel="step", ylim=(0, 1))
    left.set_ylabel("share of the step's groups")
    draw_generation_cost(middle, account)
    right.set(title="Tolerance of the learning rate", xscale="log", xlabel="learning rate")
    right.set_ylabel("accuracy at the end, mean over seeds")
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def draw_generation_cost(ax, account: dict[str, dict]) -> None:
    """The speed-up in time, if generating cost less or more: the `curve`s of the account."""
    for baseline, one in account.items():
        if "curve" not in one:
            continue
        color = COLORS[baseline]
        ax.plot(*zip(*one["curve"]), color=color, label=f"PODS against {NAMES[baseline]}")
        height = one["steps ratio"] / one["step cost ratio"]
        ax.plot(one["here"], height, "o", color=color, label="measured here")
        if "with the paper's step cost" in one:
            style = {"color": color, "ls": ":"}
            style["label"] = "if a PODS step cost 1.34 as on the paper's L40S"
            ax.axhline(one["with the paper's step cost"], **style)
    ax.axhline(1, color="k", lw=0.8)
    ax.set(title="If generating cost less or more, all else equal", xscale="log", ylim=(0, None))
    ax.set_xlabel("time of generation / time of the rest, in a PODS step")
    ax.set_ylabel("speed-up in time")
