"""Arms against each other, on runs whose standings can be computed by hand."""

import math
import random
import statistics

import made_up
import pytest
from matplotlib.figure import Figure

import bench
from benches.figures import COLORS, draw_arms
from benches.standings import (
    FRACTIONS,
    Arm,
    bootstrap,
    common_grid,
    compare,
    first_time,
    standings,
    target,
    times_sooner,
)
from support.run import PHASES


def test_the_common_grid_lies_on_straight_lines_between_the_marks():
    late = made_up.trace(0.1, time=[1.1 * t for t in range(11)])
    times, accuracies = common_grid([made_up.trace(0.1), late], 0.5)
    assert times.tolist() == [0.5 * i for i in range(1, 21)]  # the shorter run's end, without 0
    assert accuracies[0] == pytest.approx(0.1 * times)
    assert accuracies[1] == pytest.approx(0.1 * times / 1.1)
    assert common_grid([late], 0.5)[0][-1] == 10  # the last mark, though it went on to 11


def test_the_target_is_a_share_of_the_best_and_the_first_time_there_counts():
    curve = [(1, 0.2), (2, 0.8), (3, 0.5), (4, 0.8)]
    assert target(curve) == pytest.approx(0.99 * 0.8) and target(curve, 0.5) == 0.4
    assert first_time(curve, 0.5) == 2 and first_time(curve, 0.8) == 2
    assert first_time(curve, 0.9) is None
    assert target([(1, 0.0)]) == math.inf  # nobody is sooner than who never was right


def test_arms_are_compared_at_their_best_learning_rates():
    baseline, fast = made_up.arm(0.05, 0.1), made_up.arm(0.2, 0.01)
    assert baseline.best_rate == 2e-3 and fast.best_rate == 1e-3
    value, low, high = compare(baseline, fast, 0.05)
    assert value == low == high == pytest.approx(2.0, rel=0.02)  # 9.9 s and 4.95 s
    assert value == bench.speedup(baseline.curve(0.05), fast.curve(0.05))
    assert compare(fast, baseline, 0.05)[0] == pytest.approx(0.5, rel=0.02)
    assert compare(fast, baseline.only(1e-3), 0.05) == [None, 0.0, 0.0]  # never there


def test_the_median_over_fractions_is_no_prey_of_one_of_them():
    """The baseline is at 0.9 after 2 s and creeps on to 1; the arm jumps there after 3 s."""
    slow = made_up.trace(0, accuracy=[0, 0.4, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.98, 1.0])
    jump = made_up.trace(0, accuracy=[0, 0, 0.8, *[1.0] * 8])
    arms = Arm({1e-3: [slow]}), Arm({1e-3: [jump]})
    ratios = [bench.speedup(*[one.curve(0.25) for one in arms], at) for at in FRACTIONS]
    assert min(ratios) < 1 < 3 < max(ratios) and len(ratios) == 20
    assert times_sooner(*arms, 0.25, fractions=FRACTIONS) == statistics.median(ratios)
    low = Arm({1e-3: [made_up.trace(0, accuracy=[0, *[0.905] * 10])]})  # below 91%, never there
    assert times_sooner(arms[0], low, 0.25, fractions=FRACTIONS) is None


def test_intervals_draw_the_same_seeds_for_both_arms_and_choose_rates_anew():
    slow, fast = made_up.trace(0.1), made_up.trace(0.2)
    both = Arm({1e-3: [slow, fast]})
    assert compare(both, both, 0.5) == [1.0, 1.0, 1.0]  # in every draw of seeds
    torn = Arm({1e-3: [slow, fast], 2e-3: [fast, slow]})
    assert [torn.drawn(seeds).best_rate for seeds in ([0, 0], [1, 1])] == [2e-3, 1e-3]
    assert torn.drawn([1, 1, 0]).runs == {1e-3: [fast, fast, slow], 2e-3: [slow, slow, fast]}


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
    costs, gains = standings(arms, 0.05, bench.BASELINES).values()
    assert [row["arm"] for row in costs] == [row["arm"] for row in gains] == ["grpo", "pods"]
    grpo, pods = costs
    assert grpo["lr"] == 2e-3 and grpo["peak"] == grpo["final"] == pytest.approx(1.0)
    assert grpo["s/step"] == sum(grpo[phase] for phase in PHASES) == 0.5
    assert pods["steps"] == 20 and pods["no signal"] == 0.5 and pods["+-"] == 0
    assert gains[0]["time vs grpo"] is None  # itself
    assert gains[1]["time vs grpo"] == compare(arms["grpo"], arms["pods"], 0.05)
    assert gains[1]["median vs grpo"][0]
    assert "time vs grpo-ga" not in gains[1]  # not in the race


def test_where_no_baseline_races_the_first_arm_is_one():
    arms = {"16x16": made_up.arm(0.1), "64x16": made_up.arm(0.2)}
    assert standings(arms, 0.5, bench.BASELINES)["gains"][1]["time vs 16x16"] == [2.0, 2.0, 2.0]


def test_every_arm_has_a_colour_of_its_own():
    """And those that have none, such as 128x8, take another one each."""
    assert set(bench.ARMS) == set(COLORS) and len(set(COLORS.values())) == len(COLORS)
    axes, arms = Figure().subplots(), ["grpo", "16x16", "32x16", "pods"]
    draw_arms(axes, {name: made_up.arm(0.1) for name in arms}, 0.5, "title")
    colors = [str(line.get_color()) for line in axes.lines]
    assert len(set(colors)) == 4 and colors[::3] == [COLORS["grpo"], COLORS["pods"]]
