"""Micro-batches: every rollout that has a gradient once, cut to its length, and one for nothing."""

import pytest
import torch
from conftest import random_model, small

from rollouts import Rollouts
from support.learner import idle_batch, in_order, micro_batches

ADVANTAGES = torch.tensor([[1.0, 0.0, -0.5, 0.5], [0.0, 0.0, 2.0, -2.0]])


@pytest.fixture
def kept() -> Rollouts:
    """P = 2 prompts, m = 4 rollouts each; a token says which row it is of."""
    lengths = torch.tensor([[2, 5, 0, 3], [7, 1, 4, 4]])
    mask = torch.arange(7) < lengths[..., None]  # [2, 4, 7]
    ids = (torch.arange(8).view(2, 4, 1) + 10).expand(2, 4, 7)
    prompt_mask = torch.tensor([[False, True, True], [True, True, True]])
    return Rollouts(
        torch.tensor([[0, 1, 2], [3, 4, 5]]),
        prompt_mask,
        ids.masked_fill(~mask, 0),
        mask,
        torch.arange(56.0).view(2, 4, 7),
        torch.ones(2, 4, dtype=torch.bool),
        [["text"] * 4] * 2,
    )


def rows_of(batch) -> list[int]:
    """Which of the 8 rows a micro-batch holds, read from its tokens (row 2 has none)."""
    return [int(ids[3]) - 10 if mask.any() else 2 for ids, mask in zip(batch.input_ids, batch.mask)]


@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_every_rollout_with_a_gradient_is_there_once_with_its_own_numbers(kept, size):
    batches = micro_batches(kept, ADVANTAGES, small(micro_batch=size))
    rows = [row for batch in batches for row in rows_of(batch)]
    assert sorted(rows) == [0, 2, 3, 6, 7]
    assert max(len(batch.mask) for batch in batches) <= size
    for batch in batches:
        for i, row in enumerate(rows_of(batch)):
            p, r = divmod(row, 4)
            T = batch.mask.shape[1]
            assert batch.advantages[i] == ADVANTAGES[p, r]
            assert torch.equal(batch.mask[i], kept.mask[p, r, :T])
            assert torch.equal(batch.sampled[i], kept.log_probs[p, r, :T])
            assert torch.equal(batch.input_ids[i, :3], kept.prompt_ids[p])
            assert torch.equal(batch.input_ids[i, 3:], kept.completion_ids[p, r, :T])
            expected = torch.cat([kept.prompt_mask[p], kept.mask[p, r, :T]])
            assert torch.equal(batch.attention_mask[i], expected)


def test_the_longest_come_first_and_no_batch_is_longer_than_its_longest(kept):
    batches = micro_batches(kept, ADVANTAGES, small(micro_batch=2))
    assert [batch.mask.shape[1] for batch in batches] == [4, 3, 0]
    lengths = [int(length) for batch in batches for length in batch.mask.sum(-1)]
    assert lengths == sorted(lengths, reverse=True)


def test_rows_are_ordered_by_what_computes_fewer_tokens():
    """Two prompts of 4 rollouts, micro-batches of 4. Mixed: 4 prompts are read; apart: 2.

    By length 4 * 9 + 4 * 2 completion tokens, by prompt 4 * 9 + 4 * 9: 28 more, with padding.
    """
    rows, lengths = list(range(8)), [9, 9, 2, 2, 9, 9, 2, 2]
    for L, checkpointing, expected in (
        (13, False, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (15, False, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (15, True, [[0, 1, 4, 5], [2, 3, 6, 7]]),  # each row is read whole
    ):
        config = small(micro_batch=4, gradient_checkpointing=checkpointing)
        assert in_order(rows, lengths, 4, L, config) == expected
    # Nothing to lose where rows are equally long, and the longest row is in the first micro-batch.
    assert in_order(rows, [5] * 8, 4, 1, small(micro_batch=4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    later = in_order(rows, [3, 3, 1, 1, 3, 9, 3, 1], 4, 50, small(micro_batch=4))
    assert later == [[5, 4, 6, 7], [0, 1, 2, 3]]
    # Rows without a gradient are missing: the group is smaller, its number the same.
    assert in_order([0, 3, 6], [2, 1, 1, 2, 1, 1, 2], 4, 9, small(micro_batch=2)) == [[0, 3], [6]]


def test_rollouts_without_advantage_are_computed_with_a_kl_alone(kept):
    batches = micro_batches(kept, ADVANTAGES, small(beta=0.1))
    assert sorted(row for batch in batches for row in rows_of(batch)) == list(range(8))
    assert micro_batches(kept, torch.zeros(2, 4), small()) == []


def test_the_idle_batch_is_a_forward_pass_whose_tokens_do_not_count(kept):
    idle = idle_batch(kept)
    assert len(idle.mask) == 1 and not idle.mask.any() and idle.attention_mask.any()
    model = random_model("qwen2")
    values = idle.log_probs(lambda *arguments: (model, arguments), 0.7)
    assert values[1][2:] == (2, 0.7)  # T of its one row, and the temperature
