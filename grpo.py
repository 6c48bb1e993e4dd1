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
        scale: what r - mean is divided by. "std" or True: the group's standard deviation (with
            m - 1, as TRL and the paper's code). "none" or False: nothing, as in Dr. GRPO (arXiv
            2503.20783). "mean": the absolute value of the group's mean, as in MaxRL (arXiv
            2602.02710) with rewards of 0 and 1: the rarer a success, the more it weighs.
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
    # that into an advantage. Equal rewards say nothing, so their advantages are exactly 0.
    return advantages.masked_fill(~signal[..., None], 0.0).float()


def has_signal(rewards: torch.Tensor) -> torch.Tensor:
    """Whether a group's rewards [..., m] differ by more than rounding, bool [...].

    The same parts of a reward, added up in another order, differ by a rounding error.
    """
    dtype = torch.float32 if rewards.dtype == torch.float32 else torch.float64
    rewards = rewards.double()
    noise = 4 * torch.finfo(dtype).eps * rewards.abs().amax(-1)  # [...]
    return rewards.amax(-1) - rewards.amin(-1) > noise


def loss_normalizer(mask: torch.Tensor, loss_type: str, max_completion_length: int) -> float:
    """What the update's summed loss is divided by, counted once over the *whole* update.

    Args:
        mask: [B, T], true on completion tokens, of all kept rollouts of the update. Those of groups
            without signal count too, although they add nothing to the sum.
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

    - "grpo" (the paper's): each sequence's mean over its tokens, and the mean of these. Tokens of
      long completions weigh less.
    - "dapo" (arXiv 2503.14476): the mean over all tokens of the update.
    - "dr_grpo" (arXiv 2503.20783): the sum over all tokens, divided by B * max_completion_length.

    With one optimiser step a batch the ratio is exactly 1, and this loss is about 0 whatever is
    learned, because the advantages of a group sum to 0. The gradient is what matters.

    Args:
        log_probs: [B, T] with gradients, from `token_log_probs`.
        old_log_probs: [B, T] without gradients, from before the batch's first optimiser step. If
            that step is the only one, `log_probs.detach()`.
        advantages: [B].
        mask: [B, T], true on completion tokens, EOS included. A row without any contributes 0.
        normalizer: `loss_normalizer` of the whole update, if these rows are a micro-batch of it:
            the losses of its micro-batches *add up* to its own. None: these rows are all.
        max_completion_length: for "dr_grpo" without a normalizer; None takes T.
        clip: how far from 1 the ratio may go before the gain ends.
        beta: weight of the KL to the reference policy; 0 needs no reference.
        ref_log_probs: [B, T] without gradients, at the same temperature; required if beta > 0.
        importance: [B, T] without gradients, from `importance_weights`: each token's surrogate is
            multiplied by it, the KL is not. None: the sampler computes as the trainer does.
    """
    check_loss_type(loss_type)
    mask = mask.bool()
    if normalizer is None:
        normalizer = loss_normalizer(mask, loss_type, max_completion_length or mask.shape[-1])
    # Mask before exp: a padded position may hold anything, exp may make it inf, and inf * 0 is NaN.
    # torch.where after exp hides that from the value alone, and the gradient is still NaN.
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
    samples from a slightly different policy than the one that is trained. Weighting every token's
    loss by the ratio of the two probabilities removes that bias; the cap (at least 1) bounds what
    one token can do, at the price of a little bias ("Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training", Yao et al., 2025). This ratio compares two programs at the same
    weights; that of `grpo_loss` compares the weights of two optimiser steps.

    Args:
        old_log_probs, sampler_log_probs: [B, T], the trainer's from before the batch's first
            optimiser step, and what the sampler reported, at the same temperature.

    Returns [B, T] without gradients; 1 at padded positions.
    """
    difference = (old_log_probs - sampler_log_probs).detach().masked_fill(~mask.bool(), 0.0)
    return difference.exp().clamp(max=cap)


def k3_divergence(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor, steepest: float = 20.0
) -> torch.Tensor:
    """KL(policy || reference) estimated token by token, [B, T], never negative.

    With d = log(reference / policy) on tokens the policy sampled, E[exp(d) - d - 1] is the
    divergence, and every single term is at least 0 (Schulman's "k3"; arXiv 2402.03300, equation 4).
    Beyond d = `steepest` exp is continued by its tangent: exp(89) is no float32, and one such token
    would make the whole gradient NaN. A clamp would end the pull back to the reference there.
    """
    difference = (ref_log_probs - log_probs).masked_fill(~mask.bool(), 0.0)  # [B, T]
    curved = difference.clamp(max=steepest)
    return curved.exp() * (1 + (difference - curved)) - difference - 1
