"""Advantages and the loss against loops over tokens and finite differences.

test_trl_pods.py compares the loss and its gradient with TRL's.
"""

import math
import statistics

import pytest
import torch

from grpo import LOSS_TYPES, group_advantages, grpo_loss, importance_weights, k3_divergence

# ---- group advantages ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["std", "mean", "none", True, False])
def test_advantages_equal_the_textbook(scale):
    rewards = torch.randint(0, 5, (4, 3, 8), generator=torch.Generator().manual_seed(0)) / 4
    advantages = group_advantages(rewards, scale=scale)
    assert advantages.dtype == torch.float32 and advantages.shape == rewards.shape
    for row, group in zip(advantages.view(-1, 8), rewards.view(-1, 8).tolist()):
        mean, std = statistics.fmean(group), statistics.stdev(group)
        divisor = {"std": std + 1e-4, True: std + 1e-4, "mean": mean + 1e-4}.get(scale, 1.0)
        expected = [(r - mean) / divisor for r in group]
        assert row.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(("reward", "m"), [(1.2, 8), (0.2, 8), (0.1, 7), (1.1, 12), (1.2, 6)])
def test_equal_rewards_have_advantage_exactly_zero(reward, m, dtype):
    """The mean of equal floats is off by one rounding: 0.867 for all, with a small eps."""
    rewards = torch.full((2, m), reward, dtype=dtype)
    assert group_advantages(rewards, eps=0.0).tolist() == [[0.0] * m] * 2
    assert group_advantages([reward] * m, scale=False).tolist() == [0.0] * m


def test_rewards_that_differ_by_a_rounding_error_alone_are_equal():
    """The same parts added up in another order are not the same number."""
    sums = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.3 + 0.3]
    assert len(set(sums)) > 1
    assert group_advantages(sums).tolist() == [0.0] * 4
    shifted = torch.tensor([1.0, 1.0, 1.0, 1.0 + 2**-23], dtype=torch.float32)
    assert group_advantages(shifted).tolist() == [0.0] * 4
    # What is more than that is a signal, however small beside an offset.
    assert group_advantages([1e6, 1e6, 1e6 + 1e-6, 1e6]).abs().min() > 0
    assert group_advantages([2.0**49, 2.0**49 + 1]).abs().min() > 0
    assert group_advantages(torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)).abs().min() > 0


def test_advantages_of_one_reward_and_of_large_ones_in_half_precision():
    assert group_advantages([1.0], eps=0.0).tolist() == [0.0]  # not NaN
    large = torch.tensor([300, -300, 300, -300], dtype=torch.float16)  # their squares are infinite
    expected = torch.tensor([0.8660, -0.8660, 0.8660, -0.8660])
    torch.testing.assert_close(group_advantages(large, eps=0.0), expected, atol=1e-4, rtol=0)


# ---- the loss ------------------------------------------------------------------------------------


def loop_loss(update, advantages, mask, loss_type, longest, beta, cap, clip=0.2):
    """Token by token, as the formulas say it."""
    log_probs, old, ref, sampler = update
    sums, counts = [], []
    for row, advantage in enumerate(advantages.tolist()):
        sums.append(torch.tensor(0.0, dtype=log_probs.dtype))
        counts.append(0)
        for t in range(mask.shape[1]):
            if mask[row, t]:
                ratio = torch.exp(log_probs[row, t] - old[row, t])
                clipped = min(max(ratio, 1 - clip), 1 + clip)
                weight = min(math.exp(old[row, t] - sampler[row, t]), cap) if cap else 1.0
                loss = -weight * min(ratio * advantage, clipped * advantage)
                difference = ref[row, t] - log_probs[row, t]
                sums[-1] = sums[-1] + loss + beta * (torch.exp(difference) - difference - 1)
                counts[-1] += 1
    if loss_type == "grpo":
        return sum(s / max(count, 1) for s, count in zip(sums, counts)) / len(sums)
    return sum(sums) / (sum(counts) if loss_type == "dapo" else len(sums) * longest)


def random_update(seed, rows=5, T=7):
    """Ratios on both sides of the clip range, advantages of both signs, an empty completion."""
    generator = torch.Generator().manual_seed(seed)
    update = torch.randn(4, rows, T, generator=generator, dtype=torch.float64) / 3 - 2
    lengths = torch.randint(1, T + 1, (rows, 1), generator=generator)
    lengths[0] = 0
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return (update[0].requires_grad_(), *update[1:]), advantages, torch.arange(T) < lengths


@pytest.mark.parametrize("cap", [0, 1.2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_equal_a_loop_over_tokens(loss_type, beta, cap):
    """Clipped surrogate, the three means, KL, and the weights for a sampler's other policy."""
    for seed in range(6):
        update, advantages, mask = random_update(seed)
        log_probs, old, ref, sampler = update
        longest = (None, 9)[seed % 2]  # None: the 7 tokens of the batch
        options = {"loss_type": loss_type, "max_completion_length": longest, "beta": beta}
        options["importance"] = importance_weights(old, sampler, mask, cap) if cap else None
        loss = grpo_loss(log_probs, old, advantages, mask, ref_log_probs=ref, **options)
        expected = loop_loss(update, advantages, mask, loss_type, longest or 7, beta, cap)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        (gradient,), (right,) = (torch.autograd.grad(x, log_probs) for x in (loss, expected))
        assert (gradient - right).abs().max() < 1e-12
        # The loop's gradient is torch's too, so ask finite differences as well.
        assert torch.autograd.gradcheck(
            lambda x: grpo_loss(x, old, advantages, mask, ref_log_probs=ref, **options),  # noqa: B023
            log_probs,
        )


def test_importance_weights_are_capped_have_no_gradient_and_are_1_where_padded():
    old = torch.tensor([[0.0, -1.0, 0.5, 9.0]], requires_grad=True)
    sampler = torch.tensor([[0.0, 0.0, 0.0, float("-inf")]])
    weights = importance_weights(old, sampler, torch.tensor([[1, 1, 1, 0]]), 1.5)
    assert weights.tolist() == [pytest.approx([1.0, math.exp(-1), 1.5, 1.0])]
    assert not weights.requires_grad


@pytest.mark.parametrize("junk", [100.0, math.inf, -math.inf, math.nan])
def test_nothing_at_a_padded_position_reaches_the_loss(junk):
    """The mask comes before exp: multiplied by the mask, or hidden after exp, it would be NaN."""
    log_probs = torch.tensor([[0.1, junk]], requires_grad=True)
    weights, reference = torch.tensor([[1.0, junk]]), torch.tensor([[0.1, 0.0]])
    for options in ({}, {"beta": 0.5, "ref_log_probs": reference}, {"importance": weights}):
        log_probs.grad = None
        mask = torch.tensor([[1, 0]])
        loss = grpo_loss(log_probs, torch.zeros(1, 2), torch.tensor([-1.0]), mask, **options)
        loss.backward()
        assert loss.item() == pytest.approx(1.10517, abs=1e-5)
        assert log_probs.grad[0].tolist() == pytest.approx([1.10517, 0.0], abs=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("T", [0, 3])
def test_completions_without_tokens_contribute_zero(loss_type, T):
    log_probs = torch.full((2, T), -1.0, requires_grad=True)
    mask = torch.zeros(2, T)
    loss = grpo_loss(log_probs, torch.zeros(2, T), torch.ones(2), mask, loss_type=loss_type)
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad.tolist() == [[0.0] * T] * 2


@pytest.mark.parametrize("distance", [-1e4, -89.0, -5.0, 0.0, 5.0, 20.0, 21.0, 89.0, 1e4])
def test_one_token_far_from_the_reference_leaves_the_gradient_finite(distance):
    """exp(89) is no float32: unbounded, a single token would make every weight NaN."""
    reference, mask = torch.tensor([[distance, 0.5]]), torch.ones(1, 2)
    log_probs = torch.zeros(1, 2, requires_grad=True)
    divergence = k3_divergence(log_probs, reference, mask)
    divergence.sum().backward()
    assert bool(divergence.isfinite().all()) and bool((divergence >= 0).all())
    pull = log_probs.grad[0, 0].item()  # towards the reference, the more the farther
    assert abs(pull + math.expm1(min(distance, 20))) < 1e-6 * max(1, abs(pull))
    assert divergence[0, 1].item() == pytest.approx(math.exp(0.5) - 1.5)


def test_kl_without_a_reference_and_unknown_names_are_refused():
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="unknown scale 'max': choose one of std, mean, none"):
        group_advantages([1.0, 0.0], scale="max")
    with pytest.raises(ValueError, match="ref_log_probs"):
        grpo_loss(x, x, torch.ones(1), x + 1, beta=0.1)
    for normalizer in (None, 1.0):
        with pytest.raises(ValueError, match=r"'mean'.*grpo, dapo, dr_grpo"):
            grpo_loss(x, x, torch.ones(1), x + 1, loss_type="mean", normalizer=normalizer)
