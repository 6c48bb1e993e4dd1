"""What if one thing were different? The race with n, with m, or with the rarity of success varied.

python bench.py race --sweep n          # or m
python bench.py race --sweep difficulty --forget 0.5 0.85 0.95
python bench.py race -- --preset rare   # the rarest of these starts, which is in the repository

Legend: n rollouts a prompt, m kept. An arm is one setting of train.py.
"""

import argparse
import io
import statistics
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benches.figures import draw_arms, draw_race
from benches.heats import at_rates, run_heats
from benches.measure import in_processes, new_figure
from benches.standings import show_standings, standings, warn_of_edges
from support import tiny
from support.files import save_model
from support.settings import Config

SWEEPS = {
    "n": {f"n={n}": {"n": n, "m": 16} for n in (16, 32, 64, 128, 256)},
    "m": {f"m={m}": {"n": 64, "m": m} for m in (2, 4, 8, 16, 32, 64)},
}


def sweep(arguments: argparse.Namespace, base: Config, marks: Sequence[float]) -> dict:
    """The paper's ablations: one number varied, everything else as in the race."""
    varied = SWEEPS[arguments.sweep]
    settings = {name: {base.lr: replace(base, **one)} for name, one in varied.items()}
    arms = run_heats(settings, arguments.seeds, marks, arguments.jobs)
    spacing = arguments.every / 4
    costs, gains = standings(arms, [next(iter(arms))], spacing)
    show_standings(f"sweep of {arguments.sweep} at learning rate {base.lr:g}", costs, gains)
    draw_race(arms, {}, spacing, arguments.out / f"{arguments.bench}.png")
    runs = {name: arm.as_json() for name, arm in arms.items()}
    result = {"config": asdict(base), "seconds": marks[-1]}
    return result | {"costs": costs, "gains": gains, "runs": runs}


def difficulty(
    arguments: argparse.Namespace, base: Config, marks: Sequence[float], arms: dict[str, dict]
) -> dict:
    """A baseline and PODS from starts where right answers are ever rarer, both tuned by --grid.

    The more a student forgets, the rarer a right answer at the start (see `rare_start`). With 16
    rollouts a prompt most groups then hold none, and there is nothing to learn from; with 64 there
    are four times as many chances for one, and max-variance selection always keeps it.

    Args:
        arms: the settings of the two, the baseline first.
    """
    prepare = partial(rare_start, arguments.out / "starts", arguments.warm_start)
    prepared = in_processes(arguments.jobs, prepare, arguments.forget)
    starts = {f"{forget:g}": one for forget, one in zip(arguments.forget, prepared)}
    grid, spacing = sorted({*arguments.grid, base.lr}), arguments.every / 4
    baseline, pods = arms
    settings = {
        f"{arm} {name}": at_rates(replace(base, **start, **setting), grid)
        for name, start in starts.items()
        for arm, setting in arms.items()
    }
    every = run_heats(settings, arguments.seeds, marks, arguments.jobs)
    result = {"config": asdict(base), "seconds": marks[-1], "starts": {}}
    figure, axes = new_figure(len(starts))
    for name, ax in zip(starts, axes):
        raced = {arm: every[f"{arm} {name}"] for arm in arms}
        started = [run.curve["accuracy"][0] for run in raced[pods].runs[base.lr]]
        first = statistics.fmean(started)
        costs, gains = standings(raced, [baseline], spacing)
        show_standings(f"start {name}, {first:.1%} right", costs, gains)
        warn_of_edges(raced)
        runs = {name: arm.as_json() for name, arm in raced.items()}
        result["starts"][name] = {"start": first, "costs": costs, "gains": gains, "runs": runs}
        draw_arms(ax, raced, spacing, f"{first:.1%} right at the start")
    figure.savefig(arguments.out / f"{arguments.bench}.png", dpi=110)
    return result


def rare_start(folder: Path, steps: int, forget: float) -> dict[str, str]:
    """A policy warm-started by a more forgetful student, and the sums that suffer most from it.

    The policy is kept in `folder`, and used again if it is there.

    Returns:
        The settings of train.py that choose them.
    """
    model = folder / f"forget_{forget:g}_{steps}"
    if not model.is_dir():
        with redirect_stdout(io.StringIO()):
            policy = tiny.warm_start(steps=steps, student=tiny.forgetful(forget))
        save_model(policy, tiny.make_tokenizer(), model)
    return {"model": str(model), "task": "carries"}
