"""The bands are those of train.py's own rows."""

import statistics

import pytest
from conftest import metrics, small

from benches.bands import band, numbers


def test_the_numbers_are_those_that_the_run_logs(finished):
    at_3, at_6 = numbers(small(), [3, 6], seed=0)
    rows = metrics(finished)
    for found, step in ((at_3, 3), (at_6, 6)):
        logged = rows[1 : step + 1]
        assert found["held-out accuracy"] == rows[step]["eval_accuracy"]
        for name in ("reward", "reward_kept", "grad_norm", "truncated"):
            assert found[name] == pytest.approx(statistics.fmean(row[name] for row in logged))
        idle = sum(row["groups_without_signal"] for row in logged) / (2 * step)
        assert found["groups without signal"] == pytest.approx(idle)


def test_a_band_is_median_lowest_and_highest():
    assert band([3.0, 1.0, 2.0, 9.0]) == [2.5, 1.0, 9.0]
