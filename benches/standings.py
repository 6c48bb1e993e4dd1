"""Where the arms of a race stand: curves on one grid, the best learning rate, who is there when.

    arm = Arm({3e-4: traces, 6e-4: traces})     # an arm's runs at each learning rate tried
    speedup(baseline.curve(spacing), arm.curve(spacing))
    compare(baseline, arm, spacing)             # [times sooner, and the ends of its 95% interval]

Every comparison is between arms at their best learning rates: an arm can be made to look bad by a
rate that does not suit it. Intervals draw the seeds anew and choose the rates anew.

An arm is one setting of train.py in the race; `spacing` is that of the common grid, in seconds.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from support.run import PHASES

Curve = Sequence[tuple[float, float]]  # (time, accuracy), without the anchor at time 0
FRACTION = 0.99  # of the baseline's best accuracy: the paper's measure of being there
EXACT = (FRACTION,)
# Near its top a curve is flat, and one fraction alone is luck: the median over these is steadier.
FRACTIONS = tuple(0.9 + 0.005 * i for i in range(20))  # 90% to 99.5%


@dataclass(frozen=True)
class Trace:
    """One run: where it stood at each mark."""

    curve: dict[str, list[float]]  # see `heats.Racer.mark`; the first mark is before step 1
    mean_accuracy: float  # over the other marks
    seconds: dict[str, float]  # of a step, by phase
    until: float  # the last mark in seconds of training, on which all arms agree

    def at(self, times: Sequence[float] | float, key: str) -> np.ndarray | float:
        """A number of the curve at these times, on straight lines between the marks."""
        return np.interp(times, self.curve["time"], self.curve[key])


@dataclass(frozen=True)
class Arm:
    """The runs of one arm at each learning rate tried; those with one seed raced side by side."""

    runs: dict[float, list[Trace]]  # place i of every list has the same seed

    @property
    def seeds(self) -> int:
        """How many runs there are at each rate."""
        return len(next(iter(self.runs.values())))

    @property
    def best_rate(self) -> float:
        """The learning rate with the best accuracy on average over the race: early *and* high."""
        return max(self.runs, key=lambda lr: sum(run.mean_accuracy for run in self.runs[lr]))

    @property
    def best(self) -> list[Trace]:
        """The runs at the best rate."""
        return self.runs[self.best_rate]

    def curve(self, spacing: float) -> Curve:
        """The mean of the best runs."""
        return mean_curve(*common_grid(self.best, spacing))

    def only(self, lr: float) -> "Arm":
        """This arm as if one rate had been tried."""
        return Arm({lr: self.runs[lr]})

    def drawn(self, seeds: Sequence[int]) -> "Arm":
        """This arm with these seeds, some of them perhaps repeated."""
        return Arm({lr: [runs[i] for i in seeds] for lr, runs in self.runs.items()})

    def as_json(self) -> dict[float, list[dict]]:
        """As it is written to race.json."""
        return {lr: [asdict(run) for run in runs] for lr, runs in self.runs.items()}

    @classmethod
    def from_json(cls, rates: dict[str, list[dict]]) -> "Arm":
        """The reverse of `as_json`; JSON makes texts of the rates."""
        return cls({float(lr): [Trace(**run) for run in runs] for lr, runs in rates.items()})


def common_grid(runs: Sequence[Trace], spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """A common grid of times, and the runs' accuracies there [runs, points].

    Every run reaches a mark a fraction of a step late, so no two have a time in common.
    """
    end = min(runs[0].until, *(run.curve["time"][-1] for run in runs))
    grid = spacing * np.arange(1, int(end / spacing + 1e-9) + 1)
    return grid, np.stack([run.at(grid, "accuracy") for run in runs])


def mean_curve(times: Sequence[float], runs: Sequence[Sequence[float]]) -> Curve:
    """The mean over runs of their accuracies at common times."""
    return [(time, statistics.fmean(values)) for time, values in zip(times, zip(*runs))]


def target(baseline: Curve, fraction: float = FRACTION) -> float:
    """The accuracy that has to be reached: the best itself often comes late and by luck.

    It cannot be reached if the baseline never was right: then nobody is sooner.
    """
    best = max(accuracy for _, accuracy in baseline)
    return fraction * best if best > 0 else math.inf


def first_time(curve: Curve, accuracy: float) -> float | None:
    """When a curve first is at this accuracy or above; None if never."""
    return next((time for time, reached in curve if reached >= accuracy), None)


def speedup(baseline: Curve, pods: Curve, fraction: float = FRACTION) -> float | None:
    """How many times sooner `pods` is as good as the baseline gets: the paper's measure.

    Args:
        baseline, pods: on a common grid, each a mean over runs.
        fraction: of the baseline's best accuracy that has to be reached.

    Returns:
        The ratio of the first times at which each curve is there; None if one never is.
    """
    goal = target(baseline, fraction)
    theirs, ours = first_time(baseline, goal), first_time(pods, goal)
    return None if None in (theirs, ours) else theirs / ours


def times_sooner(
    baseline: Arm, arm: Arm, spacing: float, fractions: Sequence[float] = EXACT
) -> float | None:
    """The median of the arms' `speedup` over these fractions, one that is None counted as 0."""
    theirs, ours = baseline.curve(spacing), arm.curve(spacing)
    return statistics.median(speedup(theirs, ours, part) or 0.0 for part in fractions) or None


def compare(
    baseline: Arm, arm: Arm, spacing: float, fractions: Sequence[float] = EXACT
) -> list[float | None]:
    """[`times_sooner`, and the ends of its bootstrap interval].

    A draw takes the same seeds for both, since those raced side by side.
    """

    def of(seeds: Sequence[int]) -> float | None:
        return times_sooner(baseline.drawn(seeds), arm.drawn(seeds), spacing, fractions)

    return [of(range(arm.seeds)), *bootstrap(of, arm.seeds)]


def bootstrap(statistic: Callable[[list[int]], float | None], runs: int) -> list[float]:
    """The 95% interval of a statistic of some run numbers, which are drawn with replacement.

    None counts as 0: a curve that never arrives is infinitely slow. A handful of runs gives a rough
    interval, and too narrow a one.
    """
    rng, draws = random.Random(0), 1000
    drawn = [rng.choices(range(runs), k=runs) for _ in range(draws)]
    values = sorted(statistic(chosen) or 0.0 for chosen in drawn)
    return [values[int(0.025 * draws)], values[int(0.975 * draws)]]


def standings(
    arms: dict[str, Arm], spacing: float, baselines: Sequence[str]
) -> dict[str, list[dict]]:
    """What each arm `costs` and reaches, and how much it `gains` over the baselines: two tables.

    Where no baseline races, the first arm is one.
    """
    costs, gains, mean = [], [], statistics.fmean
    baselines = [name for name in baselines if name in arms] or list(arms)[:1]
    for name, arm in arms.items():
        runs, head = arm.best, {"arm": name, "lr": arm.best_rate}
        seconds = {p: mean(run.seconds[p] for run in runs) for p in PHASES}
        final = [run.curve["accuracy"][-1] for run in runs]
        row = head | {"s/step": sum(seconds.values())} | seconds
        row["steps"] = round(mean(run.curve["step"][-1] for run in runs))
        row["no signal"] = mean(run.curve["idle"][-1] / run.curve["step"][-1] for run in runs)
        row["peak"] = max(accuracy for _, accuracy in arm.curve(spacing))
        row["final"] = mean(final)
        row["+-"] = statistics.stdev(final) / math.sqrt(len(final)) if len(final) > 1 else 0.0
        costs.append(row)
        gains.append(dict(head))
        for other in baselines:
            for title, fractions in {"time": EXACT, "median": FRACTIONS}.items():
                found = compare(arms[other], arm, spacing, fractions) if other != name else None
                gains[-1][f"{title} vs {other}"] = found
    return {"costs": costs, "gains": gains}
