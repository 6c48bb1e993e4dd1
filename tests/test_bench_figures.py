"""What the pictures of a race show; the files themselves are written in test_bench.py."""

import made_up
import numpy as np
import pytest

import bench
from benches.figures import (
    COLORS,
    NAMES,
    draw_arms,
    draw_generation_cost,
    draw_mean,
    draw_phases,
    look,
)
from benches.measure import new_figure
from benches.standings import Arm


@pytest.fixture
def axes():
    return new_figure(1)[1][0]


def test_a_curve_begins_at_the_start_and_is_the_mean_with_its_standard_error(axes):
    accuracies = np.array([[0.1, 0.2], [0.3, 0.6]])
    draw_mean(axes, [0, 1], accuracies, "both", "C0")
    (line,) = axes.lines
    assert line.get_ydata().tolist() == pytest.approx([0.2, 0.4])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.1, 0.6))  # 0.2 -+ 0.1 and 0.4 +- 0.2

    draw_arms(axes, {"pods": made_up.arm(0.1)}, 0.5, "title")
    x, y = axes.lines[1].get_data()
    assert (x[0], y[0]) == (0, 0) and (x[-1], y[-1]) == pytest.approx((10, 1.0))


def test_each_arm_is_drawn_at_its_best_rate_which_is_named_where_several_were_tried(axes):
    arms = {"grpo": made_up.arm(0.1), "pods": made_up.arm(0.05, 0.2)}
    draw_arms(axes, arms, 0.5, "title")
    assert [line.get_label() for line in axes.lines] == ["GRPO", "PODS (max-variance), lr 0.002"]
    assert axes.lines[1].get_ydata()[2] == pytest.approx(0.2)  # after 1 s
    assert axes.lines[0].get_color() == COLORS["grpo"]


def test_every_arm_has_a_name_and_a_colour_of_its_own():
    styles = look(list(bench.ARMS)).values()
    assert {style["label"] for style in styles}.isdisjoint(set(bench.ARMS) - {*NAMES.values()})
    assert len({style["color"] for style in styles}) == len(bench.ARMS)
    assert look(["max_variance"])["max_variance"]["color"] == COLORS["pods"]  # a rule by its name


def test_where_arms_end_near_the_top_an_inset_shows_what_decides(axes):
    draw_arms(axes, {"grpo": made_up.arm(0.2), "pods": made_up.arm(0.05, 0.3)}, 0.5, "title")
    (inset,) = axes.child_axes
    low, high = inset.get_ylim()
    assert 0.85 <= low < 1 < high and len(inset.lines) == 2
    lower = new_figure(1)[1][0]
    draw_arms(lower, {"grpo": made_up.arm(0.01), "pods": made_up.arm(0.05)}, 0.5, "title")
    assert not lower.child_axes  # one of them is nowhere near
    later = new_figure(1)[1][0]
    draw_arms(later, {"grpo": made_up.arm(0.2), "pods": made_up.arm(0.1)}, 0.5, "title")
    assert not later.child_axes  # it would hide the curve of the one that comes late


def test_arms_of_a_sweep_differ_in_colour():
    colors = [style["color"] for style in look([f"n={n}" for n in (16, 32, 64)]).values()]
    assert len(set(colors)) == 3


def test_phases_are_stacked_to_the_whole_step(axes):
    draw_phases(axes, {"pods": made_up.arm(0.1).best[0].seconds})
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert tops == pytest.approx([0.25, 0.5])  # phases that take no time are left out


def test_the_cost_of_generation_is_drawn_for_each_baseline_that_was_reached(axes):
    account = {
        "grpo-ga": {"steps ratio": None, "step cost ratio": None},
        "grpo": {
            "steps ratio": 3.0,
            "step cost ratio": 1.5,
            "here": 1.0,
            "curve": [[0.1, 2.5], [1.0, 2.0], [10.0, 1.0]],
            "with the paper's step cost": 3 / 1.34,
        },
    }
    draw_generation_cost(axes, account)
    curve, here, paper, one = axes.lines
    assert curve.get_label() == "PODS against GRPO"
    assert (here.get_xdata()[0], here.get_ydata()[0]) == (1.0, 2.0)
    assert paper.get_ydata()[0] == 3 / 1.34 and one.get_ydata()[0] == 1


def test_an_arm_without_seeds_to_spare_has_no_band(axes):
    draw_arms(axes, {"pods": Arm({1e-3: [made_up.trace(0.1)]})}, 0.5, "one seed")
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == pytest.approx(1.0) and np.isfinite(band).all()
