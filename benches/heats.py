"""How the arms race: side by side in slices of a second or so, each on train.py's own clock.

    arms = run_heats({"pods": {3e-4: config}, ...}, seeds=5, marks=[1.5, 3.0], jobs=2)

A racer is a run of train.py that is stopped at marks of its training time and goes on from there;
a heat is one seed of all of them. An arm is one setting of train.py.
"""

import io
import statistics
import time
from collections.abc import Hashable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial

from tqdm import tqdm

import train
from benches.measure import in_processes
from benches.standings import Arm, Trace, warn_of_load
from support.evaluation import evaluation
from support.run import PHASES, Run
from support.settings import Config


class Racer:
    """One run of train.py that can be stopped at any mark of its own clock, and goes on from there.

    Attributes:
        rows: of all steps so far, as train.py logs them.
        time: training seconds so far, evaluation excluded.
        curve: see `Trace`.
    """

    def __init__(self, config: Config) -> None:
        # What a run says of its data would be said once an arm.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self.run = Run(config)
        self.rows, self.time = [], 0.0
        self.curve = {key: [] for key in ("time", "step", "accuracy", "idle", "generate")}
        self.mark()

    def advance(self, until: float) -> None:
        """Train until this many seconds of training time, then evaluate."""
        while self.time < until:
            row, _ = train.train_step(self.run, len(self.rows) + 1)
            self.time += sum(row["seconds"].values())
            self.rows.append(row)
        self.mark()

    def mark(self) -> None:
        """Evaluate, off the clock."""
        point = {
            "time": self.time,
            "step": len(self.rows),
            "accuracy": next(iter(evaluation(self.run).values()))["accuracy"],
            "idle": sum(row["groups_without_signal"] / row["groups"] for row in self.rows),
            "generate": sum(row["seconds"]["generate"] for row in self.rows),
        }
        for key, value in point.items():
            self.curve[key].append(round(value, 4))

    def trace(self, until: float) -> Trace:
        """What is kept of the run after the last mark."""
        seconds = {p: statistics.fmean(row["seconds"][p] for row in self.rows) for p in PHASES}
        return Trace(self.curve, statistics.fmean(self.curve["accuracy"][1:]), seconds, until)


def heat(
    settings: dict[Hashable, Config], marks: Sequence[float], seed: int, jobs: int = 1
) -> dict[Hashable, Trace]:
    """One seed of all racers, in one process: each trains up to the next mark, then the next one.

    Slices of a second or so let whatever else the machine does hit all arms alike. `jobs` heats at
    a time have a line each of the terminal for their progress.
    """
    line = {"desc": f"seed {seed}", "position": seed % jobs, "unit": "mark", "leave": False}
    racers = {name: Racer(replace(config, seed=seed)) for name, config in settings.items()}
    for mark in tqdm(marks, disable=None, **line):
        for racer in racers.values():
            racer.advance(mark)
    return {name: racer.trace(marks[-1]) for name, racer in racers.items()}


def run_heats(
    settings: dict[str, dict[float, Config]], seeds: int, marks: Sequence[float], jobs: int
) -> dict[str, Arm]:
    """The runs of all arms; `jobs` seeds at a time, each in a process of its own.

    Args:
        settings: of each arm, by the learning rate.
    """
    racing = {(name, lr): one for name, rates in settings.items() for lr, one in rates.items()}
    print(f"{len(racing)} runs of {marks[-1]:g} s of training, {seeds} seeds, {jobs} at a time")
    one, heats, start = partial(heat, racing, marks, jobs=jobs), [], time.perf_counter()
    try:
        results = map(one, range(seeds)) if jobs == 1 else in_processes(jobs, one, range(seeds))
        for result in results:
            heats.append(result)
            minutes = (time.perf_counter() - start) / 60
            print(f"seed {len(heats) - 1} is through, after {minutes:.1f} min", flush=True)
    except KeyboardInterrupt:
        if not heats:
            raise
        print(f"\nstopped; what follows is of the {len(heats)} of {seeds} seeds that are through")
    arms = {
        name: Arm({lr: [through[name, lr] for through in heats] for lr in rates})
        for name, rates in settings.items()
    }
    warn_of_load(arms)
    return arms


def at_rates(config: Config, rates: Sequence[float]) -> dict[float, Config]:
    """These settings with each of these learning rates."""
    return {lr: replace(config, lr=lr) for lr in rates}
