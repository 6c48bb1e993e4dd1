"""What does the length of the prompt cost an update? Prompts read once against rows read whole.

    for row in prompt_rows("tiny_policy", P=4, sizes=[4, 16], T=22, rounds=3): ...

All m rollouts of a group begin with the same prompt. Read whole, they are m (L + T) tokens; read
once, the prompt's L and m T more: at best (m (L + T)) / (L + m T) times as fast.

Legend: P prompts, m rollouts of each, L prompt and T completion tokens, V vocabulary.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from benches.measure import in_processes, interleaved, peak_bytes, ratio
from logprobs import target_log_probs, token_log_probs, whole_rows
from support.models import load_model


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass of P*m rows in one micro-batch, every row L + T tokens long."""

    model: str  # folder or hub name
    P: int
    m: int
    L: int
    T: int
    whole: bool  # each row read whole; else as an update does it


def prepare(case: Pass, model: nn.Module) -> Callable[[], None]:
    """The pass on random tokens, ready to be called."""
    V, device = model.config.vocab_size, model.device
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(V, (case.P, case.L), generator=generator)
    completions = torch.randint(V, (case.P * case.m, case.T), generator=generator)
    ids = torch.cat([prompts.repeat_interleave(case.m, 0), completions], dim=1).to(device)
    mask = torch.ones_like(ids)  # [P*m, L+T]
    mask[-1, -1] = 0  # padded, as most micro-batches are: attention without a mask is faster

    def forward_and_backward() -> None:
        model.zero_grad()
        if case.whole:
            hidden = whole_rows(model, ids, mask, case.T)  # [P*m, T, hidden]
            targets = ids[:, -case.T :]  # [P*m, T]
            log_probs, _ = target_log_probs(model.get_output_embeddings(), hidden, targets, 1.0)
        else:
            log_probs = token_log_probs(model, ids, mask, case.T)
        log_probs.sum().backward()

    return forward_and_backward


def pass_memory(case: Pass) -> int:
    """Bytes that a pass needs beyond weights and gradients. To be called in a new process."""
    model, _ = load_model(case.model)
    prepare(replace(case, P=1, m=2, L=1, T=1), model)()
    ready = prepare(case, model)
    before = peak_bytes()
    ready()
    return peak_bytes() - before


def prompt_rows(name: str, P: int, sizes: list[int], T: int, rounds: int) -> list[dict]:
    """Time and memory of both ways, for prompts of no tokens to speak of up to 4 T.

    Args:
        name: the model's, folder or hub.
        sizes: m.
        rounds: measurements of each, the two ways in turn.
    """
    rows, (model, _) = [], load_model(name)
    for L in (1, T // 2, T, 2 * T, 4 * T):
        for m in sizes:
            once = Pass(name, P, m, L, T, whole=False)
            ways = {"whole": replace(once, whole=True), "once": once}
            times = interleaved({way: prepare(case, model) for way, case in ways.items()}, rounds)
            memory = dict(zip(ways, in_processes(1, pass_memory, list(ways.values()))))
            faster, bound = ratio(times, "whole", "once"), m * (L + T) / (L + m * T)
            row = {"L": L, "m": m, "once, ms": 1e3 * statistics.median(times["once"])}
            row |= {"whole / once": faster, "bound": bound, "of it": faster[0] / bound}
            row |= {f"{way}, MB": needed / 1e6 for way, needed in memory.items()}
            rows.append(row)
    return rows
