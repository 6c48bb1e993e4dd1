"""What the notebooks share: sentences and tables of computed numbers, curves, exercises.

    prepare()                                    # one thread, no progress bars, the look of figures
    say(f"{kept} of {n} are kept")               # a sentence whose numbers were computed
    say(as_table(rows))                          # rows of equal keys
    curves = LiveCurves("step", "accuracy")      # grows while something trains
    curves.add("GRPO", 10, 0.47)
    attempt(answer, check)                       # of an exercise: "to do", an assertion, "right"

A notebook holds what is learned from; what would only be scrolled past is here. Needs IPython.
"""

import io
import os
import time
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import torch
import transformers
from IPython.display import Image, Markdown, display
from matplotlib.figure import Figure

from benches.figures import look
from pods import down_sample

LOW, HIGH, REST, EDGE = "tab:blue", "tab:orange", "lightgray", "tab:red"  # of rewards, not of arms
SHORT = bool(os.environ.get("CI"))  # a test wants to know whether it runs, not what comes out


def prepare(dpi: int = 80) -> None:
    """One thread (the fastest for a small policy), no progress bars, the look of the figures."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    plt.rcParams.update({"figure.dpi": dpi, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})


def at_most(number: int, short: int) -> int:
    """`number`, or `short` where CI is set."""
    return short if SHORT else number


def say(text: str) -> None:
    """Show a sentence or a table whose numbers were computed."""
    display(Markdown(text))


def as_table(rows: Sequence[dict]) -> str:
    """Rows of equal keys as a table."""
    lines = [map(str, rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class LiveCurves:
    """Curves that grow while something is computed, redrawn at most once a second.

    Args:
        xlabel, ylabel: with units.
        limits: of y.
    """

    def __init__(self, xlabel: str, ylabel: str, limits: tuple = (0, 1.02)) -> None:
        self.labels = {"xlabel": xlabel, "ylabel": ylabel, "ylim": limits}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.shown, self.handle = 0.0, None

    def add(self, name: str, x: float, y: float) -> None:
        """One more point of the curve `name`."""
        self.curves.setdefault(name, []).append((x, y))
        if time.monotonic() - self.shown > 1:
            self.show()

    def show(self) -> None:
        """Redraw; call it once more at the end."""
        figure = Figure(figsize=(7, 3.2), layout="constrained", dpi=80)
        axes = figure.subplots()
        for name, style in look(list(self.curves)).items():
            axes.plot(*zip(*self.curves[name]), marker="o", ms=3, **style)
        axes.set(**self.labels)
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
        with io.BytesIO() as file:
            figure.savefig(file)
            image = Image(data=file.getvalue(), format="png")
        if self.handle is None:
            self.handle = display(image, display_id=True)
        else:
            self.handle.update(image)
        self.shown = time.monotonic()


class _ToDo(Exception):
    """The exercise's function returns nothing yet."""


def attempt(answer: Callable, check: Callable[[Callable], object]) -> None:
    """Say how far an exercise is: "to do" while the function is empty, "right" if it is.

    Raises:
        AssertionError: of `check(answer)`, if the answer is wrong.
    """

    def tried(*arguments):
        if (result := answer(*arguments)) is None:
            raise _ToDo
        return result

    try:
        check(tried)
    except _ToDo:
        say(f"To do: `{answer.__name__}` returns nothing yet.")
    else:
        say(f"Right: `{answer.__name__}` went through all checks.")


def what_happens(function: Callable, *arguments) -> str:
    """What a call returns, or the error that it raises, as text."""
    try:
        result = function(*arguments)
    except ValueError as error:
        return f"ValueError: {error}"
    return str(result.tolist() if isinstance(result, torch.Tensor) else result)


def draw_group(
    axes, rewards: Sequence[float], kept: Sequence[int], title: str, xlabel: str
) -> None:
    """The rewards of a group as bars: kept low ones, kept high ones, those left out."""
    middle = (min(rewards) + max(rewards)) / 2
    colors = [
        REST if i not in kept else LOW if r <= middle else HIGH for i, r in enumerate(rewards)
    ]
    least = (max(rewards) - min(rewards) or 1) / 90  # a reward of 0 is a bar, too
    axes.bar(range(len(rewards)), [max(r, least) for r in rewards], color=colors, edgecolor="gray")
    axes.set(title=title, xlabel=xlabel, ylabel="reward (points)", xticks=range(len(rewards)))
    if len(rewards) > 16:
        axes.set_xticks(range(0, len(rewards), 4))


def draw_splits(variances: Sequence[float], slopes: Sequence[float], best_k: int, axes) -> None:
    """The variance of each split, and the slopes between them, on two axes."""
    left, right = axes
    left.plot(range(len(variances)), variances, "o-", color="gray")
    left.plot(best_k, variances[best_k], "o", ms=11, mfc="none", color=EDGE, label="best k")
    left.set(title="Variance of each split: up, then down", xlabel="k, how many of the lowest")
    left.set(ylabel="Var $S_k$ (points²)", xticks=range(len(variances)))
    left.legend()
    colors = [LOW if slope < 0 else REST for slope in slopes]
    right.bar(range(len(slopes)), slopes, color=colors, edgecolor="gray")
    right.axhline(0, color="k", lw=1)
    right.set(title="Best k = number of negative slopes", xlabel="k", ylabel="slope(k) (points)")
    right.set_xticks(range(len(slopes)))


def draw_parabola(value: Callable[[float], float], low: float, x: float, high: float) -> None:
    """V(x), and what it is at two left-out rewards and at the one between them."""
    grid = [low + (i / 100 * 1.2 - 0.1) * (high - low) for i in range(101)]
    _, axes = plt.subplots(figsize=(7, 3.3), layout="constrained")
    axes.plot(grid, [value(g) for g in grid], color="gray")
    chord = "the chord: above the parabola in between"
    axes.plot([low, high], [value(low), value(high)], "--", color=REST, label=chord)
    for at, name, color in ((low, "l, left out", LOW), (x, "x, in S", "k"), (high, "h", HIGH)):
        axes.plot(at, value(at), "o", ms=8, color=color, label=f"{name}: {at:g}")
    axes.set(title="Moving one reward of S to a left-out one on its outer side")
    axes.set(xlabel="the moved reward x (points)", ylabel="variance of S, V(x) (points²)")
    axes.legend(loc="best")
    plt.show()


def draw_two_ways(counts: Sequence[int], ways: torch.Tensor, n: int) -> None:
    """Advantages on all n and on the kept m against the number of right answers.

    Args:
        counts: right answers in the group.
        ways: [counts, 2, 3]: of a kept right answer, of a kept wrong one, the mean of the kept.
    """
    _, panels = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", sharey=True)
    titles = ("Normalised on all n, then selected", "Selected, then normalised on the kept m")
    for w, (axes, title) in enumerate(zip(panels, titles)):
        axes.plot(counts, ways[:, w, 0], color=HIGH, label="a kept right answer")
        axes.plot(counts, ways[:, w, 1], color=LOW, label="a kept wrong answer")
        axes.plot(counts, ways[:, w, 2], "k--", label="mean of the kept m")
        axes.axhline(0, color="gray", lw=0.8)
        axes.set(title=title, xlabel=f"right answers among n = {n}")
    panels[0].set_ylabel("advantage (standard deviations)")
    panels[1].legend()
    plt.show()


def saved_megabytes(function: Callable[[], object], model: torch.nn.Module) -> float:
    """What autograd keeps of a forward pass for the backward one, the model's weights excluded."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return sum(kept.values()) / 1e6


def kept_of(rewards: Sequence[float], m: int, rule: str = "max_variance") -> list[float]:
    """The rewards that a rule keeps of one group."""
    generator = torch.Generator().manual_seed(0)
    return [rewards[i] for i in down_sample(rewards, m, rule, generator).tolist()]
