"""The weight that corrects for a sampler that is not quite the trainer's policy."""

import math

import pytest
import torch
from conftest import small

import train
from grpo import grpo_loss, importance_weights, loss_normalizer
from support.run import Run


def random_update(B: int = 5, T: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    lengths = torch.tensor([7, 1, 4, 7, 3])
    return {
        "log_probs": draw(B, T).requires_grad_(),
        "old_log_probs": draw(B, T),
        "sampler": draw(B, T),
        "advantages": draw(B),
        "mask": torch.arange(T) < lengths[:, None],
    }


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_weighted_loss_and_gradient_equal_a_loop_over_tokens(loss_type, beta):
    update, cap, clip = random_update(), 2.0, 0.2
    mask, current = update["mask"], update["log_probs"]
    reference = torch.zeros_like(update["sampler"])
    weights = importance_weights(update["old_log_probs"], update["sampler"], mask, cap)
    loss = grpo_loss(
        current,
        update["old_log_probs"],
        update["advantages"],
        mask,
        loss_type=loss_type,
        clip=clip,
        beta=beta,
        ref_log_probs=reference,
        importance=weights,
    )
    (gradient,) = torch.autograd.grad(loss, current)

    total = 0.0
    for b, t in mask.nonzero().tolist():
        old, sampler = update["old_log_probs"][b, t].item(), update["sampler"][b, t].item()
        weight = min(math.exp(old - sampler), cap)
        ratio, advantage = (current[b, t] - old).exp(), update["advantages"][b]
        clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
        difference = reference[b, t] - current[b, t]
        divergence = difference.exp() - difference - 1
        term = -weight * torch.minimum(ratio * advantage, clipped) + beta * divergence
        total = total + (term / mask[b].sum() if loss_type == "grpo" else term)
    expected = total / loss_normalizer(mask, loss_type, mask.shape[1])
    (expected_gradient,) = torch.autograd.grad(expected, current)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_weights_are_capped_have_no_gradient_and_are_1_where_padded():
    old = torch.tensor([[0.0, -1.0, 0.5, 9.0]], requires_grad=True)
    sampler = torch.tensor([[0.0, 0.0, 0.0, float("-inf")]])
    weights = importance_weights(old, sampler, torch.tensor([[1, 1, 1, 0]]), 1.5)
    assert weights.tolist() == [pytest.approx([1.0, math.exp(-1), 1.5, 1.0])]
    assert not weights.requires_grad


@pytest.mark.parametrize("junk", [float("inf"), float("nan"), -float("inf")])
def test_nothing_at_a_padded_position_reaches_the_weighted_loss(junk):
    update = random_update()
    mask = update["mask"]
    weights = importance_weights(update["old_log_probs"], update["sampler"], mask, 2.0)
    results = []
    for filled in (weights, weights.masked_fill(~mask, junk)):
        current = update["log_probs"].detach().requires_grad_()
        parts = current, update["old_log_probs"], update["advantages"], mask
        grpo_loss(*parts, importance=filled).backward()
        results.append(current.grad)
    assert torch.equal(*results) and results[0].isfinite().all()


def test_without_a_gap_the_weights_change_nothing():
    update = random_update()
    old, mask = update["old_log_probs"], update["mask"]
    parts = update["log_probs"], old, update["advantages"], mask
    weights = importance_weights(old, old, mask, 2.0)
    assert torch.equal(grpo_loss(*parts), grpo_loss(*parts, importance=weights))


def test_a_sampler_of_another_policy_is_measured_and_corrected():
    """Rollouts whose reported log-probs are 0.1 too low: every weight is exp(0.1)."""
    stats = {}
    for cap in (0.0, 2.0):
        run = Run(small(importance_cap=cap))
        _, prompt_ids = run.prompts(1)
        rollouts = run.sampler.generate(prompt_ids, 4, run.max_new_tokens, 1.0, seed=0)
        rollouts.log_probs -= 0.1
        advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2)
        stats[cap] = train.update(run.learner, rollouts, advantages, run.max_new_tokens)
        assert stats[cap]["logprob_gap"]["mean"] == pytest.approx(0.1, abs=1e-4)
        assert stats[cap]["logprob_gap"]["max"] == pytest.approx(0.1, abs=1e-3)
    ratio = stats[2.0]["grad_norm"] / stats[0.0]["grad_norm"]
    assert ratio == pytest.approx(math.exp(0.1), rel=1e-3)
