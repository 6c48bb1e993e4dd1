"""The GRPO loss on the kept rollouts: group advantages, per-token log-probs, the clipped surrogate.

    advantages = group_advantages(rewards)                             # [P, m] -> [P, m]
    log_probs = token_log_probs(model, ids, attention, T, temperature)  # [B, T]
    loss = grpo_loss(log_probs, log_probs.detach(), advantages.flatten(), mask)
    loss.backward()

GRPO (Shao et al., arXiv 2402.03300) needs no critic: a rollout's advantage is its reward compared
with the other rollouts of its prompt. PODS changes one thing: "the other rollouts" are the kept m.

Legend: P prompts, m kept, B = P*m sequences (or the micro-batch's share of them), T completion
tokens, V vocabulary. Signs: a positive advantage makes a rollout's tokens likelier; the loss is
minimised. Left out: a critic, per-token rewards, entropy bonuses.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

LOSS_TYPES = ("grpo", "dapo", "dr_grpo")
# How many float32 logits are held at once: 128 MB, 220 tokens of Qwen2.5's vocabulary of 151,936.
LOGITS_PER_CHUNK = 2**25


def group_advantages(rewards: torch.Tensor, scale: bool = True, eps: float = 1e-4) -> torch.Tensor:
    """How much better than its group each rollout did: (r - mean) / (std + eps).

    Args:
        rewards: [..., m], each row of the last axis one group. With PODS: the *kept* rewards, and
            this is the only normalisation they get.
        scale: divide by the standard deviation (sample form, m - 1, as TRL and the paper's code).
            False is Dr. GRPO's choice (arXiv 2503.20783).
        eps: added to the standard deviation.

    Returns float32 [..., m]; exactly 0 in a group whose rewards are all equal (or of one member).
    """
    is_array = hasattr(rewards, "dtype")
    rewards = torch.as_tensor(rewards, dtype=None if is_array else torch.float64).double()
    advantages = rewards - rewards.mean(-1, keepdim=True)  # [..., m]
    if scale and rewards.shape[-1] > 1:
        advantages = advantages / (rewards.std(-1, keepdim=True) + eps)
    # The mean of equal floats is off by a rounding error, and dividing by a tiny std would turn
    # that into an advantage. Equal rewards say nothing, so say nothing.
    return advantages.masked_fill(~has_signal(rewards)[..., None], 0.0).float()


def has_signal(rewards: torch.Tensor) -> torch.Tensor:
    """Whether a group's rewards [..., m] differ at all, bool [...]: without that, no gradient."""
    return rewards.amax(-1) > rewards.amin(-1)


def check_output_layer(model: nn.Module) -> None:
    """Raise ValueError for a model whose logits are not just what its output layer computes."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{config.model_type} models are not supported: they apply {name}")


def token_log_probs(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_length: int,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probs of the last `completion_length` tokens under the policy that sampled them.

    The policy of reinforcement learning is softmax(logits / temperature), because that is what the
    rollouts were drawn from. Scoring at temperature 1 what was sampled at 0.9 trains another policy
    than the one that acts.

    Args:
        model: a transformers causal language model (see `check_output_layer`), or a PEFT model
            around one (its adapter is in the decoder's layers: going past the wrapper keeps it).
        input_ids, attention_mask: [B, L+T], prompt left-padded, completion right-padded.
        completion_length: T, counted from the end.
        temperature: the sampling temperature, above 0.

    Returns float32 [B, T], with gradients where enabled. Values at padded positions mean nothing.
    """
    if completion_length == 0:
        return torch.zeros(len(input_ids), 0, device=input_ids.device)
    check_output_layer(model)
    inputs = model, input_ids, attention_mask, completion_length
    groups = distinct_prompts(*inputs)
    hidden = whole_rows(*inputs) if groups is None else shared_prompts(*inputs, *groups)
    targets = input_ids[:, -completion_length:]  # [B, T]
    return score(model.get_output_embeddings(), hidden, targets, temperature)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of each token [B, L], counted from the first real token of its row.

    Left-padded rows must say this explicitly: models with learned positions (GPT-2) otherwise
    number the padding too and compute other log-probs than for the same text without padding.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def read(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, **cache):
    """The decoder's output for tokens [B, t], the last of those that the mask [B, L] covers."""
    position_ids = positions(attention_mask)[:, -input_ids.shape[1] :]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return model.get_decoder()(**inputs, position_ids=position_ids, **cache)


def whole_rows(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, T: int
) -> torch.Tensor:
    """The hidden states [B, T, hidden] that predict the last T tokens, each row read whole."""
    # The state at position t predicts token t + 1: the classic off-by-one. The last predicts none.
    output = read(model, input_ids[:, :-1], attention_mask[:, :-1], use_cache=False)
    return output.last_hidden_state[:, -T:]


def shared_prompts(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    T: int,
    prompts: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """`whole_rows` in Q*L + B*T tokens, not B*(L+T): each of the Q `distinct_prompts` is read once.

    A prompt's hidden states do not depend on what follows, so its rollouts attend to copies of the
    keys and values of *one* pass; gradients of copies add up. It must be as if rows were whole:
    positions go on from the prompt's real length, not its padded one; the mask hides its padding
    from the completion too; the first completion token is predicted by the prompt's last state; and
    the last token, EOS or not, is predicted like any other although nobody reads it.
    """
    L = prompts.shape[1]
    prompt = read(model, prompts.clamp(min=0), prompts >= 0, use_cache=True)
    cache = prompt.past_key_values
    cache.batch_select_indices(row)  # each layer's keys [Q, heads, L, width] -> [B, ...]
    end = L + max(T - 1, 1)  # two passes even for one token: FSDP's other processes make two
    mask = attention_mask[:, :end]
    completion = read(model, input_ids[:, L:end], mask, past_key_values=cache, use_cache=True)
    first, others = prompt.last_hidden_state[row, -1:], completion.last_hidden_state[:, : T - 1]
    return torch.cat([first, others], dim=1)  # [B, T, hidden]


def distinct_prompts(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, T: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The distinct prompts [Q, L], padding -1, and each row's number [B]; None for whole rows."""
    length = input_ids.shape[1]
    # FSDP's processes gather a layer together, so all make as many passes, whatever their rows are.
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if sharded:
        length = getattr(model.config.get_text_config(), "max_position_embeddings", length)
    if input_ids.shape[1] == T or not keeps_prompts(model, length):
        return None
    marked = input_ids.masked_fill(attention_mask == 0, -1)[:, :-T]  # [B, L]
    prompts, row = torch.unique(marked, dim=0, return_inverse=True)
    return (prompts, row) if sharded or len(prompts) < len(row) else None


def keeps_prompts(model: nn.Module, length: int) -> bool:
    """Whether keys and values are all that a row of `length` tokens needs of its prompt."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return hasattr(config, "use_cache") and not (
        # Computed again in the backward pass, a layer would add its keys a second time.
        (model.training and model.is_gradient_checkpointing)
        or model._is_stateful  # recurrent layers
        or kinds - {"full_attention", "sliding_attention", "chunked_attention"}
        or any(window is not None and window < length for window in windows)
    )


def score(
    output_layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probs float32 [B, T] of the targets [B, T], each predicted by hidden [B, T, hidden].

    The vocabulary is large and T is long, so the float32 logits of all tokens are never held: the
    output layer is applied to as many hidden states at a time as make `LOGITS_PER_CHUNK` logits,
    and again in the backward pass. Everything before the output layer is stored as usual.
    """

    def chunk_log_probs(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # float32 before the softmax: in bfloat16, rounding alone moves a probability ratio by 7%.
        logits = output_layer(hidden).float() / temperature  # [chunk, V]
        return logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)

    # With autocast every chunk casts the whole output layer anew: make fewer.
    limit = LOGITS_PER_CHUNK * (4 if torch.is_autocast_enabled(hidden.device.type) else 1)
    size = max(1, limit // output_layer.weight.shape[0])  # tokens a chunk
    chunks = [hidden.flatten(0, 1).split(size), targets.flatten().split(size)]
    if len(chunks[0]) == 1:
        return chunk_log_probs(chunks[0][0], chunks[1][0]).view(targets.shape)
    # Without the checkpoint, autograd would keep every chunk's logits until the backward pass.
    parts = [
        checkpoint(chunk_log_probs, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(*chunks, strict=True)
    ]
    return torch.cat(parts).view(targets.shape)  # [B, T]


class Policy(nn.Module):
    """`token_log_probs` as a module's forward pass, `model` being its one submodule.

    DDP and FSDP work through hooks on the forward pass of the module they wrap. A call of
    `token_log_probs(model, ...)` goes past the model's own forward pass, so they must wrap this.
    With dtype torch.bfloat16 it computes in bfloat16 whatever the weights are in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, input_ids: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Float32 [B, T], as `token_log_probs`."""
        device, bfloat16 = input_ids.device.type, self.dtype == torch.bfloat16
        # The cache would keep one bfloat16 copy of each weight: of all until the pass ends, and the
        # output layer's would add up the gradients of all chunks in bfloat16.
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            log_probs = token_log_probs(self.model, input_ids, *args, **kwargs)
        return log_probs.clone()  # not a view, on which FSDP's hooks could be lost


def loss_normalizer(mask: torch.Tensor, loss_type: str, max_completion_length: int) -> float:
    """What the update's summed loss is divided by, counted once over the *whole* update.

    Args:
        mask: [B, T], true on completion tokens, of all kept rollouts of the update, groups without
            signal included: they are part of the mean, although their surrogate is 0.
        loss_type: one of `LOSS_TYPES`.
        max_completion_length: the tokens a completion may have at most; used by "dr_grpo" alone.
    """
    if loss_type == "grpo":
        count = len(mask)
    elif loss_type == "dapo":
        count = int(mask.sum())
    elif loss_type == "dr_grpo":
        count = len(mask) * max_completion_length
    else:
        raise ValueError(f"unknown loss type {loss_type!r}: choose one of {', '.join(LOSS_TYPES)}")
    return float(max(count, 1))


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
    mask = mask.bool()
    if normalizer is None or loss_type not in LOSS_TYPES:  # an unknown type is an error there
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
