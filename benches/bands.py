"""What should a run look like? The default run at some of its steps, over seeds.

python bench.py bands                       # the bands of docs/it_does_not_learn.md
python bench.py bands --steps 10 20 -- --n 16 --m 16
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import train
from benches.measure import in_processes, table
from support import presets
from support.evaluation import evaluation
from support.run import Run
from support.settings import Config

WINDOW = 10  # steps: the numbers of a single one are those of a few prompts


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--seeds", type=int, default=8, help="runs")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 50, 100], help="to look at")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="seeds at a time")
    parser.add_argument("train_flags", nargs="*", help="after --: flags of train.py")


def bands(arguments: argparse.Namespace) -> dict:
    """What a run shows at these steps: median, lowest and highest of the seeds.

    Held-out accuracy is the step's, everything else the mean of the ten steps up to it (the largest
    of the `logprob_gap`s). Nothing here depends on the machine but for rounding.
    """
    base, _ = presets.parse(["--threads", str(arguments.threads), *arguments.train_flags])
    steps, seeds = sorted(set(arguments.steps)), range(arguments.seeds)
    one = partial(numbers, base, steps)
    found = list(
        map(one, seeds) if arguments.jobs == 1 else in_processes(arguments.jobs, one, seeds)
    )
    rows = [
        {"step": step} | {name: band([run[i][name] for run in found]) for name in found[0][i]}
        for i, step in enumerate(steps)
    ]
    print(table(f"{len(found)} seeds: median (lowest-highest)", rows))
    return {"config": asdict(base), "rows": rows, "runs": found}


def numbers(config: Config, steps: Sequence[int], seed: int) -> list[dict[str, float]]:
    """One seed's numbers at these steps."""
    run, rows, found = Run(replace(config, seed=seed)), [], []
    for step in range(1, steps[-1] + 1):
        rows.append(train.train_step(run, step)[0])
        if step not in steps:
            continue
        last = rows[-WINDOW:]
        held_out = next(iter(evaluation(run).values()))
        mean = {
            name: statistics.fmean(row[name] for row in last)
            for name in ("reward", "reward_kept", "grad_norm", "completion_length", "truncated")
        }
        idle = sum(row["groups_without_signal"] for row in last) / sum(r["groups"] for r in last)
        gaps = [row["logprob_gap"]["max"] or 0.0 for row in last]
        found.append(
            {"held-out accuracy": held_out["accuracy"]}
            | mean
            | {"groups without signal": idle, "logprob_gap": max(gaps)}
        )
    return found


def band(values: Sequence[float]) -> list[float]:
    """[median, lowest, highest]"""
    return [statistics.median(values), min(values), max(values)]
