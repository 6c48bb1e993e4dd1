"""Signal and noise by the formula, against every group that there can be, one by one."""

import itertools
import math

import pytest
import torch

from benches.allocation import (
    COMPARED,
    Moments,
    best_share,
    formula,
    group_gradients,
    kept_right,
    measured,
    moments,
)
from pods import down_sample

# A made-up pool: gradients of two right and three wrong rollouts.
GRADIENTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([True, False, False, True, False])
N = len(RIGHT)


def subsets_kept(rewards: torch.Tensor, rule: str, m: int) -> list[tuple[int, ...]]:
    """What the rule may keep, equally likely: one subset, or any for the random rule."""
    if rule == "random":
        return list(itertools.combinations(range(len(rewards)), m))
    return [tuple(down_sample(rewards, m, rule).tolist())]


def estimate(drawn: tuple[int, ...]) -> torch.Tensor:
    """(1/m) sum A_i g_i of these rollouts of the pool, as it is written."""
    rewards = [float(RIGHT[i]) for i in drawn]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    total = torch.zeros(3, dtype=torch.float64)
    for i, r in zip(drawn, rewards):
        if deviation > 0:
            total += (r - mean) / deviation * GRADIENTS[i] / len(rewards)
    return total


def every_estimate(rule: str, n: int, m: int) -> torch.Tensor:
    """The estimates of all N^n groups, each as often as the rule may keep something else."""
    found = []
    for group in itertools.product(range(N), repeat=n):
        rewards = RIGHT[list(group)].double()
        for kept in subsets_kept(rewards, rule, m):
            found.append(estimate(tuple(group[i] for i in kept)))
    return torch.stack(found)


@pytest.mark.parametrize("rule", COMPARED)
@pytest.mark.parametrize(("n", "m"), [(4, 2), (3, 3)])
def test_the_formula_is_exact(rule, n, m):
    estimates = every_estimate(rule, n, m)
    signal = estimates.mean(0).square().sum().item()
    noise = estimates.var(0, correction=0).sum().item()
    expected = formula(moments(GRADIENTS, RIGHT), rule, n, m)
    assert (expected.signal, expected.noise) == pytest.approx((signal, noise), rel=1e-9)
    # The direction is that of the right ones' mean less the wrong ones', whatever is kept.
    goal = GRADIENTS[RIGHT].mean(0) - GRADIENTS[~RIGHT].mean(0)
    cosine = torch.cosine_similarity(estimates.mean(0), goal, dim=0).item()
    assert cosine == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rule", COMPARED)
def test_how_many_right_ones_are_kept_over_all_outcomes(rule):
    n, m, p = 6, 3, 0.3
    chance = torch.zeros(m + 1, dtype=torch.float64)
    for outcome in itertools.product((0.0, 1.0), repeat=n):
        probability = math.prod(p if one else 1 - p for one in outcome)
        kept = subsets_kept(torch.tensor(outcome), rule, m)
        for subset in kept:
            chance[int(sum(outcome[i] for i in subset))] += probability / len(kept)
    assert kept_right(rule, n, m, p).tolist() == pytest.approx(chance.tolist(), abs=1e-12)


@pytest.mark.parametrize("rule", COMPARED)
def test_groups_drawn_by_the_products_own_rules_and_advantages_measure_the_same(rule):
    """grpo.py's advantages have another length (m - 1, not m), and the same signal to noise."""
    rewards, draw = RIGHT.double(), torch.Generator().manual_seed(1)
    estimates = group_gradients(GRADIENTS, rewards, rewards, rule, 8, 4, 40_000, draw)
    expected = formula(moments(GRADIENTS, RIGHT), rule, 8, 4)
    assert measured(estimates).ratio == pytest.approx(expected.ratio, rel=0.05)
    longer = 4 / 3  # m / (m - 1), of squares
    assert longer * measured(estimates).noise == pytest.approx(expected.noise, rel=0.05)


def test_what_the_rule_sees_may_be_another_reward():
    """Selected by a number that the gradients know of, the direction is another one."""
    rewards, draw = RIGHT.double(), torch.Generator().manual_seed(1)
    goal = GRADIENTS[RIGHT].mean(0) - GRADIENTS[~RIGHT].mean(0)
    seen = rewards + 0.1 * torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    means = [
        group_gradients(GRADIENTS, rewards, by, "max_variance", 16, 4, 20_000, draw).mean(0)
        for by in (rewards, seen)
    ]
    cosines = [torch.cosine_similarity(mean, goal, dim=0).item() for mean in means]
    assert cosines[0] > 0.999 and cosines[1] < 0.98


def test_the_mean_of_few_groups_is_not_taken_for_signal():
    """Of pure noise, |mean|^2 is the noise over G on average; what is reported is 0."""
    draw = torch.Generator().manual_seed(0)
    signals = [
        measured(torch.randn(20, 4, generator=draw)).signal  # noise 4, so 0.2 uncorrected
        for _ in range(1000)
    ]
    assert sum(signals) / 1000 == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize(("v1", "v0"), [(1.0, 1.0), (0.1, 1.0), (3.0, 0.5)])
def test_neymans_share_is_the_best_one(v1, v0):
    def ratio(s: float) -> float:
        return s * (1 - s) / ((1 - s) * v1 + s * v0)

    best = max((i / 10_000 for i in range(1, 10_000)), key=ratio)
    assert best_share(v1, v0) == pytest.approx(best, abs=1e-4)
    assert ratio(best_share(v1, v0)) == pytest.approx(1 / (v1**0.5 + v0**0.5) ** 2)


def test_equal_spreads_make_the_ratio_that_of_m_times_the_kept_variance():
    about = Moments(p=0.5, gap=2.0, v1=3.0, v0=3.0)
    certain = formula(about, "max_variance", 200, 16)  # 8 of each, nearly always
    assert certain.ratio == pytest.approx(16 * 0.25 * 2.0 / 3.0)


def test_moments_need_both_kinds():
    with pytest.raises(ValueError, match="0 of 5 are right"):
        moments(GRADIENTS, torch.zeros(5))
