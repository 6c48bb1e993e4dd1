"""The down-sampling rules against brute force over all subsets, in exact arithmetic."""

import math
import random
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch

from pods import RULES, down_sample, max_advantage, max_reward, max_variance, percentile

# ---- oracles -------------------------------------------------------------------------------------


def spread(values) -> int:
    """m^2 times the variance of whole numbers: the same order, and without rounding."""
    return len(values) * sum(value * value for value in values) - sum(values) ** 2


def as_integers(rewards) -> list[int]:
    """The rewards (floats are binary fractions) on a common integer scale."""
    rewards = rewards if isinstance(rewards, list) else rewards.tolist()  # exact for every dtype
    fractions = [Fraction(value) for value in rewards]
    scale = math.lcm(*(value.denominator for value in fractions))
    return [int(value * scale) for value in fractions]


def splits(values: list[int], m: int) -> list[list[int]]:
    """The candidates of the lemma: the k lowest and the m - k highest, k = 0..m."""
    x = sorted(values)
    return [x[:k] + x[len(x) - m + k :] for k in range(m + 1)]


def select(rewards, m: int, rule=max_variance) -> list[int]:
    """The indices of one group, after checking their form."""
    keep = rule(rewards, m)
    assert keep.dtype == torch.int64 and keep.shape == (m,)
    keep = keep.tolist()
    assert keep == sorted(set(keep)), "not ascending and distinct"
    return keep


# ---- max_variance --------------------------------------------------------------------------------

KINDS = {
    "a list of tied integers": lambda rng, n: [rng.randint(0, 2) for _ in range(n)],
    "continuous": lambda rng, n: [rng.gauss(0, 1) for _ in range(n)],
    "huge offset": lambda rng, n: [1e9 + rng.randint(0, 40) / 2**20 for _ in range(n)],
    "one outlier": lambda rng, n: [
        rng.choice([1e16, -1e16, 1e100]),
        *rng.choices([0, 0.1, 0.2], k=n - 1),
    ],
    "skewed": lambda rng, n: [2.0 ** rng.randint(0, 20) for _ in range(n)],
    "wide": lambda rng, n: [rng.randint(-1, 1) * 2.0 ** rng.randint(-24, 15) for _ in range(n)],
    "float16": lambda rng, n: torch.tensor([rng.gauss(0, 200) for _ in range(n)]).half(),
    "bfloat16": lambda rng, n: torch.tensor([rng.gauss(0, 1) for _ in range(n)]).bfloat16(),
    "float32 with an offset": lambda rng, n: 4096 + torch.tensor(rng.choices([0.0, 0.001, 1], k=n)),
    "bool": lambda rng, n: torch.tensor([rng.random() < 0.3 for _ in range(n)]),
    "int8": lambda rng, n: torch.tensor([rng.randint(-128, 127) for _ in range(n)]).to(torch.int8),
    "NumPy int64": lambda rng, n: np.array([rng.randint(-5, 5) for _ in range(n)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_max_variance_equals_brute_force_over_all_subsets(kind):
    rng = random.Random(kind)
    for _ in range(300):
        n = rng.randint(2, 9)
        m = rng.randint(2, n)
        rewards = KINDS[kind](rng, n)
        values = as_integers(rewards)
        got = spread([values[i] for i in select(rewards, m)])
        assert got == max(map(spread, combinations(values, m))), (rewards, m)


@pytest.mark.parametrize("shape", [(0,), (7,), (2, 1, 3)])
def test_a_batch_is_its_groups_one_by_one(shape):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 4, (*shape, 12), generator=generator)
    rewards = rewards + 10 * torch.arange(12 * math.prod(shape)).view(*shape, 12) // 24
    for m in (2, 5, 12):
        keep = max_variance(rewards, m)
        assert keep.shape == (*shape, m)
        groups = zip(keep.reshape(-1, m), rewards.reshape(-1, 12))
        assert all(row.tolist() == select(group, m) for row, group in groups)


@pytest.mark.parametrize(("offset", "over"), [(0, 1), (10**12, 1), (0, 2**-30), (0, 10), (1, 10)])
def test_ties_are_decided_as_documented(offset, over):
    """Lowest index first among equal rewards, most high rewards among splits of equal variance.

    Tenths are not exact in binary, so their ties would be decided by rounding.
    """
    rng = random.Random(0)
    for _ in range(400):
        n = rng.randint(2, 14)
        m = rng.randint(2, n)
        values = [rng.randint(0, rng.randint(1, 11)) for _ in range(n)]
        # The first of the best: the fewest low, the most high.
        kept = max(splits(values, m), key=spread)
        expected = []
        for value, count in Counter(kept).items():
            expected += [i for i in range(n) if values[i] == value][:count]
        rewards = [offset + value / over for value in values]
        assert select(rewards, m) == sorted(expected), (rewards, m)


HALVES = [0] * 9 + [1] * 7


@pytest.mark.parametrize(
    ("rule", "rewards", "m", "expected"),
    [
        # Not half and half: that has 17.6875 / 18.75 of the variance.
        (max_variance, [0, 0, 0, 0, 0, 1, 1, 10], 4, [0, 1, 2, 7]),
        # 0/1 rewards: half of each kind, one more 1 if m is odd, a rarer kind whole.
        (max_variance, HALVES, 4, [0, 1, 9, 10]),
        (max_variance, HALVES, 5, [0, 1, 9, 10, 11]),
        (max_variance, HALVES[:10], 5, [0, 1, 2, 3, 9]),
        # torch's sort, unless it is told to be stable, takes arbitrary ones of 64 equals.
        (max_variance, [1, 0] * 32, 16, list(range(16))),
        (max_variance, [0.2] * 6, 3, [0, 1, 2]),
        # In float32 these are all 1e8, and the first two would be kept.
        (max_variance, [1e8, 1e8 + 1, 1e8 + 2], 2, [0, 2]),
        # Near the limit of float64 a difference would overflow.
        (max_variance, [1e308, -1e308, 0, 1e308], 2, [0, 1]),
        (max_variance, [1.7e308, -1.7e308, 1.7e308, 2], 2, [0, 1]),
        # The middles of the four quarters.
        (percentile, list(range(64)), 4, [8, 24, 40, 56]),
        (percentile, list(range(64))[::-1], 4, [7, 23, 39, 55]),
        # The few right ones first, and then there may be no failure among the kept.
        (max_advantage, [0, 0, 1, 0, 0, 0, 1, 0], 3, [0, 2, 6]),
        (max_advantage, [1, 1, 0, 1, 0, 0, 0, 0], 3, [0, 1, 3]),
        # Ties, whatever rounding says of the mean: half right; 0.2 from 0.5 on both sides.
        (max_advantage, [0.2, 1.2, 0.2, 1.2], 2, [0, 1]),
        (max_advantage, [0.7, 0.4, 0.0, 0.3, 1.1], 3, [0, 2, 4]),
    ],
)
def test_rules_on_groups_that_can_be_checked_by_hand(rule, rewards, m, expected):
    assert select(rewards, m, rule) == expected
    assert rule([rewards, [0] * len(rewards)], m)[0].tolist() == expected


def test_the_rewards_are_left_alone():
    rewards = torch.tensor([3.0, 1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    before = rewards.tolist()
    assert not max_variance(rewards, 2).requires_grad
    assert rewards.tolist() == before and rewards.requires_grad


def test_large_groups_with_an_offset_and_outliers():
    generator = torch.Generator().manual_seed(3)
    grid = torch.randint(0, 1000, (8, 1024), generator=generator)
    grid[::3, 0] = 10**6  # an outlier in every third group
    keep = max_variance(grid.float() / 2**10, 256)
    assert keep.shape == (8, 256) and bool((keep.diff() > 0).all())
    for group, kept in zip(grid.tolist(), grid.gather(1, keep).tolist()):
        assert spread(kept) == max(map(spread, splits(group, 256)))


# ---- what rewards come in ------------------------------------------------------------------------

FORMS = {
    "float32": lambda values: torch.tensor(values),
    "NumPy float32": lambda values: np.array(values, np.float32),
    "float32 widened": lambda values: torch.tensor(values).double(),
    "float32 as a list": lambda values: torch.tensor(values).tolist(),
    "backwards": lambda values: np.array(values[::-1], np.float32)[::-1],
    "every second": lambda values: np.repeat(np.array(values), 2)[::2],
    "foreign bytes": lambda values: np.array(values, ">f4"),
    "objects": lambda values: np.array(values, object),
    "read-only": lambda values: np.broadcast_to(np.array(values), (len(values),)),
    "scalars": lambda values: [np.float32(value) for value in values],
}


@pytest.mark.parametrize("form", FORMS)
def test_values_decide_and_not_what_they_come_in(form):
    """Tenths tie exactly on paper; float32 is off by more than the noise of float64."""
    rng = random.Random(form)
    groups = [[0.1, 0.4, 0.7, 1.0]]
    for grid in ([0, 0.1, 0.2, 1, 1.1, 1.2], [i / 10 for i in range(12)]):
        groups += [rng.choices(grid, k=rng.randint(4, 40)) for _ in range(60)]
    for group in groups:
        m = 3 if len(group) == 4 else rng.randint(2, len(group))
        for rule in (max_variance, percentile):
            assert select(FORMS[form](group), m, rule) == select(group, m, rule), (group, m)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_device_without_float64_is_served_by_the_cpu(monkeypatch, rule, error):
    """Apple's devices refuse a conversion to float64; there the tensor is not on the CPU."""
    rewards, to, cpu, there = torch.rand(3, 9), torch.Tensor.to, torch.Tensor.cpu, [True]

    def refuses(tensor, *arguments, **options):
        if there[0] and torch.float64 in arguments:
            raise error("Cannot convert a MPS Tensor to float64 dtype")
        return to(tensor, *arguments, **options)

    def leaves(tensor):
        there[0] = False
        return cpu(tensor)

    expected = down_sample(rewards, 4, rule, torch.Generator().manual_seed(1))
    monkeypatch.setattr(torch.Tensor, "to", refuses)
    monkeypatch.setattr(torch.Tensor, "cpu", leaves)
    got = down_sample(rewards, 4, rule, torch.Generator().manual_seed(1))
    assert torch.equal(got, expected) and got.device == rewards.device and not there[0]


# ---- the other rules -----------------------------------------------------------------------------


def random_groups(count: int):
    rng = random.Random(4)
    for _ in range(count):
        n = rng.randint(2, 30)
        yield [rng.randint(0, 8) for _ in range(n)], rng.randint(2, n)


def test_max_reward_and_percentile_take_their_places_in_a_sorted_list():
    """Lowest index first among equals; the middles of m equal slices."""
    for rewards, m in random_groups(300):
        n = len(rewards)
        falling = sorted(range(n), key=lambda i: (-rewards[i], i))
        assert select(rewards, m, max_reward) == sorted(falling[:m])
        rising = sorted(range(n), key=lambda i: (rewards[i], i))
        middles = [math.floor(Fraction(2 * i + 1, 2 * m) * n) for i in range(m)]  # (i + 0.5) / m
        assert select(rewards, m, percentile) == sorted(rising[place] for place in middles)


def test_max_advantage_takes_what_is_farthest_from_the_mean_lowest_index_first():
    """In whole numbers: n times the distance from the mean."""
    rng = random.Random(5)
    for offset, scale in ((0, 1), (0, 2**20), (10**15, 1), (2**52, 1), (0, 2**1020)):
        for group, m in random_groups(100):
            group = [offset + scale * (rng.randint(-1, 1) if m % 2 else r - 4) for r in group]
            distance = [abs(len(group) * r - sum(group)) for r in group]
            order = sorted(range(len(group)), key=lambda i: (-distance[i], i))
            assert select([float(r) for r in group], m, max_advantage) == sorted(order[:m])


def test_random_subset_is_uniform_over_subsets():
    """The chi-square of 10 subsets (9 degrees of freedom) exceeds 27.9 once in a thousand seeds."""
    draws = 20_000
    generator = torch.Generator().manual_seed(5)
    rewards = torch.arange(5).expand(draws, 5)
    counts = Counter(map(tuple, RULES["random"](rewards, 2, generator).tolist()))
    assert set(counts) == set(combinations(range(5), 2))
    assert sum((count - draws / 10) ** 2 / (draws / 10) for count in counts.values()) < 27.9


def test_random_subset_repeats_with_its_generator_alone():
    rewards, random_subset = torch.zeros(3, 40), RULES["random"]
    state = torch.get_rng_state()
    first = random_subset(rewards, 8, torch.Generator().manual_seed(6))
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"
    torch.manual_seed(1)
    assert torch.equal(first, random_subset(rewards, 8, torch.Generator().manual_seed(6)))
    assert not torch.equal(first, random_subset(rewards, 8, torch.Generator().manual_seed(7)))
    assert not torch.equal(first[0], first[1]), "the groups share one draw"


@pytest.mark.parametrize("name", RULES)
def test_a_rule_by_name_has_the_same_contract(name):
    rewards = torch.randint(0, 5, (3, 2, 9), generator=torch.Generator().manual_seed(8))
    keep = down_sample(rewards, 4, name, torch.Generator().manual_seed(9))
    extra = [torch.Generator().manual_seed(9)] if name == "random" else []
    assert torch.equal(keep, RULES[name](rewards, 4, *extra))
    assert keep.shape == (3, 2, 4) and keep.dtype == torch.int64
    assert bool((keep.diff(dim=-1) > 0).all())
    assert down_sample(rewards, 9, name).tolist() == [[list(range(9))] * 2] * 3  # m == n: all
    assert torch.equal(down_sample(rewards, 4), max_variance(rewards, 4))  # the default


# ---- errors: each names the numbers --------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("rewards", "m", "message"),
    [
        ([3, 1, 2], 1, "m=1"),
        ([3, 1, 2], 2.5, "integer"),
        ([1, 0, 0.5], 4, "m=4.*n=3"),
        ([[1.0], [0.0]], 2, "m=2.*n=1"),
        ([], 2, r"empty group.*\[0\]"),
        (torch.tensor(1.0), 2, "empty group"),
        ([0.0, math.nan, 1.0], 2, r"nan at index \[1\]"),
        (torch.tensor([[0.0, 1.0], [-math.inf, 1.0]]), 2, r"-inf at index \[1, 0\]"),
    ],
)
def test_bad_input_is_refused_by_every_rule(rule, rewards, m, message):
    with pytest.raises((ValueError, TypeError), match=message):
        down_sample(rewards, m, rule)


def test_an_unknown_rule_is_named_with_the_choices():
    with pytest.raises(ValueError, match=r"'best'.*max_variance, max_reward, random, percentile"):
        down_sample([1, 2, 3], 2, "best")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[0, 1]] * 2, r"int64 of shape \[2, 2\]: need integer indices of shape \[2, 3\]"),
        ([[True, True, True, False]] * 2, r"torch\.bool of shape \[2, 4\]"),
        ([[0.0, 1.0, 2.0]] * 2, "float32"),
        ([[0, 1, 1], [0, 1, 2]], "must return 3 different indices from 0 to 3"),
        ([[0, 1, 2], [0, 1, 4]], "must return 3 different"),
        ([[0, 1, 2], [-1, 1, 2]], "must return 3 different"),
        ([[3, 0, 2], [1, 3, 0]], None),  # in any order
    ],
)
def test_a_rule_of_ones_own_is_checked(answer, message, monkeypatch):
    monkeypatch.setitem(RULES, "mine", lambda rewards, m: answer)
    rewards = torch.arange(8.0).view(2, 4)
    if message is None:
        keep = down_sample(rewards, 3, "mine")
        assert keep.tolist() == [[0, 2, 3], [0, 1, 3]] and keep.dtype == torch.int64
    else:
        with pytest.raises(ValueError, match=f"rule 'mine' .*{message}"):
            down_sample(rewards, 3, "mine")
