"""The GRPO loss on the kept rollouts: group advantages, the clipped surrogate.

    advantages = group_advantages(rewards)                             # [P, m] -> [P, m]
    log_probs = token_log_probs(model, ids, attention, T, temperature)  # [B, T], logprobs.py
    loss = grpo_loss(log_probs, log_probs.detach(), advantages.flatten(), mask)
    loss.backward()

GRPO (Shao et al., arXiv 2402.03300) needs no critic: a rollout's advantage is its reward compared
with the other rollouts of its prompt. PODS changes one thing: "the other rollouts" are the kept m.

Legend: P prompts, m kept, B = P*m sequences (or the micro-batch's share of them), T completion
tokens. Signs: a positive advantage makes a rollout's tokens likelier; the loss is minimised.
Left out: a critic, per-token rewards, entropy bonuses.
"""

import torch

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
SCALES = ("std", "mean", "none")


def group_advantages(
    rewards: torch.Tensor, scale: str | bool = "std", eps: float = 1e-4
) -> torch.Tensor:
    """How much better than its group each rollout did: (r - mean) / (std + eps).

    Args:
        rewards: [..., m], each row of the last axis one group. With PODS: the *kept* rewards, and
            this is the only normalisation they get.
        scale: what r - mean is divided by. "std": the group's standard deviation (sample form,
            m - 1, as TRL and the paper's code). "none": nothing, Dr. GRPO's choice (arXiv
            2503.20783). "mean": the size of the group's mean, which for rewards of 0 and 1 is
            MaxRL's choice (arXiv 2602.02710): the rarer a success, the more it weighs.
            True and False stand for "std" and "none".
        eps: added to what is divided by.

    Returns float32 [..., m]; exactly 0 in a group without signal (or of one member).

    Raises:
        ValueError: an unknown scale.
    """
    scale = {True: "std", False: "none"}.get(scale, scale)
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}: choose one of {', '.join(SCALES)}")
    is_array = hasattr(rewards, "dtype")
    rewards = torch.as_tensor(rewards, dtype=None if is_array else torch.float64)
    signal = has_signal(rewards)  # [...]
    rewards = rewards.double()
    mean = rewards.mean(-1, keepdim=True)  # [..., 1]
    advantages = rewards - mean  # [..., m]
    if scale == "std" and rewards.shape[-1] > 1:
        advantages = advantages / (rewards.std(-1, keepdim=True) + eps)
    if scale == "mean":
        advantages = advantages / (mean.abs() + eps)
    # The mean of equal floats is off by a rounding error, and dividing by a tiny std would turn
    # that into an advantage. Equal rewards say nothing, so say nothing.
    return advantages.masked_fill(~signal[..., None], 0.0).float()


def has_signal(rewards: torch.Tensor) -> torch.Tensor:
    """Whether a group's rewards [..., m] differ at all, bool [...]: without that, no gradient.

    Sums of the same parts in another order differ by a rounding error: that is no difference.
    """
    dtype = torch.float32 if rewards.dtype == torch.float32 else torch.float64
    rewards = rewards.double()
    noise = 4 * torch.finfo(dtype).eps * rewards.abs().amax(-1)  # [...]
    return rewards.amax(-1) - rewards.amin(-1) > noise


def loss_normalizer(mask: torch.Tensor, loss_type: str, max_completion_length: int) -> float:
    """What the update's summed loss is divided by, counted once over the *whole* update.

    Args:
        mask: [B, T], true on completion tokens, of all kept rollouts of the update, groups without
            signal included: they are part of the mean, although their surrogate is 0.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: the tokens a completion may have at most; used by "dr_grpo" alone.
    """
    check_loss_type(loss_type)
    if loss_type == "grpo":
        count = len(mask)
    elif loss_type == "dapo":
        count = int(mask.sum())
    else:
        count = len(mask) * max_completion_length
    return float(max(count, 1))


def check_loss_type(loss_type: str) -> None:
    """Raise ValueError for an unknown loss type."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"unknown loss type {loss_type!r}: choose one of {', '.join(LOSS_TYPES)}")


def grpo_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_type: str = "grpo",
    normalizer: float | None = None,
    max_completion_length: int | None = None,
    clip: float = 0.2,
    beta: float = 0.0,
    ref_log_probs: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """The clipped surrogate loss of PPO with group advantages (arXiv 2402.03300, equation 3).

    A token's loss is -min(ratio * A, clip(ratio, 1 - clip, 1 + clip) * A) + beta * KL, with
    ratio = exp(log_probs - old_log_probs). The sum over tokens becomes one number in three ways:

    - "grpo" (the paper's): the mean over sequences of each sequence's mean over its tokens. Tokens
      of long completions weigh less.
    - "dapo" (arXiv 2503.14476): the mean over all tokens of the update.
    - "dr_grpo" (arXiv 2503.20783): the sum over tokens over B * max_completion_length, a constant.

    With one optimiser step per batch the ratio is exactly 1 and this loss prints about 0 whatever
    is learned: normalised advantages sum to 0 in each group. The gradient is what matters.

    Args:
        log_probs: [B, T] with gradients, from `token_log_probs`.
        old_log_probs: [B, T] without gradients, from before the batch's first optimiser step. If
            that step is the only one, `log_probs.detach()`.
        advantages: [B].
        mask: [B, T], true on completion tokens, EOS included. A row without any contributes 0.
        loss_type: one of `LOSS_TYPES`.
        normalizer: `loss_normalizer` of the whole update, when this call is one micro-batch of it;
            the micro-batch losses then *add up* to the loss of the update, whatever their size.
            None: these rows are the whole update.
        max_completion_length: for "dr_grpo" without a normalizer; None takes T.
        clip: how far from 1 the ratio still earns.
        beta: weight of the KL to the reference policy; 0 needs no reference.
        ref_log_probs: [B, T] without gradients, at the same temperature; required if beta > 0.
        importance: [B, T] without gradients, from `importance_weights`: each token's surrogate is
            multiplied by it, the KL is not. None when the sampler's policy is the trainer's.
    """
    check_loss_type(loss_type)
    mask = mask.bool()
    if normalizer is None:
        normalizer = loss_normalizer(mask, loss_type, max_completion_length or mask.shape[-1])
    # Mask before exp: a padded position may hold anything, exp may make it inf, and inf * 0 is NaN,
    # in the gradient even if torch.where hides it from the value.
    ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0).exp()  # [B, T]
    advantages = advantages.to(ratio)[:, None]  # [B, 1]
    # min keeps the pessimistic side: it is the *improvement* beyond the clip range that earns
    # nothing. A bad token that became likelier (ratio 1.5, A < 0) is still pushed down.
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    token_loss = -surrogate
    if importance is not None:
        token_loss = token_loss * importance.masked_fill(~mask, 0.0)
    if beta > 0:
        if ref_log_probs is None:
            raise ValueError("beta > 0 needs ref_log_probs, the reference policy's log-probs")
        token_loss = token_loss + beta * k3_divergence(log_probs, ref_log_probs, mask)
    token_loss = token_loss.masked_fill(~mask, 0.0)
    if loss_type == "grpo":
        token_loss = token_loss / mask.sum(-1, keepdim=True).clamp(min=1)  # each sequence's mean
    return token_loss.sum() / normalizer


def importance_weights(
    old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(exp(old - sampler), cap): how much likelier the trainer finds a token than the sampler.

    An inference engine computes the policy with other kernels, perhaps in another precision, so it
    samples from a slightly different policy than is trained, and GRPO is quietly off-policy.
    Weighting every token's loss by the ratio of the two probabilities removes that bias; the cap
    bounds what one token can do, at the price of a little bias. ("Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", Yao et al., 2025.) This ratio is about two
    programs, that of `grpo_loss` about two optimiser steps: the policy before the first is in both.

    Args:
        old_log_probs, sampler_log_probs: [B, T], the trainer's from before the batch's first
            optimiser step, and what the sampler reported, at the same temperature.
        mask: [B, T], true on completion tokens.
        cap: the largest weight, at least 1.

    Returns [B, T] without gradients; 1 at padded positions.
    """
    # Mask before exp, as in the loss.
    difference = (old_log_probs - sampler_log_probs).detach().masked_fill(~mask.bool(), 0.0)
    return difference.exp().clamp(max=cap)


def k3_divergence(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor, steepest: float = 20.0
) -> torch.Tensor:
    """KL(policy || reference) estimated token by token, [B, T], never negative.

    With d = log(reference / policy) on tokens the policy sampled, E[exp(d) - d - 1] is the
    divergence, and every single term is at least 0 (Schulman's "k3"; arXiv 2402.03300, equation 4).
    Beyond d = `steepest` exp goes on as its tangent: exp(89) is no float32, and one such token
    would make the whole gradient NaN. A clamp would leave it, far from the reference, no pull back.
    """
    difference = (ref_log_probs - log_probs).masked_fill(~mask.bool(), 0.0)  # [B, T]
    curved = difference.clamp(max=steepest)
    return curved.exp() * (1 + (difference - curved)) - difference - 1
