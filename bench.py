"""What PODS costs and what it buys, measured side by side in one run.

    python bench.py race       # accuracy against training time: GRPO, GRPO-GA, PODS, other rules
    python bench.py select     # the rule against torch.sort, the authors' loop and brute force
    python bench.py sampler    # tokens per second of each sampler, and the share of the prefill
    python bench.py update     # time and peak memory of the update against m
    python bench.py signal     # signal to noise of a group's gradient, measured and by formula
    python bench.py peers      # one step of TRL's GRPOTrainer and of train.py; needs trl==1.16.0
    python bench.py bands      # what the default run shows at steps 20, 50 and 100, over seeds
    python bench.py adapters   # what of an adapter's update survives being merged in bfloat16
    python bench.py gpu        # on a GPU, ten minutes: log-probs, memory, seconds of a step

What PODS buys is here: the measure, the arms, the race and its account. How it is run and drawn,
and the other parts, are in benches/, one question a file.

A number from one machine on one day says little, a ratio says more, and a ratio of two things timed
in turn in the same process says most: whatever slows the machine down then hits both. So
everything that is compared here is interleaved, repeated, and reported with its spread. Each
command prints a table and writes `NAME.json` (with the command and the machine) and, where a
picture helps, `NAME.png` to --out, by default `runs/bench`.

The race runs train.py's own step on train.py's own clock, evaluation excluded; its arms are
settings. Left out: comparisons of numbers that were not measured in the same run (the paper's own
are shown beside ours, never divided by them).

Legend: P prompts, n rollouts a prompt, m kept. An arm is one setting of train.py in the race.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the seconds of imports: no pages of traceback
    sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

import argparse
import math
import os
import shlex
from dataclasses import asdict, replace

import numpy as np
import torch
import transformers

from benches import adapters, bands, gpu, gradients, peers, sampler, selection, update
from benches.figures import draw_account, draw_race
from benches.heats import at_rates, run_heats
from benches.measure import write
from benches.paper import STEP_COST
from benches.standings import (
    FRACTION,
    Arm,
    Curve,
    arrivals,
    first_time,
    show_standings,
    standings,
    target,
    warn_of_edges,
)
from benches.sweeps import SWEEPS, difficulty, sweep
from support import presets, settings
from support.errors import InputError, explained

# ---- the measure ---------------------------------------------------------------------------------


def speedup(baseline: Curve, pods: Curve, fraction: float = FRACTION) -> float | None:
    """How many times sooner `pods` is as good as the baseline gets: the paper's measure.

    Args:
        baseline, pods: (time, accuracy) pairs on a common grid, each a mean over runs, without the
            anchor at time 0.
        fraction: of the baseline's best accuracy that has to be reached.

    Returns:
        The ratio of the first times at which each curve is there; None if one never is.
    """
    goal = target(baseline, fraction)
    theirs, ours = first_time(baseline, goal), first_time(pods, goal)
    return None if ours is None else theirs / ours


# ---- the race ------------------------------------------------------------------------------------

ARMS = {  # all of them with train.py's micro-batch, which is what P = 4 and m = 16 need
    "grpo": {"n": 16, "m": 16},
    "grpo-ga": {"n": 64, "m": 64},
    "pods": {"n": 64, "m": 16, "rule": "max_variance"},
    "random": {"n": 64, "m": 16, "rule": "random"},
    "max-reward": {"n": 64, "m": 16, "rule": "max_reward"},
    "percentile": {"n": 64, "m": 16, "rule": "percentile"},
    # Rivals, and PODS or GRPO with one thing changed; all train on as many rollouts as PODS.
    "reinforce": {"n": 16, "m": 16, "scale": "none"},  # with the group's mean as its baseline
    "2-grpo": {"n": 2, "m": 2, "prompts_per_step": 32},  # arXiv 2510.00977: as many, in pairs
    "grpo-signal": {"n": 16, "m": 16, "average_over": "signal"},
    "pods-signal": {"n": 64, "m": 16, "average_over": "signal"},
    "pods-accuracy": {"n": 64, "m": 16, "select_by": "accuracy"},
    "pods-all": {"n": 64, "m": 16, "advantages": "all"},  # the paper's appendix A.3
    "cppo": {"n": 64, "m": 16, "rule": "max_advantage", "advantages": "all"},  # arXiv 2503.22342
}
BASELINES = ("grpo-ga", "grpo")


def race(arguments: argparse.Namespace) -> dict:
    """Accuracy against training time for GRPO, GRPO-GA, PODS and the other rules.

    Every arm is a setting of train.py: same policy, prompts and micro-batch. The first tables give
    all arms one learning rate, the second ones the best of --grid to each of the --tuned arms. An
    arm's best rate has the highest accuracy on average over the race. What is reported: seconds a
    step by phase, groups without signal, peak of the mean curve, accuracy at the end, and how many
    times sooner (in training time, and in steps) an arm reaches 99% of a baseline's best, with the
    95% interval of a bootstrap over seeds.
    """
    base, _ = presets.parse(["--threads", str(arguments.threads), *arguments.train_flags])
    every, count = arguments.every, round(60 * arguments.minutes / arguments.every)
    if not count:
        raise InputError(f"--minutes {arguments.minutes:g}: give time for one evaluation at least")
    marks = [every * (i + 1) for i in range(count)]  # seconds of training
    if arguments.sweep == "difficulty":
        return difficulty(arguments, base, marks, {arm: ARMS[arm] for arm in ("grpo", "pods")})
    if arguments.sweep:
        return sweep(arguments, base, marks)

    grid = sorted({*arguments.grid, base.lr})
    racing = {
        arm: at_rates(replace(base, **ARMS[arm]), grid if arm in arguments.tuned else [base.lr])
        for arm in arguments.arms
    }
    arms = run_heats(racing, arguments.seeds, marks, arguments.jobs)
    common = {name: arm.only(base.lr) for name, arm in arms.items()}
    tuned = {name: arm for name, arm in arms.items() if len(arm.runs) > 1}

    spacing = every / 4  # of the common grid of times
    tables = {"common": standings(common, BASELINES, spacing)}
    show_standings(f"all at learning rate {base.lr:g}", *tables["common"])
    if tuned:
        tried = ", ".join(f"{lr:g}" for lr in grid)
        tables["tuned"] = standings(tuned, BASELINES, spacing)
        show_standings(f"each at its best of {tried}", *tables["tuned"])
        warn_of_edges(tuned)
    account = where_the_gain_comes_from(tuned or common, spacing)
    draw_race(common, tuned, spacing, arguments.out / "race.png")
    draw_account(arms, account, arguments.out / "race_account.png")
    return {
        "config": asdict(base),
        "seconds": marks[-1],
        "tables": {
            name: {"costs": costs, "gains": gains} for name, (costs, gains) in tables.items()
        },
        "account": account,
        "runs": {name: arm.as_json() for name, arm in arms.items()},
    }


def where_the_gain_comes_from(arms: dict[str, Arm], spacing: float) -> dict[str, dict]:
    """PODS against each baseline: how many fewer steps, and how much dearer a step.

    The ratio in time is the ratio in steps over the ratio of a step's costs, everything up to where
    each is at 99% of the baseline's best. If generating cost c times what it costs here, and the
    rest of a step the same, the ratio in time would be steps * cost(baseline, c) / cost(pods, c):
    the `curve`, over the seconds of generation over those of all the rest in a PODS step.
    """
    account = {}
    for baseline in BASELINES:
        if not {baseline, "pods"} <= arms.keys():
            continue
        there = arrivals(arms[baseline], arms["pods"], spacing)
        if there is None:
            account[baseline] = {"steps ratio": None, "step cost ratio": None}
            continue
        theirs, ours = there
        steps = theirs.step / ours.step
        here = ours.generate / (ours.time - ours.generate)
        one = {"steps ratio": steps, "step cost ratio": ours.cost() / theirs.cost(), "here": here}
        one["curve"] = [
            [c * here, steps * theirs.cost(c) / ours.cost(c)] for c in np.geomspace(0.01, 10, 61)
        ]
        if baseline == "grpo":
            one["with the paper's step cost"] = steps / STEP_COST
        account[baseline] = one
    return account


def race_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the race and its sweeps."""
    add, arms = parser.add_argument, list(ARMS)
    add("--minutes", type=float, default=0.3, help="training time of each run")
    add("--every", type=float, default=1.5, help="seconds between evaluations")
    add("--seeds", type=int, default=5, help="runs of each arm")
    add("--arms", nargs="+", default=arms[:6], choices=arms)
    add("--tuned", nargs="*", default=arms[:3], choices=arms, help="get --grid")
    add("--grid", type=float, nargs="+", default=[3e-4, 4.5e-4, 6.75e-4], help="learning rates")
    add("--sweep", choices=[*SWEEPS, "difficulty"], help="vary this instead")
    forget = "of --sweep difficulty: shares of the carries that a student forgets"
    add("--forget", type=float, nargs="+", default=[0.5, 0.85, 0.95], help=forget)
    add("--warm-start", type=int, default=600, help="steps of imitation for these")
    add("--jobs", type=int, default=min(2, os.cpu_count()), help="seeds at a time")
    add("train_flags", nargs="*", help="after --: flags of train.py, for all arms")


# ---- the command line ----------------------------------------------------------------------------

PARTS = {  # the subcommand: what it does, what flags it adds
    "race": (race, race_flags),
    "select": (selection.select, selection.add_flags),
    "sampler": (sampler.sampler, sampler.add_flags),
    "update": (update.update, update.add_flags),
    "signal": (gradients.signal_to_noise, gradients.add_flags),
    "peers": (peers.peers, peers.add_flags),
    "bands": (bands.bands, bands.add_flags),
    "adapters": (adapters.adapters, adapters.add_flags),
    "gpu": (gpu.gpu, gpu.add_flags),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """One subcommand a part; what all of them have comes first.

    Returns:
        The part's flags, and `function`, `bench` (the name of what it writes), `command`.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, (function, add_flags) in PARTS.items():
        about = {"help": function.__doc__.partition("\n")[0], "description": function.__doc__}
        added = commands.add_parser(name, formatter_class=raw, **about)
        added.set_defaults(function=function)
        added.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder to write")
        added.add_argument(
            "--threads", type=int, default=1, help="of the CPU; more is not steadier"
        )
        add_flags(added)
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if isinstance(number, (int, float))]
        if not all(0 < number < math.inf for number in numbers):
            raise InputError(f"{settings.flag(name)} {value}: must be a number above 0")
    if getattr(arguments, "sweep", None):
        arguments.bench += f"_{arguments.sweep}"
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
        result = arguments.function(arguments)
        path = write(arguments.out, arguments.bench, arguments.command, result)
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
