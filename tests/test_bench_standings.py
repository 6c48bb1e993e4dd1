"""Arms against each other, on runs whose standings can be computed by hand."""

import json
import random
import statistics

import made_up
import pytest

from benches.standings import (
    Arm,
    arrivals,
    bootstrap,
    common_grid,
    compare,
    first_time,
    mean_curve,
    standings,
    target,
    warn_of_edges,
    warn_of_load,
)
from support.run import PHASES


def test_the_common_grid_lies_on_straight_lines_between_the_marks():
    late = made_up.trace(0.1, time=[1.1 * t for t in range(11)])
    times, accuracies = common_grid([made_up.trace(0.1), late], 0.5)
    assert times.tolist() == [0.5 * i for i in range(1, 21)]  # the shorter run's end, without 0
    assert accuracies[0] == pytest.approx(0.1 * times)
    assert accuracies[1] == pytest.approx(0.1 * times / 1.1)
    assert common_grid([late], 0.5)[0][-1] == 10  # the last mark, though it went on to 11


def test_the_common_grid_of_steps_ends_with_the_run_of_fewest_steps():
    slow = made_up.trace(0.1, step=list(range(11)))
    steps, idle = common_grid([made_up.trace(0.1), slow], 5, "step", "idle")
    assert steps.tolist() == [5, 10] and idle.tolist() == [[2.5, 5], [5, 10]]


def test_the_target_is_a_share_of_the_best_and_the_first_time_there_counts():
    curve = [(1, 0.2), (2, 0.8), (3, 0.5), (4, 0.8)]
    assert target(curve) == pytest.approx(0.99 * 0.8) and target(curve, 0.5) == 0.4
    assert first_time(curve, 0.5) == 2 and first_time(curve, 0.8) == 2
    assert first_time(curve, 0.9) is None


def test_a_mean_curve_is_the_mean_over_runs_at_each_time():
    assert mean_curve([1, 2], [[0.0, 0.5], [0.5, 1.0]]) == [(1, 0.25), (2, 0.75)]


def test_arms_are_compared_at_their_best_learning_rates():
    baseline, fast = made_up.arm(0.05, 0.1), made_up.arm(0.2, 0.01)
    assert baseline.best_rate == 2e-3 and fast.best_rate == 1e-3
    value, low, high = compare(baseline, fast, "time", 0.05)
    assert value == low == high == pytest.approx(2.0, rel=0.02)  # 9.9 s and 4.95 s
    assert compare(baseline, fast, "step", 0.05)[0] == pytest.approx(value)
    assert compare(fast, baseline, "time", 0.05)[0] == pytest.approx(0.5, rel=0.02)
    assert compare(fast, baseline.only(1e-3), "time", 0.05) == [None, 0.0, 0.0]  # never there


def test_intervals_draw_the_same_seeds_for_both_arms_and_choose_rates_anew():
    slow, fast = made_up.trace(0.1), made_up.trace(0.2)
    both = Arm({1e-3: [slow, fast]})
    assert compare(both, both, "time", 0.5) == [1.0, 1.0, 1.0]  # whichever seeds are drawn
    torn = Arm({1e-3: [slow, fast], 2e-3: [fast, slow]})
    assert [torn.drawn(seeds).best_rate for seeds in ([0, 0], [1, 1])] == [2e-3, 1e-3]
    assert torn.drawn([1, 1, 0]).runs == {1e-3: [fast, fast, slow], 2e-3: [slow, slow, fast]}


def test_an_arrival_counts_steps_and_seconds_up_to_the_target():
    theirs, ours = arrivals(made_up.arm(0.1), made_up.arm(0.2), 0.5)
    assert (theirs.time, theirs.step, theirs.generate) == (10, 20, 5)
    assert (ours.time, ours.step, ours.generate) == (5, 10, 2.5)
    assert ours.cost() == 0.5  # 0.25 s of generation and 0.25 s of the rest
    assert ours.cost(3) == 3 * 0.25 + 0.25


def test_bootstrap_of_a_mean_is_about_two_standard_errors_wide():
    rng = random.Random(0)
    values = [rng.gauss(5, 2) for _ in range(200)]
    low, high = bootstrap(lambda chosen: statistics.fmean(values[i] for i in chosen), 200)
    mean, error = statistics.fmean(values), statistics.stdev(values) / 200**0.5
    assert low == pytest.approx(mean - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.3 * error)


def test_bootstrap_counts_a_curve_that_never_arrives_as_0():
    assert bootstrap(lambda chosen: 3.0, 5) == [3.0, 3.0]
    low, high = bootstrap(lambda chosen: None if 0 in chosen else 2.0, 5)
    assert (low, high) == (0.0, 2.0)


def test_standings_are_two_tables_over_the_same_arms():
    arms = {"grpo": made_up.arm(0.05, 0.1), "pods": made_up.arm(0.2)}
    costs, gains = standings(arms, ["grpo", "grpo-ga"], 0.05)
    assert [row["arm"] for row in costs] == [row["arm"] for row in gains] == ["grpo", "pods"]
    grpo, pods = costs
    assert grpo["lr"] == 2e-3 and grpo["peak"] == grpo["final"] == pytest.approx(1.0)
    assert grpo["s/step"] == sum(grpo[phase] for phase in PHASES) == 0.5
    assert pods["steps"] == 20 and pods["no signal"] == 0.5 and pods["+-"] == 0
    assert gains[0]["time vs grpo"] is None  # itself
    assert gains[1]["time vs grpo"] == compare(arms["grpo"], arms["pods"], "time", 0.05)
    assert gains[1]["step vs grpo"] and gains[1]["time vs grpo-ga"] is None  # not in the race


def test_an_arm_survives_json():
    arm = made_up.arm(0.1, 0.2)
    assert Arm.from_json(json.loads(json.dumps(arm.as_json()))) == arm


def test_a_rate_near_the_edge_is_said(capsys):
    inside = made_up.arm(0.1, 0.2, 0.1)
    warn_of_edges({"pods": inside})
    assert not capsys.readouterr().out
    last = [made_up.trace(rise) for rise in (0.3, 0.1, 0.1)]  # one seed of three is best there
    torn = Arm({1e-3: inside.runs[1e-3], 2e-3: inside.runs[2e-3], 4e-3: last})
    assert torn.best_rate == 2e-3
    warn_of_edges({"pods": torn})
    assert "0.002 to 0.004" in capsys.readouterr().out


def test_a_loaded_machine_is_said(capsys):
    def arms(slower: float) -> dict[str, Arm]:
        runs = [made_up.trace(0.1) for _ in range(3)]
        for i, run in enumerate(runs):
            run.seconds["update"] = 1.0 + slower * i - run.seconds["generate"]
        return {"pods": Arm({1e-3: runs})}

    warn_of_load(arms(0.1))
    assert not capsys.readouterr().out
    warn_of_load(arms(1.0))
    assert "1.0, 2.0, 3.0 times" in capsys.readouterr().out
