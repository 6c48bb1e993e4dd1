"""What does training on m rollouts cost, in time and memory? train.py's own update against m.

    python bench.py update
    python bench.py update --prompts 1 --m 8 16 32 --vocabulary 32000

    update = prepare_update(UpdateCase(m=16))       # ready to be called, any number of times

Legend: P prompts, m rollouts of each, L prompt and T completion tokens, V vocabulary.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from benches.measure import in_processes, interleaved, new_figure, peak_bytes, ratio, table
from benches.prompts import prompt_rows
from rollouts import Rollouts
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.settings import Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--prompts", type=int, default=4, help="P")
    parser.add_argument(
        "--m", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="rollouts kept"
    )
    parser.add_argument("--vocabulary", type=int, default=151_936, help="V of the third table")
    parser.add_argument(
        "--models", nargs="+", default=[Config.model], help="of the last tables, one for each"
    )
    parser.add_argument("--completion", type=int, default=22, help="T of the last tables")


def update(arguments: argparse.Namespace) -> dict:
    """Time and memory of train.py's update against m: why GRPO-GA is slow, and why it exists.

    Tables: all kept rollouts in one micro-batch (time and memory grow with m: what PODS saves),
    micro-batches of a fixed size (memory stays, time grows: GRPO-GA), the vocabulary of Qwen2.5 on
    a narrow model, where logits are all that matters (no float32 [m, T, V] is made), and prompts of
    several lengths, each read once for all its rollouts, and with every rollout (see prompts.py).
    """
    P, sizes = arguments.prompts, sorted(arguments.m)
    views = {
        "one micro-batch": [UpdateCase(m, P, micro_batch=P * sizes[-1]) for m in sizes],
        f"micro-batches of {16 * P}": [UpdateCase(m, P, micro_batch=16 * P) for m in sizes],
    }
    result = {}
    for title, cases in views.items():
        times = interleaved({case.m: prepare_update(case) for case in cases}, arguments.rounds)
        rows = []
        for case in cases:
            needed, _ = memory_in_new_process(case)
            row = {"m": case.m, "micro-batches": math.ceil(case.m * P / case.micro_batch)}
            row |= {"ms": 1e3 * statistics.median(times[case.m]), "memory MB": needed / 1e6}
            row["time / largest m"] = ratio(times, case.m, sizes[-1])
            rows.append(row)
        largest = rows[-1]["memory MB"]  # 0: too little for the system to count
        for row in rows:
            row["memory / largest m"] = row["memory MB"] / largest if largest else None
        print(table(f"update on {P} prompts, {title}", rows))
        result[title] = rows
    result["large vocabulary"] = vocabulary_rows(sizes, arguments.vocabulary)
    print(table(f"one prompt, V={arguments.vocabulary:,}", result["large vocabulary"]))
    draw(result, arguments.out / "update.png")
    prompts = {}
    for model in arguments.models:
        prompts[model] = prompt_rows(model, P, sizes, arguments.completion, arguments.rounds)
        title = f"{model}: {P} prompts of L tokens, completions of {arguments.completion}"
        print(table(title, prompts[model]))
    return {"tables": result, "prompts": prompts}


@dataclass(frozen=True)
class UpdateCase:
    """One update to measure: m rollouts of each of P prompts, every completion T tokens long."""

    m: int
    P: int = 4
    T: int = 22  # the tiny policy's usual completion
    micro_batch: int = 256
    vocabulary: int | None = None  # None: the tiny policy


def prepare_update(case: UpdateCase) -> Callable[[], object]:
    """train.py's own update, on random rollouts of exactly this size, ready to be called."""
    if case.vocabulary is None:
        model, _ = load_model(Config.model)
    else:
        model = narrow_model(case.vocabulary)
    kept = full_rollouts(model, case.P, case.m, 6, case.T)
    advantages = torch.tensor([1.0, -1.0]).repeat(case.P, case.m)[:, : case.m]  # none is 0
    # A small rate: the same policy is updated again and again.
    config = Config(n=case.m, m=case.m, micro_batch=case.micro_batch, lr=1e-6)
    return partial(train.update, Learner(model, config, Processes()), kept, advantages, case.T)


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


def narrow_model(vocabulary: int) -> Qwen2ForCausalLM:
    """A model of which next to nothing but the vocabulary is large."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


# ---- memory --------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest float32 result had while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return result


def update_memory(case: UpdateCase) -> tuple[int, int]:
    """Bytes one update needs beyond weights, gradients and optimizer state; its largest tensor's.

    To be called in a process of its own: on a CPU the only peak that can be read is the process's,
    over its whole life. A first update of one token brings everything that stays afterwards.
    """
    update = prepare_update(case)
    prepare_update(replace(case, m=2, P=1, T=1))()
    before = peak_bytes()
    update()
    needed = peak_bytes() - before
    with LargestTensor() as largest:
        update()
    return needed, 4 * largest.elements


def memory_in_new_process(case: UpdateCase) -> tuple[int, int]:
    """`update_memory`, from a process that has no peak to hide behind."""
    (result,) = in_processes(1, update_memory, [case])
    return result


def vocabulary_rows(sizes: list[int], vocabulary: int) -> list[dict]:
    """Peak memory, and the largest float32 tensor, beside what all logits would take."""
    rows = []
    for m in sizes:
        case = UpdateCase(m, P=1, T=32, micro_batch=m, vocabulary=vocabulary)
        needed, largest = memory_in_new_process(case)
        row = {"m": m, "T": case.T, "[m, T, V] float32 MB": 4 * m * case.T * vocabulary / 1e6}
        rows.append(row | {"largest tensor MB": largest / 1e6, "memory MB": needed / 1e6})
    return rows


def draw(result: dict[str, list[dict]], path: Path) -> None:
    """Time and memory against m."""
    figure, (left, middle, right) = new_figure(3)
    *views, vocabulary = result.items()
    for title, rows in views:
        m = [row["m"] for row in rows]
        left.plot(m, [row["ms"] for row in rows], marker="o", label=title)
        middle.plot(m, [row["memory MB"] for row in rows], marker="o", label=title)
    labels = {
        "[m, T, V] float32 MB": "all logits, float32 [m, T, V]",
        "largest tensor MB": "largest tensor made",
        "memory MB": "peak of the update",
    }
    for key, label in labels.items():
        right.plot(*zip(*[(row["m"], row[key]) for row in vocabulary[1]]), marker="o", label=label)
    left.set(title="Time of an update", ylabel="milliseconds")
    middle.set(title="Memory of an update", ylabel="MB beyond weights and optimizer")
    right.set(title="A large vocabulary", ylabel="MB")
    for axes in (left, middle, right):
        axes.set(xlabel="rollouts kept for each prompt, m", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
