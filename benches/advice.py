"""Which n and m to take? From a run's own log, how far a second of training gets with each.

    python bench.py signal --pool 256 --ages 1 --run runs/...

The log has the pass rate of every prompt and the seconds of every phase; how much dearer or cheaper
other n are to generate is timed with the run's own sampler, since the first rollouts cost most.
allocation.py's formula says what signal and noise each n and m would have had on those prompts,
given how alike right and wrong answers are (`Moments`, from a few pools).

What is that worth? Adam, like a gradient that is clipped, makes a step whose length hardly depends
on the gradient's. What counts is its direction: with signal to noise x, the cosine between an
update and its expectation is about sqrt(x / (1 + x)), since an update's squared length is signal
plus noise. So progress is taken to be the cosine, a second. Signal to noise a second would go on
rewarding ever larger groups, where a step's direction is long clear.

Left out: that a rollout in a small update is dearer to train on than one in a large update, and
that other n and m may like another learning rate.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from benches.allocation import COMPARED, Moments, Signal, formula, kept_right
from benches.measure import interleaved, ratio
from support.errors import InputError
from support.files import read_rows
from support.run import Run
from support.settings import Config

SIZES = (16, 32, 64, 128)  # n, besides the run's own
KEPT = (2, 4, 8, 16, 32, 64)  # m


def advice(
    folder: Path, config: Config, pools: Sequence[dict], dearer: Mapping[int, float]
) -> list[dict]:
    """Rows of n, and the progress a second of each m over that of the run's own n and m.

    Args:
        folder: the run's, with metrics.jsonl.
        pools: as `gradients.py` measures them.
        dearer: see `generation`.

    Raises:
        InputError: there is no log, or one that has no pass rates.
    """
    steps = logged(folder, config)
    typical, (make, train) = typical_moments(pools), prices(steps, config)

    def of(n: int, m: int) -> float:
        return progress(steps, typical, config.rule, n, m, make * dearer[n], train)

    own, rows = of(config.n, config.m), []
    for n in sorted(dearer):
        ratios = {m: of(n, m) / own if m <= n and own else None for m in sorted({*KEPT, config.m})}
        rows.append({"n": n} | {f"m={m}": ratio for m, ratio in ratios.items()})
    return rows


def logged(folder: Path, config: Config) -> list[dict]:
    """The steps of a run's log. Raises InputError if no advice follows from it: see `advice`."""
    if config.rule not in COMPARED or config.advantages != "kept":
        raise InputError(f"--run {folder}: no formula for --advantages all, CPPO's rule")
    steps = [row for row in read_rows(folder / "metrics.jsonl") if "pass_rates" in row]
    if not steps:
        raise InputError(f"--run {folder}: no metrics.jsonl with pass_rates, of a step or more")
    return steps


def generation(run: Run, sizes: Iterable[int], rounds: int = 2) -> dict[int, float]:
    """What a step's generation costs with each n, over what it costs with the run's own."""
    _, prompt_ids = run.prompts(1)
    inputs = run.max_new_tokens, run.config.temperature
    calls = {
        n: partial(run.sampler.generate, prompt_ids, n, *inputs, seed=0)
        for n in {*sizes, run.config.n}
    }
    times = interleaved(calls, rounds)
    return {n: ratio(times, n, run.config.n)[0] for n in sorted(calls)}


def typical_moments(pools: Sequence[dict]) -> Moments:
    """The median prompt's."""
    mixed = [pool for pool in pools if pool["cases"]]
    medians = {key: statistics.median(p[key] for p in mixed) for key in ("gap", "v1", "v0")}
    return Moments(p=0.5, **medians)


def prices(steps: Sequence[dict], config: Config) -> tuple[float, float]:
    """Seconds to make and score a prompt's n rollouts, and to train on one (idle ones are not)."""
    seconds = {key: sum(row["seconds"][key] for row in steps) for key in steps[0]["seconds"]}
    groups = sum(row["groups"] for row in steps)
    trained = groups - sum(row["groups_without_signal"] for row in steps)
    make = (seconds["generate"] + seconds["score"]) / groups
    return make, seconds["update"] / max(1, trained * config.m)


def progress(
    steps: Sequence[dict], typical: Moments, rule: str, n: int, m: int, make: float, train: float
) -> float:
    """The mean cosine of these steps' updates over their mean seconds, had they had n and m.

    Args:
        make: seconds to make n rollouts of a prompt.
        train: seconds to train on one rollout.
    """
    cosines, seconds = 0.0, 0.0
    for row in steps:
        groups = [group(rate, typical, rule, n, m) for rate in row["pass_rates"]]
        cosines += cosine(groups)
        seconds += make * len(groups) + m * train * sum(busy for _, busy in groups)
    return cosines / seconds


def cosine(groups: Sequence[tuple[Signal, float]]) -> float:
    """Between an update on these groups and its expectation, on average; 0 if there is no update.

    Different prompts' directions are taken to be at right angles. With probability b some group has
    a signal; among such updates signal is 1/b^2 times as large and the squared length 1/b times.

    Args:
        groups: see `group`.
    """
    signal = sum(one.signal for one, _ in groups)
    length = signal + sum(one.noise for one, _ in groups)  # squared
    b = 1 - math.prod(1 - busy for _, busy in groups)
    return math.sqrt(b * signal / length) if length else 0.0


@lru_cache(maxsize=10_000)
def group(rate: float, about: Moments, rule: str, n: int, m: int) -> tuple[Signal, float]:
    """A prompt with this pass rate: signal and noise, and how likely its group has any."""
    if not 0 < rate < 1:
        return Signal(0.0, 0.0), 0.0
    busy = kept_right(rule, n, m, rate)[1:-1].sum().item()
    return formula(replace(about, p=rate), rule, n, m), busy
