"""What PODS costs and what it buys, measured side by side in one run.

    python bench.py race       # accuracy against training time: GRPO, GRPO-GA, PODS, other rules
    python bench.py sampler    # tokens per second of each sampler
    python bench.py update     # time of the update against m, prompts read once or with every row
    python bench.py signal     # signal to noise of a group's gradient, measured and by formula
    python bench.py peers      # one step of TRL's GRPOTrainer and of train.py; needs trl==1.16.0
    python bench.py bands      # what the default run shows at steps 20, 50 and 100, over seeds
    python bench.py gpu        # on a GPU, ten minutes: log-probs, memory, seconds of a step

    python bench.py race --arms grpo pods -- --preset cpu       # after --: flags of train.py

The race and its arms are here; how it is run, measured and drawn, and the other parts, are in
benches/, one question a file. Everything that is compared is interleaved, repeated and reported
with its spread; how much other work there was on the machine is part of each result. Each command
prints a table and writes `NAME.json` (with the command and the machine) to --out, the race also
`race.png`.

The race runs train.py's own step on its own clock, evaluation excluded; an arm is a setting of
train.py. Numbers that were not measured in the same run are never divided by each other.

Legend: P prompts, n rollouts a prompt, m kept.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the seconds of imports: no pages of traceback
    sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

import argparse
import inspect
import math
import os
import shlex
import time
from dataclasses import asdict, replace

import torch
import transformers

import benches.signal
from benches import bands, gpu, peers, sampler, update
from benches.figures import draw_race
from benches.heats import run_heats
from benches.measure import OTHERS, QUIET, table, train_settings, write
from benches.standings import speedup as speedup  # the paper's measure, for who imports bench
from benches.standings import standings
from support import settings
from support.errors import InputError, explained
from support.presets import RIVALS
from support.settings import Config

# What each arm changes of PODS with these n, m and prompts a step P. All train on P * m rollouts a
# step, except GRPO-GA; the rivals are train.py's presets.
ARMS = {
    "grpo": RIVALS["grpo"],
    "grpo-ga": RIVALS["grpo-ga"],
    "pods": lambda n, m, P: {},
    "random": lambda n, m, P: {"rule": "random"},
    "max-reward": lambda n, m, P: {"rule": "max_reward"},
    "percentile": lambda n, m, P: {"rule": "percentile"},
    "pods-accuracy": lambda n, m, P: {"select_by": "accuracy"},
} | RIVALS
BASELINES = ("grpo-ga", "grpo")
GRID = (1.5e-4, 3e-4, 6e-4, 1.2e-3)  # learning rates; the best of the three arms are inside


def racer(arm: str, base: Config) -> Config:
    """The settings of an arm: of `ARMS`, or n x m such as `128x8`, over those of all arms."""
    try:
        if arm in ARMS:
            return replace(base, **ARMS[arm](base.n, base.m, base.prompts_per_step))
        n, m = benches.signal.group_size(arm)
    except ValueError as error:
        known = f"{', '.join(ARMS)}, or n x m such as 128x8"
        raise InputError(f"--arms {arm}: is none of {known}") from error
    return replace(base, n=n, m=m)


def race(arguments: argparse.Namespace) -> dict:
    """Accuracy against training time for GRPO, GRPO-GA, PODS and the other rules.

    Every arm is a setting of train.py: same policy, prompts and micro-batch. The start is that of
    `--preset rare`, where selection has something to find, unless flags after -- say otherwise
    (`-- --preset cpu`: train.py's default). The first tables give all arms one learning rate, the
    second ones the best of --grid to each of the --tuned arms. An arm's best rate has the highest
    accuracy on average over the race. What is reported: seconds a step by phase, groups without
    signal, peak of the mean curve, accuracy at the end, and how many times sooner (in training
    time) an arm reaches 99% of a baseline's best, beside the median of that ratio over 90% to 99.5%
    of it, with the 95% interval of a bootstrap over seeds. Ctrl-C reports the seeds that are
    through; the same command goes on with the others.
    """
    base = train_settings(arguments, "--preset", "rare")
    every, count = arguments.every, round(60 * arguments.minutes / arguments.every)
    if not count:
        raise InputError(f"--minutes {arguments.minutes:g}: give time for one evaluation at least")
    marks = [every * (i + 1) for i in range(count)]  # seconds of training
    grid, racing = sorted({*arguments.grid, base.lr}), {}
    for arm in arguments.arms:
        rates = grid if arm in arguments.tuned else [base.lr]
        racing[arm] = {lr: replace(racer(arm, base), lr=lr) for lr in rates}
    seeds = range(base.seed, base.seed + arguments.seeds)
    arms, other_work = run_heats(racing, seeds, marks, arguments.jobs, arguments.out)

    common = {name: arm.only(base.lr) for name, arm in arms.items()}
    tuned = {name: arm for name, arm in arms.items() if len(arm.runs) > 1}
    spacing, tables = every / 4, {}  # of the common grid of times
    for name, raced in {"common": common, "tuned": tuned}.items():
        if raced:
            rates = grid if name == "tuned" else [base.lr]
            tables[name] = found = standings(raced, spacing, BASELINES)
            title = f"{name} learning rates ({', '.join(f'{lr:g}' for lr in rates)})"
            print(table(f"{title}: seconds a step by phase, accuracy", found["costs"]))
            print(table("times sooner than a baseline (95% interval)", found["gains"]))
    edges = [name for name, arm in tuned.items() if arm.best_rate in (grid[0], grid[-1])]
    if edges:
        print(f"warning: best at an edge of --grid, which proves little: {', '.join(edges)}")
    draw_race(common, tuned, spacing, arguments.out / "race.png")
    result = {"config": asdict(base), "seconds": marks[-1], "other_work": other_work}
    runs = {name: arm.as_json() for name, arm in arms.items()}
    return result | {"tables": tables, "runs": runs}


def race_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the race."""
    add, arms = parser.add_argument, list(ARMS)
    add("--minutes", type=float, default=0.6, help="training time of each run")
    add("--every", type=float, default=2.0, help="seconds between evaluations")
    add("--seeds", type=int, default=6, help="runs of each arm, from --seed on")
    known = f"{', '.join(arms)}, or n x m such as 128x8"
    add("--arms", nargs="+", default=arms[:3], metavar="ARM", help=known)
    add("--tuned", nargs="*", default=arms[:3], metavar="ARM", help="of these, get --grid")
    add("--grid", type=float, nargs="+", default=GRID, help="learning rates")
    add("--jobs", type=int, default=min(2, os.cpu_count()), help="seeds at a time")


PARTS = {  # the subcommand: what it does, what flags it adds
    "race": (race, race_flags),
    "sampler": (sampler.sampler, sampler.add_flags),
    "update": (update.update, update.add_flags),
    "signal": (benches.signal.signal, benches.signal.add_flags),
    "peers": (peers.peers, peers.add_flags),
    "bands": (bands.bands, bands.add_flags),
    "gpu": (gpu.gpu, gpu.add_flags),
}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Docstrings as they are written, and the default of every flag."""


def parse(argv: list[str]) -> argparse.Namespace:
    """One subcommand a part; what all of them have comes first, train.py's flags after `--`.

    Returns:
        The part's flags, and `function`, `bench` (its name), `train_flags`, `command`.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (function, add_flags) in PARTS.items():
        added = commands.add_parser(
            name,
            help=function.__doc__.partition("\n")[0],
            description=inspect.cleandoc(function.__doc__),
            usage=f"bench.py {name} [flags below] [-- flags of train.py]",
            formatter_class=Help,
            allow_abbrev=False,
        )
        added.set_defaults(function=function)
        added.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder to write")
        added.add_argument("--threads", type=int, default=1, help="of the CPU; more is no steadier")
        add_flags(added)
    arguments, unknown = parser.parse_known_args(argv[:end])
    if unknown:
        words = shlex.join(unknown)
        raise InputError(f"{arguments.bench} has no {words}: say -- {words} if that is train.py's")
    for name, value in vars(arguments).items():
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if isinstance(number, (int, float))]
        if not all(0 < number < math.inf for number in numbers):
            raise InputError(f"{settings.flag(name)} {value}: must be a number above 0")
    arguments.train_flags = argv[end + 1 :]
    arguments.command = shlex.join(["python", "bench.py", *argv])
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        arguments.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(arguments.threads)
        OTHERS.start()
        time.sleep(1.1)
        say_other_work()
        result = arguments.function(arguments)
        path = write(arguments.out, arguments.bench, arguments.command, result)
        say_other_work()
        print(f"\nwritten to {path}")
    except KeyboardInterrupt:
        print("\nbench.py: stopped before there was anything to report", file=sys.stderr)
        return 130
    except Exception as error:
        known = explained(error)
        if known is None:
            raise
        line, code = known
        print(f"bench.py: {line}", file=sys.stderr)
        return code
    return 0


def say_other_work() -> None:
    """Warn if other processes are at work: then nothing that follows should be quoted."""
    OTHERS.look()
    if (OTHERS.largest or 0.0) > QUIET:
        print(f"warning: other work on this machine keeps {OTHERS.largest:.1f} cores busy")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
