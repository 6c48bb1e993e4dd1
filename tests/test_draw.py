"""One draw from many probabilities: against the softmax, exact sums, and at the edges."""

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from conftest import chi_square
from torch.utils._python_dispatch import TorchDispatchMode

from rollouts import draw


def zipf(V: int, zeros: Sequence[int] = ()) -> torch.Tensor:
    """Probabilities from a third to far below 2**-24, in no order, float32 [V]."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    weights = 1 / torch.arange(1, V + 1, dtype=torch.float64)[order] ** 2.5
    weights[list(zeros)] = 0
    return (weights / weights.sum()).float()


@pytest.mark.parametrize("V", [19, 5000])
def test_tokens_have_the_probabilities_of_their_row(V):
    """Two rows that rollouts share in no order; the same draws are not of a policy a bit warmer."""
    rows = torch.stack([zipf(V), zipf(V).flip(0)])
    row = torch.randint(2, (40_000,), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    token = torch.cat([draw(rows, part, generator) for part in row.split(2000)])
    for r in (0, 1):
        counts, draws = Counter(token[row == r].tolist()), int((row == r).sum())
        assert chi_square(counts, dict(enumerate(rows[r].tolist())), draws) < 4
        warmer = rows[r] ** 0.95 / (rows[r] ** 0.95).sum()
        assert chi_square(counts, dict(enumerate(warmer.tolist())), draws) > 8


def test_the_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should_be():
    """Half of the mass in 150,000 tokens of 3e-6 each, behind the other half in one."""
    V, draws = 150_001, 16_000
    probabilities = torch.full((1, V), 0.5 / (V - 1))
    probabilities[0, 0] = 0.5
    generator, row = torch.Generator().manual_seed(0), torch.zeros(500, dtype=torch.long)
    token = torch.cat([draw(probabilities, row, generator) for _ in range(draws // 500)])
    counts = Counter((token + V // 20 - 1).div(V // 20, rounding_mode="floor").tolist())
    assert chi_square(counts, {0: 0.5} | dict.fromkeys(range(1, 21), 0.025), draws) < 4


@pytest.mark.parametrize("zeros", [(), (0, 1, 700, 1998, 1999)])
def test_the_token_is_the_first_whose_sum_exceeds_u(zeros, monkeypatch):
    """Against sums in whole numbers, just below and just above every token's own."""
    probabilities = zipf(2000, zeros)
    units = [round(p * 2.0**52) for p in probabilities.double().tolist()]
    sums = list(itertools.accumulate(units))
    edges = [0.0, *((edge + side) / sums[-1] for edge in sums for side in (-0.5, 0.5)), 1 - 2**-53]
    edges = [u for u in edges if 0 <= u < 1]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: u)
    u = torch.tensor(edges, dtype=torch.float64)[:, None]
    token = draw(probabilities[None], torch.zeros(len(u), dtype=torch.long), torch.Generator())
    expected = [bisect.bisect_right(sums, u * sums[-1]) for u in edges]
    assert token.tolist() == expected
    drawn = set(token.tolist())
    assert not drawn & set(zeros)
    assert drawn == {i for i, unit in enumerate(units) if unit > 0}  # down to 1e-9, everything


def test_the_vocabulary_may_be_larger_than_multinomial_allows():
    """And the last of its 2**24 + 3 tokens is found, for which float32 sums have no place."""
    probabilities = torch.full((1, 2**24 + 3), 0.5 / (2**24 + 2))
    probabilities[0, -1] = 0.5
    token = draw(probabilities, torch.zeros(4, dtype=torch.long), torch.Generator().manual_seed(0))
    assert (token == 2**24 + 2).any() and (token < 2**24).any()


def test_a_draw_takes_one_random_number_a_rollout_and_waits_for_nothing():
    """On a GPU, asking for a number's value or a mask's length would stop everything until then."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    with Watch():
        draw(torch.full((2, 1000), 1e-3), torch.tensor([0, 1, 1]), generator)
    assert not [name for name in called if "_local_scalar_dense" in name or "nonzero" in name]
    torch.rand(3, dtype=torch.float64, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())
