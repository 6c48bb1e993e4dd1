"""The kept rollouts of a step, cut into micro-batches: what one forward and backward pass computes.

    batches, idle = micro_batches(kept, advantages, config)
    log_probs = batches[0].log_probs(policy, temperature)        # [b, T]

Legend: P prompts, m kept, B = P*m sequences, b of them in a micro-batch, L prompt and T completion
tokens.
"""

from dataclasses import dataclass

import torch
from torch import nn

from rollouts import Rollouts
from support.settings import Config


@dataclass
class MicroBatch:
    """Some sequences of an update, cut to the longest of them: b rows, one forward pass."""

    input_ids: torch.Tensor  # [b, L+T]
    attention_mask: torch.Tensor  # [b, L+T]
    mask: torch.Tensor  # [b, T] the completions' own tokens
    sampled: torch.Tensor  # [b, T] the sampler's log-probs
    advantages: torch.Tensor  # [b]
    old: torch.Tensor | None = None  # [b, T] log-probs before the first of several optimiser steps

    def log_probs(self, policy: nn.Module, temperature: float) -> torch.Tensor:
        """[b, T] under the policy, at the sampling temperature."""
        return policy(self.input_ids, self.attention_mask, self.mask.shape[1], temperature)


def micro_batches(
    kept: Rollouts, advantages: torch.Tensor, config: Config
) -> tuple[list[MicroBatch], MicroBatch]:
    """The rollouts that have a gradient, in micro-batches; and one that has none, for idle passes.

    Rollouts whose advantage is 0, above all groups without signal, have no gradient and are not
    computed, but they stay in the normaliser: the gradient is the paper's, only cheaper. (A KL term
    gives them a gradient, so with one they are computed.)
    """
    input_ids, attention_mask = kept.sequences()  # [B, L+T]
    mask = kept.mask.flatten(0, 1)  # [B, T]
    sampled = kept.log_probs.flatten(0, 1)  # [B, T]
    advantages = advantages.to(mask.device).flatten()  # [B]
    L, lengths = kept.prompt_ids.shape[1], mask.sum(-1)  # [B]

    def cut(rows: torch.Tensor) -> MicroBatch:
        T = int(lengths[rows].max())  # no need to compute what all of them have as padding
        prompt_too = rows, slice(L + T)
        completion = rows, slice(T)
        return MicroBatch(
            input_ids[prompt_too],
            attention_mask[prompt_too],
            mask[completion],
            sampled[completion],
            advantages[rows],
        )

    rows = torch.arange(len(mask), device=mask.device)
    idle = cut(rows[:1])
    idle.mask = torch.zeros_like(idle.mask)  # no token counts: loss and gradient are 0
    if config.beta == 0:
        rows = rows[advantages != 0]
    m = kept.mask.shape[1]
    parts = in_order(rows.tolist(), lengths.tolist(), m, L, config)
    return [cut(torch.tensor(part, device=mask.device)) for part in parts], idle


def in_order(
    rows: list[int], lengths: list[int], m: int, L: int, config: Config
) -> list[list[int]]:
    """The rows in micro-batches that compute few tokens, padding included.

    Rows of like length together leave less padding; rows of one prompt together read it once (see
    logprobs.py). Which saves more depends on the prompts, the lengths and the micro-batch's size,
    so the tokens of both orders are counted. In both the longest row comes first, so
    that what does not fit the memory shows at once.
    """
    longest = {}  # of each prompt's rows
    for row in rows:
        longest[row // m] = max(lengths[row], longest.get(row // m, 0))

    def by_length(row: int) -> tuple[int, ...]:
        return -lengths[row], row

    def by_prompt(row: int) -> tuple[int, ...]:
        return -longest[row // m], row // m, -lengths[row]

    def tokens(parts: list[list[int]]) -> int:
        prompts = sum(len({row // m for row in part}) for part in parts)
        return L * prompts + sum(len(part) * max(lengths[row] for row in part) for part in parts)

    size, found = config.micro_batch, []
    # Checkpointed layers read every row whole.
    for key in (by_length,) if config.gradient_checkpointing else (by_length, by_prompt):
        order = sorted(rows, key=key)
        found.append([order[i : i + size] for i in range(0, len(order), size)])
    return min(found, key=tokens)
