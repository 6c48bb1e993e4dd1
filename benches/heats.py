"""How the arms race: side by side in slices of a second or so, each on train.py's own clock.

    arms, other_work = run_heats({"pods": {3e-4: config}}, range(5), [1.5, 3.0], jobs=2, out=out)

A heat is one seed of all arms. It is stored when it is through, so a race that was interrupted goes
on with the seeds that are missing.
"""

import hashlib
import io
import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import transformers
from tqdm import tqdm

import train
from benches.measure import OTHERS, evaluated
from benches.standings import Arm, Trace
from support.run import PHASES, Run
from support.settings import Config
from support.storage import write_atomically

# Of an evaluation: right as read, right anywhere in the text, right among those that ended.
EVALUATED = ("accuracy", "lenient_accuracy", "finished_accuracy", "truncated", "completion_length")
Racing = dict[str, dict[float, Config]]  # the settings of each arm, by the learning rate


class Racer:
    """One run of train.py that can be stopped at any mark of its own clock, and goes on from there.

    Attributes:
        rows: of all steps so far, as train.py logs them.
        time: training seconds so far, evaluation excluded.
        curve: for each key the numbers at all marks so far, see `mark`.
    """

    def __init__(self, config: Config) -> None:
        # What a run says of its data would be said once an arm.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            self.run = Run(config)
        self.rows, self.time, self.curve = [], 0.0, {}
        self.mark()

    def advance(self, until: float) -> None:
        """Train until this many seconds of training time, then evaluate."""
        begin = len(self.rows)
        while self.time < until:
            row, _ = train.train_step(self.run, len(self.rows) + 1)
            self.time += sum(row["seconds"].values())
            self.rows.append(row)
        self.mark(self.rows[begin:])

    def mark(self, since: Sequence[dict] = ()) -> None:
        """Evaluate, off the clock, and add to the curve.

        Training `time`, `step`; summed over all steps: `idle`, shares of groups without signal, and
        seconds of `generate`; `EVALUATED`; the mean `entropy` of `since`, the last mark's rows on.
        None is what cannot be told.
        """
        entropies = [row["entropy"] for row in since if row["entropy"] is not None]
        point = {"time": self.time, "step": len(self.rows)}
        point["idle"] = sum(row["groups_without_signal"] / row["groups"] for row in self.rows)
        point["generate"] = sum(row["seconds"]["generate"] for row in self.rows)
        found = evaluated(self.run)
        point |= {key: found[key] for key in EVALUATED}
        point["entropy"] = statistics.fmean(entropies) if entropies else None
        for key, value in point.items():
            self.curve.setdefault(key, []).append(None if value is None else round(value, 4))

    def trace(self, until: float) -> Trace:
        """What is kept of the run after the last mark."""
        seconds = {p: statistics.fmean(row["seconds"][p] for row in self.rows) for p in PHASES}
        return Trace(self.curve, statistics.fmean(self.curve["accuracy"][1:]), seconds, until)


def heat(racing: Racing, marks: Sequence[float], seed: int, line: int = 0) -> dict[str, Arm]:
    """One seed of all racers, in one process: each trains up to the next mark, then the next one.

    So other work on the machine slows all alike. `line` of the terminal shows the progress.
    """
    racers = {
        arm: {lr: Racer(replace(config, seed=seed)) for lr, config in rates.items()}
        for arm, rates in racing.items()
    }
    bar = {"desc": f"seed {seed}", "position": line, "unit": "mark", "leave": False}
    for mark in tqdm(marks, disable=None, **bar):
        for racer in (racer for rates in racers.values() for racer in rates.values()):
            racer.advance(mark)
        OTHERS.look()
    return {
        arm: Arm({lr: [racer.trace(marks[-1])] for lr, racer in rates.items()})
        for arm, rates in racers.items()
    }


def stored_heat(racing: Racing, marks: Sequence[float], folder: Path, jobs: int, seed: int) -> int:
    """`heat`, with the load of other work meanwhile, as a file of the folder; returns the seed."""
    OTHERS.start()
    runs = {arm: one.as_json() for arm, one in heat(racing, marks, seed, seed % jobs).items()}
    result = {"other_work": OTHERS.largest, "runs": runs}
    write_atomically(folder / f"seed_{seed}.json", json.dumps(result))
    return seed


def run_heats(
    racing: Racing, seeds: Sequence[int], marks: Sequence[float], jobs: int, out: Path
) -> tuple[dict[str, Arm], float | None]:
    """The runs of all arms, and the largest load of other work; `jobs` seeds at a time.

    Heats are kept in a folder of `out` that is named after everything the race depends on.
    """
    what = {arm: [*map(asdict, rates.values())] for arm, rates in racing.items()}
    digest = hashlib.sha256(json.dumps([marks, what]).encode()).hexdigest()[:8]
    folder = out / "race_heats" / digest
    folder.mkdir(parents=True, exist_ok=True)
    paths = {seed: folder / f"seed_{seed}.json" for seed in seeds}
    missing = [seed for seed, path in paths.items() if not path.exists()]
    count = sum(map(len, racing.values()))
    print(f"{count} runs of {marks[-1]:g} s of training, {len(seeds)} seeds, {jobs} at a time")
    if len(missing) < len(seeds):
        print(f"{len(seeds) - len(missing)} of the seeds were raced before: delete {folder} if not")
    one, start = partial(stored_heat, racing, marks, folder, jobs), time.perf_counter()
    try:
        if jobs == 1:
            through = map(one, missing)
        else:  # new processes, not forks of this one, whose threads they would share
            pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), start_process)
            futures = [pool.submit(one, seed) for seed in missing]
            through = (future.result() for future in as_completed(futures))
        for seed in through:
            minutes = (time.perf_counter() - start) / 60
            print(f"seed {seed} is through, after {minutes:.1f} min", flush=True)
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()
    heats = [json.loads(path.read_text()) for path in paths.values() if path.exists()]
    if not heats:
        raise KeyboardInterrupt
    if len(heats) < len(seeds):
        of = f"of {len(heats)} of {len(seeds)} seeds"
        print(f"\nstopped: what follows is {of}; the same command goes on with the others")
    arms = {}
    for arm, rates in racing.items():
        runs = [Arm.from_json(heat["runs"][arm]).runs for heat in heats]
        arms[arm] = Arm({lr: [one[lr][0] for one in runs] for lr in rates})
    loads = [heat["other_work"] for heat in heats if heat["other_work"] is not None]
    return arms, max(loads, default=None)


def start_process() -> None:
    """No progress bars of models, and Ctrl-C is for the first process to deal with."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.logging.disable_progress_bar()
