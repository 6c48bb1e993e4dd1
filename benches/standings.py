"""Where the arms of a race stand: curves on one grid, the best learning rate, who is there when.

    arm = Arm({3e-4: traces, 6e-4: traces})     # an arm's runs at each learning rate tried
    arm.best_rate, arm.best                     # the rate with the best race, and its runs
    compare(baseline, arm, "time", spacing)     # [times sooner, and the ends of its 95% interval]
    costs, gains = standings(arms, ["grpo"], spacing)

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

from benches.measure import table
from support.run import PHASES

Curve = Sequence[tuple[float, float]]  # (time, accuracy), without the anchor at time 0
FRACTION = 0.99  # of the baseline's best accuracy: the paper's measure of being there


# ---- one run, and one arm ------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """One run: where it stood at each mark."""

    # For each mark, the first before step 1: training `time`, `step`, held-out `accuracy`; summed
    # over the steps so far: `idle`, shares of groups without signal, and seconds of `generate`.
    curve: dict[str, list[float]]
    mean_accuracy: float  # over the marks
    seconds: dict[str, float]  # of a step, by phase
    until: float  # the last mark in seconds of training, on which all arms agree

    def at(self, grid: Sequence[float] | float, y: str, x: str = "time") -> np.ndarray | float:
        """y at these x, on straight lines between the marks."""
        return np.interp(grid, self.curve[x], self.curve[y])


@dataclass(frozen=True)
class Arm:
    """The runs of one arm at each learning rate tried; those with one seed raced side by side."""

    runs: dict[float, list[Trace]]  # [i] has seed i

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


# ---- curves --------------------------------------------------------------------------------------


def common_grid(
    runs: Sequence[Trace], spacing: float, x: str = "time", y: str = "accuracy"
) -> tuple[np.ndarray, np.ndarray]:
    """A common grid of times (or steps), and y of the runs there [runs, points].

    Every run reaches a mark a fraction of a step late, so no two have a time in common.
    """
    end = min(run.curve[x][-1] for run in runs)
    if x == "time":
        end = min(end, runs[0].until)
    grid = spacing * np.arange(1, int(end / spacing + 1e-9) + 1)
    return grid, np.stack([run.at(grid, y, x) for run in runs])


def mean_curve(times: Sequence[float], runs: Sequence[Sequence[float]]) -> Curve:
    """The mean over runs of their accuracies at common times."""
    return [(time, statistics.fmean(values)) for time, values in zip(times, zip(*runs))]


def target(baseline: Curve, fraction: float = FRACTION) -> float:
    """The accuracy that has to be reached: the best itself often comes late and by luck.

    Out of reach for a baseline that never was right: nobody is sooner than that.
    """
    best = max(accuracy for _, accuracy in baseline)
    return fraction * best if best > 0 else math.inf


def first_time(curve: Curve, accuracy: float) -> float | None:
    """When a curve first is at this accuracy or above; None if never."""
    return next((time for time, reached in curve if reached >= accuracy), None)


# ---- one arm against another ---------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """Where an arm is when it reaches the target: means over seeds, sums over the steps so far."""

    time: float
    step: float
    generate: float  # seconds

    def cost(self, c: float = 1.0) -> float:
        """Seconds a step, if generating cost c times what it does, and the rest the same."""
        return (self.time + (c - 1) * self.generate) / self.step


def arrivals(baseline: Arm, arm: Arm, spacing: float) -> tuple[Arrival, Arrival] | None:
    """When the baseline and an arm reach 99% of the baseline's best; None if the arm never does."""
    goal, there = target(baseline.curve(spacing)), []
    for one in (baseline, arm):
        time = first_time(one.curve(spacing), goal)
        if time is None:
            return None
        means = {
            key: statistics.fmean(run.at(time, key) for run in one.best)
            for key in ("step", "generate")
        }
        there.append(Arrival(time, **means))
    return tuple(there)


def compare(baseline: Arm, arm: Arm, key: str, spacing: float) -> list[float | None]:
    """How many times less `time` or how many times fewer `step`s an arm needs than a baseline.

    Both at 99% of the baseline's best (`arrivals`; in time this is `bench.speedup`), with the
    bootstrap interval. A draw takes the same seeds for both, since those raced side by side.
    """

    def times_less(seeds: Sequence[int]) -> float | None:
        there = arrivals(baseline.drawn(seeds), arm.drawn(seeds), spacing)
        return there and getattr(there[0], key) / getattr(there[1], key)

    return [times_less(range(arm.seeds)), *bootstrap(times_less, arm.seeds)]


def bootstrap(
    statistic: Callable[[list[int]], float | None], runs: int, draws: int = 1000, seed: int = 0
) -> list[float]:
    """The 95% interval of a statistic of some runs, by drawing the runs anew with replacement.

    Args:
        statistic: of a list of run numbers, each in range(runs), some of them repeated. None counts
            as 0: a curve that never arrives is infinitely slow.
        runs: how many there are. A handful of runs gives a rough interval, and too narrow a one.
    """
    rng = random.Random(seed)
    drawn = [rng.choices(range(runs), k=runs) for _ in range(draws)]
    values = sorted(statistic(chosen) or 0.0 for chosen in drawn)
    return [values[int(0.025 * draws)], values[int(0.975 * draws)]]


# ---- all arms ------------------------------------------------------------------------------------


def standings(
    arms: dict[str, Arm], baselines: Sequence[str], spacing: float
) -> tuple[list[dict], list[dict]]:
    """What each arm costs and reaches, and how much sooner than the baselines: two tables."""
    costs, gains = [], []
    for name, arm in arms.items():
        runs = arm.best
        seconds = {p: statistics.fmean(run.seconds[p] for run in runs) for p in PHASES}
        final = [run.curve["accuracy"][-1] for run in runs]
        error = statistics.stdev(final) / math.sqrt(len(final)) if len(final) > 1 else 0.0
        row = {"arm": name, "lr": arm.best_rate, "s/step": sum(seconds.values())} | seconds
        row["steps"] = round(statistics.fmean(run.curve["step"][-1] for run in runs))
        idle = [run.curve["idle"][-1] / run.curve["step"][-1] for run in runs]
        row["no signal"] = statistics.fmean(idle)
        row["peak"] = float(common_grid(runs, spacing)[1].mean(0).max())
        costs.append(row | {"final": statistics.fmean(final), "+-": error})
        gain = {"arm": name, "lr": arm.best_rate}
        for baseline in baselines:
            for key in ("time", "step"):
                other = arms[baseline] if baseline in arms and baseline != name else None
                gain[f"{key} vs {baseline}"] = other and compare(other, arm, key, spacing)
        gains.append(gain)
    return costs, gains


def show_standings(title: str, costs: list[dict], gains: list[dict]) -> None:
    """Print the two tables of `standings`."""
    print(table(f"{title}: seconds a step by phase, accuracy of all seeds' mean", costs))
    if any(value for row in gains for key, value in row.items() if " vs " in key):
        print(table("times less at 99% of the baseline's best (95% interval)", gains))


def warn_of_edges(tuned: dict[str, Arm]) -> None:
    """A best rate at an edge of the grid proves little; so does one that other seeds put there."""
    for name, arm in tuned.items():
        low, high = bootstrap(lambda seeds, arm=arm: arm.drawn(seeds).best_rate, arm.seeds)
        if low == min(arm.runs) or high == max(arm.runs):
            print(
                f"warning: {name} is best at {arm.best_rate:g} ({low:g} to {high:g} with other "
                "seeds), which reaches an edge of the grid: widen --grid"
            )


def warn_of_load(arms: dict[str, Arm]) -> None:
    """Seeds that had much less of the machine than others blur the means over seeds."""
    every = [runs for arm in arms.values() for runs in arm.runs.values()]
    totals = [sum(sum(run.seconds.values()) for run in seed) for seed in zip(*every, strict=True)]
    if max(totals) > 1.3 * min(totals):
        times = ", ".join(f"{total / min(totals):.1f}" for total in totals)
        print(f"warning: other work slowed some seeds down: a step took {times} times as long")
