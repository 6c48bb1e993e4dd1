"""What should a run look like? The default run at some of its steps, over seeds.

python bench.py bands                       # the bands of docs/it_does_not_learn.md
"""

import argparse
import statistics
from dataclasses import asdict, replace

import train
from benches.measure import OTHERS, evaluated, table, train_settings
from support.run import Run

WINDOW = 10  # steps: the numbers of a single one are those of a few prompts
MEANS = ("reward", "reward_kept", "grad_norm", "entropy", "completion_length", "truncated")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--seeds", type=int, default=8, help="runs, from --seed on")
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 50, 100], help="to look at")


def bands(arguments: argparse.Namespace) -> dict:
    """What a run shows at these steps: median, lowest and highest of the seeds.

    Held-out accuracy is the step's, everything else the mean of the ten steps up to it (the largest
    of the `logprob_gap`s). Nothing here depends on the machine, except for rounding.
    """
    base = train_settings(arguments)
    found = {step: [] for step in sorted(set(arguments.steps))}  # a row a seed
    for seed in range(base.seed, base.seed + arguments.seeds):
        run, logged = Run(replace(base, seed=seed)), []
        for step in range(1, max(found) + 1):
            logged.append(train.train_step(run, step)[0])
            if step in found:
                row = {"held-out accuracy": evaluated(run)["accuracy"]}
                found[step].append(row | summary(logged[-WINDOW:]))
        OTHERS.look()
    rows = []
    for step, runs in found.items():
        columns = {name: [run[name] for run in runs] for name in runs[0]}
        spread = {name: [statistics.median(v), min(v), max(v)] for name, v in columns.items()}
        rows.append({"step": step} | spread)
    print(table(f"{arguments.seeds} seeds: median (lowest-highest)", rows))
    return {"config": asdict(base), "rows": rows, "runs": list(found.values())}


def summary(rows: list[dict]) -> dict[str, float]:
    """What these steps' rows show together."""
    found = {}
    for name in MEANS:  # a step without an update has no entropy
        found[name] = statistics.fmean([row[name] for row in rows if row[name] is not None] or [0])
    idle = sum(row["groups_without_signal"] for row in rows) / sum(row["groups"] for row in rows)
    gaps = [row["logprob_gap"]["max"] or 0.0 for row in rows]
    return found | {"groups without signal": idle, "logprob_gap": max(gaps)}
