"""Runs of a race that nobody ran, for the tests of what is computed and drawn from them."""

import statistics

from benches.standings import Arm, Trace


def trace(rise: float, **changed: list[float]) -> Trace:
    """A run that gains `rise` accuracy a second, two steps a second, marked every second.

    Half of its time is generation, half of its groups are without signal. `changed` replaces parts
    of the curve.
    """
    marks = range(11)
    accuracy = [min(1.0, rise * t) for t in marks]
    curve = {"time": list(marks), "step": [2 * t for t in marks], "accuracy": accuracy}
    curve |= {"idle": [float(t) for t in marks], "generate": [0.5 * t for t in marks]}
    seconds = {"generate": 0.25, "score": 0.0, "select": 0.0, "update": 0.25, "sync": 0.0}
    return Trace(curve | changed, statistics.fmean(accuracy[1:]), seconds, until=10)


def arm(*rises: float, seeds: int = 3) -> Arm:
    """An arm whose runs rise like this at the learning rates 1e-3, 2e-3 and so on."""
    return Arm({1e-3 * (i + 1): [trace(rise)] * seeds for i, rise in enumerate(rises)})
