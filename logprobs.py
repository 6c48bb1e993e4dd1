"""Log-probs of completions under the policy that sampled them.

    log_probs = token_log_probs(model, ids, attention, T, temperature)  # [B, T]: the last T tokens
    policy = Policy(model)                                              # the same, as a module

The policy is softmax(logits / temperature), because that is what the rollouts were drawn from. A
loss at temperature 1 of what was sampled at 0.9 trains another policy than the one that acts.
The vocabulary is large and completions are long, so the float32 logits [B, T, V] are never held at
once: the output layer is applied to one chunk of tokens after the other. A group's rollouts share
their prompt, so it is read once, and each rollout attends to a copy of its keys and values.

To read first: `token_log_probs`, `whole_rows` and `target_log_probs`. All else saves work, and must
give the same numbers. Left out: several sequences packed into one row, fused kernels, and models
that change the logits of their output layer (they are refused).

Legend: B sequences, L prompt and T completion tokens, Q distinct prompts, V vocabulary.
"""

from functools import partial
from inspect import signature

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

# What models call their keys and values: transformers 5.24 has another name for it than 5.23.
CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
# How many float32 logits are held at once: 128 MB, or 220 tokens with a vocabulary of 151,936.
LOGITS_PER_CHUNK = 2**25
# Reading prompts once takes a second pass, so it is done only where it saves this many tokens. Of
# the 25 cases of `bench.py update` (282k parameters, CPU) the 3 that saved fewer were 0.80 to 0.97
# times as fast, 3 that saved 124 to 252 were 0.96 to 0.99, the 19 that saved more 1.11 to 4.66.
WORTH_A_PASS = 70


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
    entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the last `completion_length` tokens under the policy that sampled them.

    Args:
        model: a transformers causal language model (see `check_output_layer`), or a PEFT model
            around one. The adapter is in the decoder's layers, so it acts without the wrapper.
        input_ids, attention_mask: [B, L+T], prompt left-padded, completion right-padded.
        completion_length: T.
        temperature: the sampling temperature, above 0.
        entropy: also return the policy's entropy before each token, in nats.

    Returns float32 [B, T], with `entropy` a pair of these, the second without gradients. Values at
    padded positions mean nothing.
    """
    if completion_length == 0:
        nothing = torch.zeros(len(input_ids), 0, device=input_ids.device)
        return (nothing, nothing) if entropy else nothing
    check_output_layer(model)
    inputs = model, input_ids, attention_mask, completion_length
    groups = distinct_prompts(*inputs)
    hidden = whole_rows(*inputs) if groups is None else shared_prompts(*inputs, *groups)
    targets = input_ids[:, -completion_length:]  # [B, T]
    output_layer = model.get_output_embeddings()
    log_probs, entropies = target_log_probs(output_layer, hidden, targets, temperature)
    return (log_probs, entropies) if entropy else log_probs


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """The position of each token [B, L], counted from the first real token of its row.

    Models with learned positions (GPT-2) otherwise number the padding too, and compute other
    log-probs than for the same text without padding.
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
    keys and values of *one* pass; the gradients of the copies add up. Where a bug would hide: the
    completion's positions go on from the prompt's real length, not from its padded one; the mask
    hides the prompt's padding from the completion too; the prompt's last state predicts the
    completion's first token; the last token is predicted, and need not be read.
    """
    L = prompts.shape[1]
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with_cache = {CACHE: cache, "use_cache": True}
    prompt = read(model, prompts.clamp(min=0), prompts >= 0, **with_cache)
    cache.batch_select_indices(row)  # each layer's keys [Q, heads, L, width] -> [B, ...]
    end = L + max(T - 1, 1)  # two passes even for one token: FSDP's other processes make two
    mask = attention_mask[:, :end]
    completion = read(model, input_ids[:, L:end], mask, **with_cache)
    first, others = prompt.last_hidden_state[row, -1:], completion.last_hidden_state[:, : T - 1]
    return torch.cat([first, others], dim=1)  # [B, T, hidden]


def distinct_prompts(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, T: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The distinct prompts [Q, L], padded with -1, and the number of each row's prompt [B].

    None if the model has to read whole rows, or if reading prompts once would not pay.
    """
    length = input_ids.shape[1]
    # FSDP's processes gather a layer together, so all must decide alike, whatever rows they have.
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if sharded:
        length = getattr(model.config.get_text_config(), "max_position_embeddings", length)
    if input_ids.shape[1] == T or not keeps_prompts(model, length):
        return None
    marked = input_ids.masked_fill(attention_mask == 0, -1)[:, :-T]  # [B, L]
    prompts, row = torch.unique(marked, dim=0, return_inverse=True)
    saved = (len(row) - len(prompts)) * prompts.shape[1]  # tokens
    return (prompts, row) if sharded or saved >= WORTH_A_PASS else None


def keeps_prompts(model: nn.Module, length: int) -> bool:
    """Whether keys and values are all that a row of `length` tokens needs of its prompt."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return hasattr(config, "use_cache") and not (
        # Computed again in the backward pass, a layer would add its keys a second time.
        (model.training and any(getattr(m, "gradient_checkpointing", 0) for m in model.modules()))
        or model._is_stateful  # recurrent layers
        or kinds - {"full_attention", "sliding_attention", "chunked_attention"}
        or any(window is not None and window < length for window in windows)
    )


def target_log_probs(
    output_layer: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the targets [B, T], each predicted by hidden [B, T, hidden], and entropies.

    The output layer is applied to as many hidden states at a time as make `LOGITS_PER_CHUNK`
    logits, and again in the backward pass.

    Returns float32 [B, T] twice: the log-probs, and without gradients the entropies.
    """

    def chunk_log_probs(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # float32 before the softmax: in bfloat16, rounding alone moves a probability ratio by 7%.
        logits = output_layer(hidden).float() / temperature  # [chunk, V]
        log_sum = logits.logsumexp(-1)  # [chunk]
        log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - log_sum
        with torch.no_grad():  # -sum p log p = log_sum - sum p logit
            entropy = log_sum - torch.linalg.vecdot(logits.softmax(-1), logits)
        return log_probs, entropy

    # With autocast every chunk casts the whole output layer anew, so larger chunks cost less.
    limit = LOGITS_PER_CHUNK * (4 if torch.is_autocast_enabled(hidden.device.type) else 1)
    size = max(1, limit // output_layer.weight.shape[0])  # tokens a chunk
    chunks = [hidden.flatten(0, 1).split(size), targets.flatten().split(size)]
    compute = chunk_log_probs
    if len(chunks[0]) > 1:  # or autograd would keep every chunk's logits until the backward pass
        options = {"use_reentrant": False, "preserve_rng_state": False}
        compute = partial(checkpoint, chunk_log_probs, **options)
    parts = [compute(*chunk) for chunk in zip(*chunks, strict=True)]
    log_probs, entropies = (torch.cat(part).view(targets.shape) for part in zip(*parts))
    return log_probs.clone(), entropies  # no view: on one, the hooks of FSDP could be lost


class Policy(nn.Module):
    """`token_log_probs` as the forward pass of a module around `model`.

    FSDP works through hooks on the forward pass of the module that it wraps. The function
    `token_log_probs` does not call the model's own forward pass, so FSDP must wrap this module.
    With dtype torch.bfloat16 it computes in bfloat16, whatever dtype the weights have.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, input_ids: torch.Tensor, *args, **options):
        """What `token_log_probs` returns."""
        device, bfloat16 = input_ids.device.type, self.dtype == torch.bfloat16
        # Autocast's cache would keep a bfloat16 copy of every weight until the pass ends, and the
        # output layer's copy would add up the gradients of all chunks in bfloat16.
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16, cache_enabled=False):
            return token_log_probs(self.model, input_ids, *args, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or all of it if FSDP has spread it over the processes.

    Each process sends its part to the others, so all must ask for it, and in the same order.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
