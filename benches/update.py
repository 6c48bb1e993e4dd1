"""What does training on m rollouts cost? train.py's own update against m.

    python bench.py update
    python bench.py update --prompts 1 --m 4 8 16 -- --model DIR

Legend: P prompts, m rollouts of each, L prompt and T completion tokens.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import nn

import train
from benches.measure import interleaved, ratio, table, train_settings
from logprobs import shared_prompts, target_log_probs, whole_rows
from rollouts import Rollouts
from support.learner import Learner
from support.models import load_model
from support.processes import Processes


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="measurements of each")
    add("--prompts", type=int, default=4, help="P")
    add("--m", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="rollouts kept")
    add("--completion", type=int, default=22, help="T")


def update(arguments: argparse.Namespace) -> dict:
    """Time of train.py's update against m: what PODS saves, and what long prompts cost.

    Tables: all kept rollouts in one micro-batch; micro-batches of a fixed size (GRPO-GA); and
    prompts of several lengths, each read whole with every rollout and once for all of them, beside
    the ratio of tokens, which is the most that this can gain.
    """
    config, P, T = train_settings(arguments), arguments.prompts, arguments.completion
    sizes, tables = sorted(arguments.m), {}
    model, _ = load_model(config.model)
    limits = {"one micro-batch": P * sizes[-1], f"micro-batches of {16 * P}": 16 * P}
    for title, rows in limits.items():
        settings = replace(config, micro_batch=rows, lr=1e-6)  # it is updated again and again
        learners = {m: Learner(model, settings, Processes()) for m in sizes}
        calls = {m: full_update(one, P, m, 6, T) for m, one in learners.items()}
        times, tables[title] = interleaved(calls, arguments.rounds), []
        for m in sizes:
            row = {"m": m, "ms": 1e3 * statistics.median(times[m])}
            tables[title].append(row | {"time / largest m": ratio(times, m, sizes[-1])})
    tables["prompts"] = []
    for L, m in product((1, T // 2, T, 2 * T, 4 * T), sizes):
        kept = full_rollouts(model, P, m, L, T)
        ways = {"whole": whole_rows, "once": shared_prompts}
        calls = {name: partial(one_pass, model, kept, way) for name, way in ways.items()}
        times = interleaved(calls, arguments.rounds)
        row = {"L": L, "m": m, "once, ms": 1e3 * statistics.median(times["once"])}
        row |= {"whole / once": ratio(times, "whole", "once")}
        tables["prompts"].append(row | {"tokens": m * (L + T) / (L + m * T)})
    for title, rows in tables.items():
        print(table(f"update on {P} prompts, completions of {T} tokens: {title}", rows))
    return {"model": config.model, "tables": tables}


def full_update(learner: Learner, P: int, m: int, L: int, T: int) -> Callable:
    """train.py's own update on random rollouts of exactly this size, ready to be called."""
    advantages = torch.tensor([1.0, -1.0]).repeat(P, m)[:, :m]  # none is 0
    return partial(train.update, learner, full_rollouts(learner.model, P, m, L, T), advantages, T)


def full_rollouts(model: nn.Module, P: int, m: int, L: int, T: int) -> Rollouts:
    """Random rollouts, every prompt L and every completion T tokens long."""
    torch.manual_seed(0)
    sizes, device = (P, m, T), model.device
    return Rollouts(
        prompt_ids=torch.randint(model.config.vocab_size, (P, L), device=device),
        prompt_mask=torch.ones(P, L, dtype=torch.bool, device=device),
        completion_ids=torch.randint(model.config.vocab_size, sizes, device=device),
        mask=torch.ones(sizes, dtype=torch.bool, device=device),
        log_probs=torch.zeros(sizes, device=device),
        finished=torch.ones(P, m, dtype=torch.bool, device=device),
        texts=[[""] * m for _ in range(P)],
    )


def one_pass(model: nn.Module, kept: Rollouts, way: Callable) -> None:
    """A forward and backward pass: every row read whole, or each prompt once, as an update may."""
    (ids, mask), (P, m, T) = kept.sequences(), kept.mask.shape  # [P*m, L+T]
    mask[-1, -1] = 0  # padded, as most micro-batches are: attention without a mask is faster
    row = torch.arange(P, device=ids.device).repeat_interleave(m)  # [P*m], of its prompt
    once = (kept.prompt_ids, row) if way is shared_prompts else ()
    model.zero_grad()
    hidden = way(model, ids, mask, T, *once)
    log_probs, _ = target_log_probs(model.get_output_embeddings(), hidden, ids[:, -T:], 1.0)
    log_probs.sum().backward()
