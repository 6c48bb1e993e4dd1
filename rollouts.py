"""Generation: n rollouts for each prompt, with the log-probs they were sampled at.

    sampler = TorchSampler(model, tokenizer)               # or VLLMSampler(model, tokenizer)
    rollouts = sampler.generate(prompts, n=64, max_new_tokens=23, temperature=1.0, seed=0)
    sampler.sync(model)                   # after every update, or the next rollouts are of the past
    kept = rollouts.select(keep)          # keep [P, m] from pods.py -> the same record with m for n

`prompts` are lists of token ids (tasks.encode): text that is tokenised here would get a second BOS.
Sampling is the plain softmax of logits / temperature. A checkpoint's generation config (top-p,
top-k, repetition penalty) is not used, because the log-probs of the loss know nothing of it either.

`TorchSampler` needs nothing but the model. It computes each distinct *prefix* once: the n rollouts
of a prompt start as one row of the batch, which is copied only where they choose different tokens,
and rollouts that have finished leave the batch. Left out: paged memory, continuous batching, CUDA
graphs. Those are an inference engine's work, and `VLLMSampler` is one.

Legend: P prompts, n rollouts a prompt, B = P*n rows, L prompt tokens, T completion tokens,
V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from logprobs import CACHE, positions, whole


@dataclass
class Rollouts:
    """n completions of each of P prompts. Row [p, i] of every field is the same rollout."""

    prompt_ids: torch.Tensor  # [P, L] left-padded
    prompt_mask: torch.Tensor  # [P, L] bool
    completion_ids: torch.Tensor  # [P, n, T] right-padded
    mask: torch.Tensor  # [P, n, T] bool: the completion's own tokens, EOS included
    log_probs: torch.Tensor  # [P, n, T] float32, the sampler's own, at the sampling temperature
    finished: torch.Tensor  # [P, n] bool: ended with EOS; otherwise truncated
    texts: list[list[str]]  # P lists of n, without EOS

    def select(self, keep: torch.Tensor) -> "Rollouts":
        """The rollouts keep [P, m] of each prompt, every field from the same rows, T trimmed."""
        keep = keep.to(self.mask.device)
        rows = torch.arange(len(keep), device=keep.device)[:, None], keep  # [P, 1] and [P, m]
        mask = self.mask[rows]  # [P, m, T]
        longest = int(mask.sum(-1).max())
        return Rollouts(
            self.prompt_ids,
            self.prompt_mask,
            self.completion_ids[rows][..., :longest],
            mask[..., :longest],
            self.log_probs[rows][..., :longest],
            self.finished[rows],
            [[texts[i] for i in row] for texts, row in zip(self.texts, keep.tolist(), strict=True)],
        )

    def sequences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompt and completion joined, with the attention mask: [B, L+T] each, for the loss."""
        n = self.mask.shape[1]
        ids = (self.prompt_ids.repeat_interleave(n, 0), self.completion_ids.flatten(0, 1))
        mask = (self.prompt_mask.repeat_interleave(n, 0), self.mask.flatten(0, 1))
        return torch.cat(ids, dim=1), torch.cat(mask, dim=1)


def eos_token_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: chat models often have two (end of turn, end of text)."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, (list, tuple)) else [eos])}
    return sorted(ids - {None})


def left_padded(
    prompts: Sequence[Sequence[int]], device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts' ids [P, L], and the mask [P, L] of what is not padding."""
    L = max(map(len, prompts))
    ids = [[0] * (L - len(p)) + list(p) for p in prompts]
    mask = [[False] * (L - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def pack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    eos_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str = "cpu",
) -> Rollouts:
    """A `Rollouts` from ragged lists: P prompts and P*n completions, those of a prompt together.

    A completion ends with its first EOS, and that EOS is part of it: it has a log-prob and is
    trained on, or no policy would learn to stop. What comes after it is dropped. Masks are made
    from these lengths: comparing ids with the padding token would hide EOS where both are one
    token. So rows can be padded with any token, here with 0.
    """
    stop = set(eos_ids)
    P, n = len(prompts), len(completions) // len(prompts)

    lengths, finished, texts = [], [], []
    for tokens in completions:
        end = next((t for t, token in enumerate(tokens) if token in stop), None)
        finished.append(end is not None)
        lengths.append(len(tokens) if end is None else end + 1)
        # EOS is cut by position and special tokens stay: some tokenizers call <think> special.
        texts.append(tokenizer.decode(tokens[:end], skip_special_tokens=False))

    T = max(lengths)
    rows = list(zip(completions, log_probs, lengths, strict=True))
    completion_ids = [[*tokens[:length], *[0] * (T - length)] for tokens, _, length in rows]
    padded_log_probs = [[*values[:length], *[0.0] * (T - length)] for _, values, length in rows]
    lengths = torch.tensor(lengths, device=device).view(P, n, 1)
    return Rollouts(
        *left_padded(prompts, device),
        torch.tensor(completion_ids, dtype=torch.long, device=device).view(P, n, T),
        torch.arange(T, device=device) < lengths,
        torch.tensor(padded_log_probs, dtype=torch.float32, device=device).view(P, n, T),
        torch.tensor(finished, device=device).view(P, n),
        [texts[p * n : (p + 1) * n] for p in range(P)],
    )


def check_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float, limit: int | None
) -> None:
    """Raise ValueError for what no sampler can do; `limit`: see `max_positions`."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    longest = max(map(len, prompts))
    if min(map(len, prompts)) == 0:
        raise ValueError("empty prompt: there is nothing to continue")
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"prompt of {longest} and completion of {max_new_tokens} tokens exceed the model's "
            f"{limit} positions: lower --max-new-tokens"
        )


def max_positions(model: nn.Module) -> int | None:
    """How many tokens a sequence of this model may have; None if it does not say.

    With longrope, a pass beyond the original context encodes all positions differently, and keys
    that were cached before would not fit those after. So the original context is the limit.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return getattr(config, "max_position_embeddings", None)


# ---- plain PyTorch -------------------------------------------------------------------------------


def draw(
    probabilities: torch.Tensor, row: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A token for each rollout, int64 [G], from the probabilities [rows, V] in its `row` [G].

    By the inverse of the cumulative distribution: u is uniform in [0, 1), and the token is the
    first at which the sum of the probabilities exceeds u. That takes one random number a rollout;
    `multinomial` takes V of them, which with V = 49,152 was 11% of all generation.
    """
    # In units of 2**-52 all are whole numbers, and float64 adds those exactly, in any order. So a
    # token of probability 0 leaves the sum as it is, even on a GPU, and is never drawn. In float32
    # the sums would lose tokens below 2**-24, which may be much of a large vocabulary together.
    sums = probabilities.double().mul_(2.0**52).round_().cumsum_(-1)  # [rows, V]
    u = torch.rand(len(row), 1, dtype=torch.float64, device=row.device, generator=generator)
    token = torch.searchsorted(sums[row], u * sums[row, -1:], right=True)[:, 0]  # [G]
    return token.clamp(max=probabilities.shape[-1] - 1)  # V if the probabilities are not finite


class _BufferLayer(DynamicLayer):
    """One layer's keys and values, in a buffer with room for the completion.

    The usual cache is concatenated for every new token, which copies all earlier ones.
    """

    def __init__(self, prompt: DynamicLayer, room: int) -> None:
        super().__init__()
        self.length = prompt.get_seq_length()
        # [P, heads, L + room, head width]
        self.buffers = [pad(states, (0, 0, 0, room)) for states in (prompt.keys, prompt.values)]
        self.is_initialized = True

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs):
        """Write one token's keys and values [rows, heads, 1, width]; return all, as views."""
        for buffer, states in zip(self.buffers, (keys, values)):
            buffer[:, :, self.length] = states[:, :, 0]
        self.length += 1
        return tuple(buffer[:, :, : self.length] for buffer in self.buffers)

    def get_seq_length(self) -> int:
        """How many tokens are stored."""
        return self.length

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The new batch: each row a copy of the old row with this index."""
        self.buffers = [buffer[indices] for buffer in self.buffers]


def _one_token_attention(module, query, key, value, attention_mask, **options):
    """transformers' "sdpa", but without copies of the keys for all heads that share them.

    For one new token those heads, [rows, H, 1, width], are as well H/K queries of each of the K
    heads that have keys, [rows, K, L, width]. The usual copies are made anew for every token.
    """
    shared = attention_mask is None or attention_mask.shape[1] == 1  # one mask for all heads
    if query.shape[2] > 1 or not shared or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    rows, heads, _, width = query.shape
    query, scale = query.reshape(rows, key.shape[1], -1, width), options.get("scaling")
    found = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
    return found.reshape(rows, 1, heads, -1), None  # [rows, 1, H, width], as in transformers


class TorchSampler:
    """Samples from the model that is being trained, in plain PyTorch, on the model's device.

    Args:
        model, tokenizer: from transformers, the model perhaps with an adapter of peft's.
        dtype: torch.bfloat16 computes in bfloat16 whatever the weights are in, as the trainer does.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.eos_ids = eos_token_ids(model, tokenizer)

    @torch.no_grad()
    def sync(self, model: nn.Module) -> None:
        """Take the updated weights. Usually `model` is this sampler's own: nothing is copied.

        A model that FSDP has spread over the processes cannot be sampled from. Then this sampler
        has a whole copy, and the trained weights are gathered into it.
        """
        if not any(isinstance(weight, DTensor) for weight in model.parameters()):
            self.model = model
            return
        for own, weight in zip(self.model.parameters(), model.parameters(), strict=True):
            if weight.requires_grad:
                own.copy_(whole(weight))

    def sleep(self) -> None:
        """Give memory to the update. This sampler holds none between calls."""

    def close(self) -> None:
        """End it. There is nothing to end here."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> Rollouts:
        """n completions of each prompt.

        Args:
            prompts: P lists of token ids, of any lengths.
            max_new_tokens: the most that a completion may have, EOS included.
            temperature: above 0; the policy is softmax(logits / temperature).
            seed: the same seed, prompts and weights give the same rollouts on the same machine.
                Give every step and every process its own.

        Raises:
            ValueError: see `check_request`.
        """
        check_request(prompts, max_new_tokens, temperature, max_positions(self.model))
        device = self.model.device
        was_training = self.model.training
        self.model.eval()  # no dropout; and gradient checkpointing in train mode drops the cache
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _one_token_attention  # until these rollouts are made
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                completions, log_probs = self._decode(prompts, n, max_new_tokens, temperature, seed)
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
            self.model.train(was_training)
        return pack(prompts, completions, log_probs, self.eos_ids, self.tokenizer, device)

    @torch.no_grad()  # in inference mode autocast would cast all weights again for every token
    def _decode(self, prompts, n, max_new_tokens, temperature, seed):
        """B = P*n lists of tokens and of their log-probs; what comes after an EOS means nothing."""
        device, P, B = self.model.device, len(prompts), len(prompts) * n
        generator = torch.Generator(device).manual_seed(seed)
        ids, attention = left_padded(prompts, device)  # [P, L]
        L = ids.shape[1]

        # Full layers even for models with a sliding window: their masks apply the window.
        cache = DynamicCache()
        logits = self._logits(cache, ids, attention, positions(attention))  # [P, V]
        cache = Cache(layers=[_BufferLayer(layer, max_new_tokens) for layer in cache.layers])
        position = attention.sum(-1, keepdim=True)  # [P, 1]
        # Without padding no mask is needed, and attention is faster without one.
        padded = not attention.all()
        attention = pad(attention, (0, max_new_tokens), value=1)  # [P, L + max_new_tokens]

        tokens = torch.zeros(B, max_new_tokens, dtype=torch.long, device=device)
        chosen = torch.zeros(B, max_new_tokens, device=device)  # their log-probs
        eos = torch.tensor(self.eos_ids, device=device)
        # `going` are the rollouts not yet finished, `row` is the row of the batch that each is in.
        # A row is a prefix: rollouts that have chosen the same tokens so far are in the same row.
        going = torch.arange(B, device=device)
        row = torch.arange(P, device=device).repeat_interleave(n)
        for t in range(max_new_tokens):
            probabilities = (logits.float() / temperature).softmax(-1)  # [rows, V]
            token = draw(probabilities, row, generator)  # [going]
            tokens[going, t], chosen[going, t] = token, probabilities[row, token].log()
            goes_on = ~torch.isin(token, eos)  # [going]
            going, row, token = going[goes_on], row[goes_on], token[goes_on]
            if len(going) == 0 or t + 1 == max_new_tokens:
                break
            # The next batch has one row for each distinct (prefix, next token).
            V = logits.shape[-1]
            distinct, row = torch.unique(row * V + token, return_inverse=True)
            parent, token = distinct // V, distinct % V  # [rows]
            if not torch.equal(parent, torch.arange(len(logits), device=device)):
                cache.batch_select_indices(parent)
                position, attention = position[parent], attention[parent]
            mask = attention[:, : L + t + 1] if padded else None
            logits = self._logits(cache, token[:, None], mask, position)  # [rows, V]
            position = position + 1
        if not chosen.isfinite().all():
            raise RuntimeError("the model's logits are not finite: nothing can be sampled from it")
        return tokens.tolist(), chosen.tolist()

    def _logits(self, cache, input_ids, attention_mask, position_ids) -> torch.Tensor:
        """The logits [rows, V] after the last of these tokens; the cache takes them all."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        options = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(**inputs, position_ids=position_ids, **options).logits[:, -1]
