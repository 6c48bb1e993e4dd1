"""What PODS costs and what it buys, measured side by side in one run.

    python bench.py race       # accuracy against training time: GRPO, GRPO-GA, PODS, other rules
    python bench.py select     # the rule against torch.sort, the authors' loop and brute force
    python bench.py sampler    # tokens per second of each sampler, and the share of the prefill
    python bench.py update     # time and peak memory of the update against m
    accelerate launch --multi_gpu --num_processes 2 bench.py accumulate    # what GRPO-GA pays there
    python bench.py peers      # one step of TRL's GRPOTrainer and of train.py; needs trl==1.16.0
    python bench.py profile    # where a step goes, and how much of the machine's peak it reaches

A number from one machine on one day says little, a ratio says more, and a ratio of two things timed
in turn in the same process says most: whatever slows the machine down then hits both. So
everything that is compared here is interleaved, repeated, and reported with its spread. Each
command prints a table and writes `NAME.json` (with the command and the machine) and, where a
picture helps, `NAME.png` to --out, by default `runs/bench`.

The race runs train.py's own step on train.py's own clock, evaluation excluded; its arms are
settings. Left out: comparisons of numbers that were not measured in the same run (the paper's own
are shown beside ours, never divided by them).

Legend: P prompts, n rollouts a prompt, m kept, G groups, B = P*m sequences, L prompt tokens, T
completion tokens, V vocabulary. An arm is one setting of train.py in the race.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the seconds of imports: no pages of traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import csv
import io
import itertools
import json
import math
import os
import platform
import random
import re
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from grpo import Policy
from pods import max_variance
from rollouts import Rollouts, TorchSampler, eos_token_ids, pack
from support import tasks, tiny
from support.arithmetic import careless_solution
from support.vllm import VLLMSampler

Curve = Sequence[tuple[float, float]]  # (time, accuracy), without the anchor at time 0


# ---- measuring and reporting ---------------------------------------------------------------------


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, least: float = 0.002
) -> dict[str, list[float]]:
    """Seconds a call of each function, measured in turn, `rounds` times.

    A first call of each warms up caches and finds how many calls make `least` seconds, so that the
    clock's own cost does not show. Round i of every function belongs together: see `ratio`.
    """
    calls = {}
    for name, function in functions.items():
        seconds = min(seconds_of(function, 1), seconds_of(function, 1))
        calls[name] = max(1, math.ceil(least / max(seconds, 1e-9)))
    times = {name: [] for name in functions}
    for _ in tqdm(range(rounds), unit="round", leave=False, disable=None):
        for name, function in functions.items():
            times[name].append(seconds_of(function, calls[name]))
    return times


def seconds_of(function: Callable[[], object], calls: int) -> float:
    """Seconds a call, a GPU's work included."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> list[float]:
    """The ratio of two functions' times: [median, lower quartile, upper quartile] over rounds.

    Each round gives one ratio of neighbours in time, so slow minutes of the machine cancel.
    """
    ratios = [a / b for a, b in zip(times[numerator], times[denominator], strict=True)]
    low, median, high = quartiles(ratios)
    return [median, low, high]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def in_processes(count: int, function: Callable, items: Sequence) -> Iterator:
    """`function` of each item, in order, computed by `count` new processes at a time.

    They have imported this file and done nothing yet.
    """
    # Its server imports once; a fork of *this* process would share its past.
    context = get_context("forkserver")
    context.set_forkserver_preload(["__main__", "bench"])
    with ProcessPoolExecutor(count, context, initializer=start_process) as pool:
        # Not pool.map: it cancels what has not begun, of which a pool that was ended complains.
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            # Ctrl-C, here or where the results are used: do not wait for the rest.
            for process in active_children():
                process.terminate()
            raise


def start_process() -> None:
    """No progress bars of models, and one thread, which is what train.py chooses for its small one.

    Ctrl-C reaches this process too, but it is the first one that ends the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = found.group(1) if found else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],  # runnable processes: above `cores`, others were working too
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def table(title: str, rows: Sequence[dict]) -> str:
    """Rows of equal keys as aligned text; three digits; [a, low, high] as a (low-high)."""

    def shown(value: object) -> str:
        if value is None:
            return "-"
        if isinstance(value, (list, tuple)):
            if value[0] is None:
                return "never"
            return f"{shown(value[0])} ({shown(value[1])}-{shown(value[2])})"
        if isinstance(value, float):
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)

    cells = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    return "\n".join(["", title, *lines])


def write(arguments: argparse.Namespace, result: dict) -> Path:
    """`OUT/NAME.json`: the result with its command and machine."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.bench}.json"
    head = {"bench": arguments.bench, "command": arguments.command, "machine": machine()}
    train.write_atomically(path, json.dumps(head | result) + "\n")
    print(f"\nwritten to {path}")
    return path


def new_figure(columns: int, height: float = 4.2):
    """A figure with a row of axes; without pyplot, so there is no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


# ---- select --------------------------------------------------------------------------------------

SELECT_WAYS = {
    "sort": "torch.sort alone",
    "max_variance": "pods.max_variance",
    "authors": "m + 1 subsets of size m",
    "brute": "all C(n, m) subsets",
}
ONE_GROUP = ((1, n) for n in (16, 64, 256, 1024, 4096, 65_536, 1_000_000))
SELECT_SIZES = (*ONE_GROUP, *itertools.product((16, 512, 4096), (64, 1024)))


def authors_way(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The obvious max-variance selection for one group [n]: build all m + 1 subsets, compare.

    This is how the paper's released trainers do it: each subset is put together, the i lowest and
    the m - i highest, and its variance computed from all its m members.
    """
    order = rewards.argsort()  # [n]
    best, largest = None, -math.inf
    for i in range(m + 1):
        subset = torch.cat([order[:i], order[len(order) - (m - i) :]])  # [m]
        variance = rewards[subset].var(correction=0).item()
        if variance > largest:
            best, largest = subset, variance
    return best.sort().values


def brute_force(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The best of all subsets of size m of one group [n]: C(n, m) of them."""
    subsets = torch.tensor(list(itertools.combinations(range(len(rewards)), m)))  # [C(n, m), m]
    return subsets[rewards[subsets].var(-1, correction=0).argmax()]


def each_group(
    function: Callable[[torch.Tensor, int], torch.Tensor], rewards: torch.Tensor, m: int
) -> torch.Tensor:
    """A function for one group, applied to every row of rewards [G, n]: indices [G, m]."""
    return torch.stack([function(group, m) for group in rewards])


def select(arguments: argparse.Namespace) -> dict:
    """How long max-variance selection takes.

    `max_variance` is one sort and a few passes, so it should stay within 3x of torch.sort of the
    same rewards where the work, not the call, is what costs; below about 10,000 rewards a call of
    anything costs tens of microseconds. The authors' way costs m + 1 small subsets for every group.
    What would take longer than --patience a call is left out ("-").
    """
    rows = []
    for G, n in SELECT_SIZES if arguments.sizes is None else arguments.sizes:
        m = max(2, n // 4)
        generator = torch.Generator().manual_seed(n + G)
        rewards = torch.randn(G, n, dtype=torch.float64, generator=generator)
        functions = {
            "sort": partial(torch.sort, rewards),
            "max_variance": partial(max_variance, rewards, m),
        }
        for name, function, most in (("authors", authors_way, 4096), ("brute", brute_force, 16)):
            if n <= most:
                seconds = G * seconds_of(partial(function, rewards[0], m), 1)
                if seconds <= arguments.patience:
                    functions[name] = partial(each_group, function, rewards, m)
        times = interleaved(functions, arguments.rounds)

        row = {"groups": G, "n": n, "m": m}
        for name in SELECT_WAYS:
            row[f"{name} ms"] = 1e3 * statistics.median(times[name]) if name in times else None
        row["max_variance / sort"] = ratio(times, "max_variance", "sort")
        for name in ("authors", "brute"):
            measured = name in times
            row[f"{name} / max_variance"] = ratio(times, name, "max_variance") if measured else None
        rows.append(row)
    print(table("selection: ratios as median (quartiles) over rounds", rows))
    draw_select(rows, arguments.out / "select.png")
    return {"rows": rows}


def draw_select(rows: list[dict], path: Path) -> None:
    """Time of one call against the group's size, and against the number of groups."""
    figure, (left, right) = new_figure(2)
    most = max((row["n"] for row in rows if row["groups"] > 1), default=None)
    views = (
        (left, "n", [row for row in rows if row["groups"] == 1], "one group, m = n / 4"),
        (right, "groups", [row for row in rows if row["n"] == most], f"n = {most}, m = n / 4"),
    )
    for axes, key, view, title in views:
        for name in SELECT_WAYS:
            points = [(row[key], row[f"{name} ms"]) for row in view if row[f"{name} ms"]]
            if points:
                axes.loglog(*zip(*points), marker="o", ms=4, label=SELECT_WAYS[name])
        axes.set(
            title=title, xlabel={"n": "rollouts n in the group"}.get(key, "groups in one call")
        )
        axes.set_ylabel("milliseconds a call")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


# ---- sampler -------------------------------------------------------------------------------------


class GenerateSampler:
    """transformers' own `generate`, as most trainers call it; only the tokens, no log-probs."""

    def __init__(self, model: nn.Module, tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.eos_ids = eos_token_ids(model, tokenizer)

    @torch.inference_mode()
    def generate(self, prompts, n, max_new_tokens, temperature, seed) -> torch.Tensor:
        """Completion ids [P*n, T], padded after EOS."""
        torch.manual_seed(seed)
        inputs = self.tokenizer.pad(
            {"input_ids": prompts}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        ids = self.model.generate(
            **inputs,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=n,
            eos_token_id=self.eos_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return ids[:, inputs["input_ids"].shape[1] :]


def count_tokens(completions: "Rollouts | torch.Tensor", eos_ids: Sequence[int]) -> int:
    """Completion tokens, EOS included: what is padded after it is no work done."""
    if isinstance(completions, Rollouts):
        return int(completions.mask.sum())
    ended = torch.isin(completions, torch.tensor(eos_ids, device=completions.device)).long()
    return int((ended.cumsum(-1) - ended == 0).sum())  # tokens with no EOS before them


def samplers(model: nn.Module, tokenizer) -> dict[str, object]:
    """Everything that can generate here, by name."""
    found = {"generate": GenerateSampler(model, tokenizer), "torch": TorchSampler(model, tokenizer)}
    try:
        found["vllm"] = VLLMSampler(model, tokenizer)
    except ImportError as error:  # not installed, or the build for another device
        print(f"no row for vLLM: {str(error).splitlines()[0]}")
    return found


def sampler_rows(
    found: dict[str, object], prompts: list[list[int]], n: int, length: int, rounds: int
) -> list[dict]:
    """One row a sampler, for n rollouts of each prompt."""
    functions = {}
    for name, one in found.items():
        functions[name] = partial(one.generate, prompts, n, length, 1.0, seed=0)
        functions[f"{name}, 1 token"] = partial(one.generate, prompts, n, 1, 1.0, seed=0)
    tokens = {name: count_tokens(functions[name](), found["generate"].eos_ids) for name in found}
    times = interleaved(functions, rounds)
    # Each draws its own tokens from the same policy, so seconds compare only token by token.
    per_token = {name: [seconds / tokens[name] for seconds in times[name]] for name in found}
    return [
        {
            "n": n,
            "sampler": name,
            "tokens": tokens[name],
            "tokens/s": 1 / statistics.median(per_token[name]),
            "prefill share": ratio(times, f"{name}, 1 token", name),
            "speed / generate": ratio(per_token, "generate", name),
        }
        for name in found
    ]


def sampler(arguments: argparse.Namespace) -> dict:
    """Completion tokens per second of TorchSampler, transformers' `generate` and vLLM.

    All sample the same prompts from the same weights at temperature 1, in turn, without top-k or
    top-p. TorchSampler and vLLM also return texts and log-probs in that time, `generate` only ids.
    The prefill's share is the time of a call for one token over the time of the whole call.
    """
    names = ("model", "task", "data", "threads")
    config = train.Config(**{name: getattr(arguments, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        run = train.Run(config, Path(folder) / "run", train=False)
        data = next(iter(run.eval_data.values()))
        prompts = data.prompt_ids[: arguments.prompts]
        length = min(arguments.max_new_tokens, run.max_new_tokens)
        found = samplers(run.model, run.tokenizer)
        rows = [
            row
            for n in arguments.n
            for row in sampler_rows(found, prompts, n, length, arguments.rounds)
        ]
    print(table(f"generation: {len(prompts)} prompts of {config.task}, {config.model}", rows))
    draw_sampler(rows, arguments.out / "sampler.png")
    return {"model": config.model, "prompts": len(prompts), "rows": rows}


def draw_sampler(rows: list[dict], path: Path) -> None:
    """Tokens per second and the prefill's share against n."""
    figure, (left, right) = new_figure(2)
    for name in dict.fromkeys(row["sampler"] for row in rows):
        view = [row for row in rows if row["sampler"] == name]
        n = [row["n"] for row in view]
        left.plot(n, [row["tokens/s"] for row in view], marker="o", label=name)
        right.plot(n, [row["prefill share"][0] for row in view], marker="o", label=name)
    left.set(title="Speed of generation", ylabel="completion tokens per second")
    right.set(title="Share of the time until the first token", ylabel="share of a call")
    for axes in (left, right):
        axes.set(xlabel="rollouts n for each prompt", xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


# ---- update --------------------------------------------------------------------------------------


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
        model, _ = train.load_model(train.Config.model)
    else:
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
        model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=case.vocabulary, **shape, **heads, tie_word_embeddings=True)
        ).to("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    sizes, device = (case.P, case.m, case.T), model.device
    kept = Rollouts(
        prompt_ids=torch.randint(model.config.vocab_size, (case.P, 6), device=device),
        prompt_mask=torch.ones(case.P, 6, dtype=torch.bool, device=device),
        completion_ids=torch.randint(model.config.vocab_size, sizes, device=device),
        mask=torch.ones(sizes, dtype=torch.bool, device=device),
        log_probs=torch.zeros(sizes, device=device),
        finished=torch.ones(case.P, case.m, dtype=torch.bool, device=device),
        texts=[[""] * case.m for _ in range(case.P)],
    )
    advantages = torch.tensor([1.0, -1.0]).repeat(case.P, case.m)[:, : case.m]  # none is 0
    config = train.Config(m=case.m, micro_batch=case.micro_batch)
    return partial(train.update, update_only(model, config, case.T), kept, advantages)


def update_only(model: nn.Module, config: train.Config, max_new_tokens: int) -> SimpleNamespace:
    """As much of a train.Run as `train.update` needs."""
    accelerator = train.make_accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    policy = Policy(model, getattr(torch, config.dtype))
    policy, optimizer = train.distribute(accelerator, policy, optimizer, config)
    return SimpleNamespace(
        config=config,
        accelerator=accelerator,
        model=model,
        policy=policy,
        optimizer=optimizer,
        reference=None,
        max_new_tokens=max_new_tokens,
    )


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


def peak_bytes() -> int:
    """The most memory ever held: by torch's allocator on a GPU, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage would count what the parent process held, too
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text()).group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, else KiB


def update(arguments: argparse.Namespace) -> dict:
    """Time and memory of train.py's update against m: why GRPO-GA is slow, and why it exists.

    Three tables: all kept rollouts in one micro-batch (time and memory grow with m: what PODS
    saves), micro-batches of a fixed size (memory stays, time grows: GRPO-GA), and the vocabulary of
    Qwen2.5 on a narrow model, where logits are all that matters (no float32 [m, T, V] is made).
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
    draw_update(result, arguments.out / "update.png")
    return {"tables": result}


def accumulate(arguments: argparse.Namespace) -> dict:
    """What GRPO-GA pays for its accumulation: more passes, smaller ones, and when to synchronise.

    Run by `accelerate launch` with several processes. The update of m rollouts of each of P prompts
    a process, in micro-batches of 16 P rows or in one, gradients sent once an update (train.py), or
    after every micro-batch (DDP left to itself), or not at all, which shows what sending costs.
    """
    m, P = arguments.m, arguments.prompts
    cases = {  # kept, rows of a micro-batch, when gradients are sent
        "PODS, one pass": (16, 16 * P, "once"),
        "GA, accumulated": (m, 16 * P, "once"),
        "GA, sent every pass": (m, 16 * P, "every pass"),
        "GA, never sent": (m, 16 * P, "never"),
        "GA, one pass": (m, m * P, "once"),
    }
    updates = {
        name: prepare_update(UpdateCase(kept, P, micro_batch=micro_batch))
        for name, (kept, micro_batch, _) in cases.items()
    }
    once = train.once_at_the_end

    def measured(name: str) -> None:
        """One update of this case, its gradients sent when the case says."""
        sent, run = cases[name][2], updates[name].args[0]
        train.once_at_the_end = once if sent == "once" else lambda *_: nullcontext()
        with run.accelerator.no_sync(run.policy) if sent == "never" else nullcontext():
            updates[name]()
        train.once_at_the_end = once

    # One call at a time: more would be chosen by each process's own clock, and all must agree.
    functions = {name: partial(measured, name) for name in updates}
    times = interleaved(functions, arguments.rounds, least=0.0)
    rows = [
        {"update": name, "m": kept, "passes": math.ceil(kept * P / micro_batch), "sent": sent}
        | {"ms": 1e3 * statistics.median(times[name])}
        | {"time / PODS": ratio(times, name, "PODS, one pass")}
        | {"time / accumulated": ratio(times, name, "GA, accumulated")}
        for name, (kept, micro_batch, sent) in cases.items()
    ]
    count = updates["PODS, one pass"].args[0].accelerator.num_processes
    print(table(f"update on {count} process(es), P={P} prompts each", rows))
    return {"processes": count, "rows": rows}


def vocabulary_rows(sizes: list[int], vocabulary: int) -> list[dict]:
    """Peak memory, and the largest float32 tensor, beside what all logits would take."""
    rows = []
    for m in sizes:
        case = UpdateCase(m, P=1, T=32, micro_batch=m, vocabulary=vocabulary)
        needed, largest = memory_in_new_process(case)
        row = {"m": m, "T": case.T, "[m, T, V] float32 MB": 4 * m * case.T * vocabulary / 1e6}
        rows.append(row | {"largest tensor MB": largest / 1e6, "memory MB": needed / 1e6})
    return rows


def draw_update(result: dict[str, list[dict]], path: Path) -> None:
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


# ---- the measure ---------------------------------------------------------------------------------


def speedup(baseline: Curve, pods: Curve, fraction: float = 0.99) -> float | None:
    """How many times sooner `pods` is as good as the baseline gets: the paper's measure.

    Args:
        baseline, pods: (time, accuracy) pairs on a common grid, each a mean over runs, without the
            anchor at time 0.
        fraction: of the baseline's best accuracy that has to be reached.

    Returns:
        The ratio of the first times at which each curve is there; None if one never is.
    """
    ours, theirs = first_time(pods, baseline, fraction), first_time(baseline, baseline, fraction)
    return None if ours is None else theirs / ours


def first_time(curve: Curve, baseline: Curve, fraction: float = 0.99) -> float | None:
    """When a curve first is at `fraction` of the baseline's best; None if never."""
    target = fraction * max(accuracy for _, accuracy in baseline)
    return next((time for time, accuracy in curve if accuracy >= target), None)


def bootstrap(
    statistic: Callable[[list[int]], float | None], runs: int, draws: int = 1000, seed: int = 0
) -> list[float]:
    """The 95% interval of a statistic of some runs, by drawing the runs anew with replacement.

    Args:
        statistic: of a list of run numbers, each in range(runs), some of them repeated. None counts
            as 0: a curve that never arrives is infinitely slow.
        runs: how many there are. A handful of runs gives a rough interval, and too narrow a one.
    """
    rng = random.Random(seed)
    drawn = [rng.choices(range(runs), k=runs) for _ in range(draws)]
    values = sorted(statistic(chosen) or 0.0 for chosen in drawn)
    return [values[int(0.025 * draws)], values[int(0.975 * draws)]]


def mean_curve(times: Sequence[float], runs: Sequence[Sequence[float]]) -> Curve:
    """The mean over runs of their accuracies at common times."""
    return [(time, statistics.fmean(values)) for time, values in zip(times, zip(*runs))]


# The paper's settings: file name or tag of the baseline and of PODS in the authors' logs, then what
# was measured. Single GPU: test set, metric, hours shown, hours between checkpoints.
SINGLE_GPU = {
    "GSM8K, Qwen2.5-3B, L40S": ("GSM8K-512-16-16", "GSM8K-512-64-16", "gsm8k", "ans_acc", 6, 1 / 2),
    "MATH, Qwen2.5-3B, L40S": (
        "MATH-NF-512-8-8",
        "MATH-NF-512-32-8",
        "math500",
        "ans_acc",
        6,
        1 / 2,
    ),
    "GSM8K, Llama-3.2-3B, L40S": (
        *("Llama-512-16-16-0.04", "Llama-512-64-16-0.04", "gsm8k", "both_acc"),
        *(3 / 2, 1 / 6),
    ),
}
EIGHT_GPUS = {
    "GSM8K, Qwen2.5-3B, 8 x H100": "h100s-acc.csv",
    "GSM8K, Qwen2.5-7B, 8 x A100": "a100s-acc.csv",
}


def paper_curves(folder: Path | str) -> dict[str, dict]:
    """The authors' published evaluation logs (`results/` of github.com/YixuanEvenXu/pods).

    Returns:
        For each setting: `unit` of time, `times`, and for `baseline` and `pods` a list of runs,
        each the accuracies at these times. `mean_curve` and `speedup` take it from there.
    """
    settings, folder = {}, Path(folder)
    for name, (baseline, pods, data, metric, hours, every) in SINGLE_GPU.items():
        times = [every * (i + 1) for i in range(round(hours / every))]
        setting = {"unit": "hours", "times": times}
        for arm, stem in (("baseline", baseline), ("pods", pods)):
            logs = sorted(folder.glob(f"Instruct-{stem}-Run*.json"))
            setting[arm] = [checkpoint_log(log, data, metric)[: len(times)] for log in logs]
        settings[name] = setting
    for name, file in EIGHT_GPUS.items():
        times = list(range(2, 31, 2))
        setting = {"unit": "minutes", "times": times}
        for arm, tag in (("baseline", "-n32-m32-ga16 "), ("pods", "-n128-m32-ga4 ")):
            setting[arm] = table_log(folder / file, tag, times)
        settings[name] = setting
    return settings


def checkpoint_log(path: Path, data: str, metric: str) -> list[float]:
    """One run's accuracies, a mean over repeats for each checkpoint, in the order of the steps."""
    checkpoints = json.loads(path.read_text())
    order = sorted(checkpoints, key=lambda name: int(name.rpartition("-")[2]))
    return [statistics.fmean(checkpoints[name][data][metric]) for name in order]


def table_log(path: Path, tag: str, minutes: Sequence[float]) -> list[list[float]]:
    """The accuracies of the runs whose name holds `tag`, at the rows nearest to these minutes."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    runs = []
    for column in rows[0]:
        if tag in column and column.endswith("accuracy_reward/mean"):
            points = [
                (float(row["eval/time"]) / 60, float(row[column])) for row in rows if row[column]
            ]
            runs.append([min(points, key=lambda p: abs(p[0] - minute))[1] for minute in minutes])
    return runs


# ---- race ----------------------------------------------------------------------------------------

ARMS = {  # all of them with train.py's micro-batch, which is what P = 4 and m = 16 need
    "grpo": {"n": 16, "m": 16},
    "grpo-ga": {"n": 64, "m": 64},
    "pods": {"n": 64, "m": 16, "rule": "max_variance"},
    "random": {"n": 64, "m": 16, "rule": "random"},
    "max-reward": {"n": 64, "m": 16, "rule": "max_reward"},
    "percentile": {"n": 64, "m": 16, "rule": "percentile"},
}


class Racer(train.Run):
    """One run of train.py that can be stopped at any mark of its own clock, and started again."""

    def __init__(self, config: train.Config, folder: Path) -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            super().__init__(config, folder)
        self.curve = {key: [] for key in ("time", "step", "accuracy", "idle", "generate")}
        self.mark()

    def record(self, stats: dict, shown: list[dict]) -> None:
        """Where train.py would write files and evaluate, only remember: the marks do the rest."""
        self.time += sum(self.seconds.values())
        self.rows.append(stats | {"seconds": self.seconds})

    def advance(self, until: float) -> None:
        """Train until this many seconds of training time, then evaluate."""
        while self.time < until:
            self.advance_one()
        self.mark()

    def advance_one(self) -> None:
        """One step."""
        self.step += 1
        self.seconds = dict.fromkeys(train.PHASES, 0.0)
        train.train_step(self, self.step)

    def mark(self) -> None:
        """Evaluate, off the clock. Sums over the steps so far: of `idle`, the shares of groups
        without signal, and of `generate`, the seconds of generation.
        """
        accuracy = next(iter(self.evaluation().values()))["accuracy"]
        idle = sum(row["groups_without_signal"] for row in self.rows) / self.config.prompts_per_step
        generate = sum(row["seconds"]["generate"] for row in self.rows)
        values = (self.time, self.step, accuracy, idle, generate)
        for key, value in zip(self.curve, values, strict=True):
            self.curve[key].append(round(value, 4))

    def result(self, until: float) -> dict:
        """The curve, its mean height, the mean seconds of a step's phases, and the last mark."""
        seconds = {
            phase: statistics.fmean(row["seconds"][phase] for row in self.rows)
            for phase in train.PHASES
        }
        mean = statistics.fmean(self.curve["accuracy"][1:])
        return {"curve": self.curve, "mean_accuracy": mean, "seconds": seconds, "until": until}


def settings_of(arguments: argparse.Namespace, *train_flags: str) -> train.Config:
    """Settings of train.py with these flags, without its own evaluations."""
    threads = ("--threads", str(arguments.threads))
    return train.parse([*threads, *train_flags, "--eval-every", "0"])[0]


def heat(
    settings: dict[str, train.Config], marks: Sequence[float], seed: int, jobs: int = 1
) -> dict[str, dict]:
    """One seed of all arms, in one process: each trains up to the next mark, then the next arm.

    Slices of a second or so let whatever else the machine does hit all arms alike. `jobs` heats at
    a time have a line each of the terminal for their progress.
    """
    line = {"desc": f"seed {seed}", "position": seed % jobs, "unit": "mark", "leave": False}
    with tempfile.TemporaryDirectory() as folder:
        racers = {
            name: Racer(replace(config, seed=seed), Path(folder) / str(i))
            for i, (name, config) in enumerate(settings.items())
        }
        for mark in tqdm(marks, disable=None, **line):
            for racer in racers.values():
                racer.advance(mark)
        return {name: racer.result(marks[-1]) for name, racer in racers.items()}


def run_heats(
    settings: dict[str, train.Config], seeds: int, marks: Sequence[float], jobs: int
) -> dict[str, list[dict]]:
    """The runs of each arm, one a seed; `jobs` seeds at a time, each in a process of its own."""
    print(f"{len(settings)} runs of {marks[-1]:g} s of training, {seeds} seeds, {jobs} at a time")
    one, heats, start = partial(heat, settings, marks, jobs=jobs), [], time.perf_counter()
    try:
        results = map(one, range(seeds)) if jobs == 1 else in_processes(jobs, one, range(seeds))
        for result in results:
            heats.append(result)
            minutes = (time.perf_counter() - start) / 60
            print(f"seed {len(heats) - 1} is through, after {minutes:.1f} min", flush=True)
    except KeyboardInterrupt:
        if not heats:
            raise
        print(f"\nstopped; what follows is of the {len(heats)} of {seeds} seeds that are through")
    runs = {name: [one[name] for one in heats] for name in settings}
    warn_of_load(runs)
    return runs


Rates = dict[float, list[dict]]  # the runs of one arm, one a seed, at each learning rate tried


def common_grid(
    runs: list[dict], spacing: float, x: str = "time", y: str = "accuracy"
) -> tuple[np.ndarray, np.ndarray]:
    """A common grid of times (or steps), and y of the runs there [runs, points]: straight lines
    between the marks, because every run reaches a mark a fraction of a step late.
    """
    end = min(run["curve"][x][-1] for run in runs)
    if x == "time":
        end = min(end, runs[0]["until"])  # the last mark, on which all arms agree
    grid = spacing * np.arange(1, int(end / spacing + 1e-9) + 1)
    return grid, np.stack([np.interp(grid, run["curve"][x], run["curve"][y]) for run in runs])


def best_rate(rates: Rates, chosen: Sequence[int] | None = None) -> float:
    """The learning rate with the best accuracy on average over the race: early *and* high."""
    chosen = range(len(next(iter(rates.values())))) if chosen is None else chosen
    return max(rates, key=lambda lr: sum(rates[lr][i]["mean_accuracy"] for i in chosen))


def arrivals(
    baseline: Rates, rates: Rates, spacing: float, chosen: Sequence[int] | None = None
) -> list[dict[str, float]] | None:
    """Where the baseline and an arm stand when they reach 99% of the baseline's best accuracy.

    Args:
        baseline, rates: each is taken at its best learning rate.
        spacing: of the grid of times, in seconds.
        chosen: the seeds that count, perhaps some of them repeatedly; default: all.

    Returns:
        For each of the two the `time` and, at that time, the mean over seeds of `step` and
        `generate`; None if the arm never gets there.
    """
    chosen = range(len(next(iter(rates.values())))) if chosen is None else chosen
    both = [[arm[best_rate(arm, chosen)][i] for i in chosen] for arm in (baseline, rates)]
    curves = [mean_curve(*common_grid(runs, spacing)) for runs in both]
    there = []
    for runs, curve in zip(both, curves):
        time = first_time(curve, curves[0])
        if time is None:
            return None
        point = {"time": time}
        for key in ("step", "generate"):
            marks = [np.interp(time, run["curve"]["time"], run["curve"][key]) for run in runs]
            point[key] = statistics.fmean(marks)
        there.append(point)
    return there


def compare(baseline: Rates, rates: Rates, key: str, spacing: float) -> list[float | None]:
    """How many times less `time` or how many times fewer `step`s an arm needs than a baseline.

    Both at 99% of the baseline's best (`arrivals`; in time this is `speedup`), with the bootstrap
    interval. A draw takes the same seeds for both, since those raced side by side, and chooses the
    rates anew, so the interval knows that they were chosen.
    """

    def statistic(chosen: Sequence[int] | None) -> float | None:
        """The ratio for these seeds; None if the arm never gets there."""
        there = arrivals(baseline, rates, spacing, chosen)
        return there and there[0][key] / there[1][key]

    return [statistic(None), *bootstrap(statistic, len(next(iter(rates.values()))))]


def standings(
    arms: dict[str, Rates], baselines: Sequence[str], spacing: float
) -> tuple[list[dict], list[dict]]:
    """What each arm costs and reaches, and how much sooner than the baselines: two tables."""
    costs, gains = [], []
    for name, rates in arms.items():
        lr = best_rate(rates)
        runs = rates[lr]
        seconds = {p: statistics.fmean(run["seconds"][p] for run in runs) for p in train.PHASES}
        final = [run["curve"]["accuracy"][-1] for run in runs]
        error = statistics.stdev(final) / math.sqrt(len(final)) if len(final) > 1 else 0.0
        row = {"arm": name, "lr": lr, "s/step": sum(seconds.values())} | seconds
        row["steps"] = round(statistics.fmean(run["curve"]["step"][-1] for run in runs))
        last = [run["curve"]["idle"][-1] / run["curve"]["step"][-1] for run in runs]
        row["no signal"] = statistics.fmean(last)
        row["peak"] = float(common_grid(runs, spacing)[1].mean(0).max())
        costs.append(row | {"final": statistics.fmean(final), "+-": error})
        gain = {"arm": name, "lr": lr}
        for baseline in baselines:
            for key in ("time", "step"):
                other = arms[baseline] if baseline in arms and baseline != name else None
                gain[f"{key} vs {baseline}"] = other and compare(other, rates, key, spacing)
        gains.append(gain)
    return costs, gains


def race(arguments: argparse.Namespace) -> dict:
    """Accuracy against training time for GRPO, GRPO-GA, PODS and the other rules.

    Every arm is a setting of train.py: same policy, prompts and micro-batch. The first tables give
    all arms one learning rate, the second ones the best of --grid to each of the --tuned arms. An
    arm's best rate has the highest accuracy on average over the race. What is reported: seconds a
    step by phase, groups without signal, peak of the mean curve, accuracy at the end, and how many
    times sooner (in training time, and in steps) an arm reaches 99% of a baseline's best, with the
    95% interval of a bootstrap over seeds.
    """
    base = settings_of(arguments, *arguments.train_flags)
    marks = [
        arguments.every * (i + 1) for i in range(round(60 * arguments.minutes / arguments.every))
    ]
    if arguments.sweep:
        arguments.bench = f"race_{arguments.sweep}"
        varied = difficulty if arguments.sweep == "difficulty" else sweep
        return varied(arguments, base, marks)
    grid = sorted({*arguments.grid, base.lr})
    names = {
        arm: {lr: f"{arm} {lr:g}" for lr in (grid if arm in arguments.tuned else [base.lr])}
        for arm in arguments.arms
    }
    settings = {
        name: replace(base, **ARMS[arm], lr=lr)
        for arm, rates in names.items()
        for lr, name in rates.items()
    }
    runs = run_heats(settings, arguments.seeds, marks, arguments.jobs)
    arms = {arm: {lr: runs[name] for lr, name in rates.items()} for arm, rates in names.items()}

    spacing, baselines = arguments.every / 4, ("grpo-ga", "grpo")
    common = {arm: {base.lr: rates[base.lr]} for arm, rates in arms.items()}
    tuned = {arm: rates for arm, rates in arms.items() if len(rates) > 1}
    tables = {"common": standings(common, baselines, spacing)}
    show_standings(f"all at learning rate {base.lr:g}", *tables["common"])
    if tuned:
        tables["tuned"] = standings(tuned, baselines, spacing)
        show_standings(
            f"each at its best of {', '.join(f'{lr:g}' for lr in grid)}", *tables["tuned"]
        )
        warn_of_edges(tuned)
    account = where_the_gain_comes_from(tuned or common, spacing)
    draw_race(common, tuned, spacing, arguments.out / "race.png")
    draw_account(arms, account, arguments.out / "race_account.png")
    tables = {name: {"costs": costs, "gains": gains} for name, (costs, gains) in tables.items()}
    result = {"config": asdict(base), "seconds": marks[-1], "tables": tables}
    return result | {"account": account, "runs": arms}


def show_standings(title: str, costs: list[dict], gains: list[dict]) -> None:
    """Print the two tables of `standings`."""
    print(table(f"{title}: seconds a step by phase, accuracy of all seeds' mean", costs))
    if any(value for row in gains for key, value in row.items() if " vs " in key):
        print(table("times less at 99% of the baseline's best (95% interval)", gains))


def warn_of_edges(tuned: dict[str, Rates]) -> None:
    """A best rate at an edge of the grid proves little; so does one that other seeds put there."""
    for arm, rates in tuned.items():
        low, high = bootstrap(partial(best_rate, rates), len(next(iter(rates.values()))))
        if low == min(rates) or high == max(rates):
            print(
                f"warning: {arm} is best at {best_rate(rates):g} ({low:g} to {high:g} with other "
                "seeds), which reaches an edge of the grid: widen --grid"
            )


def warn_of_load(runs: dict[str, list[dict]]) -> None:
    """Seeds that had much less of the machine than others blur the means over seeds."""
    totals = [
        sum(sum(run["seconds"].values()) for run in seed)
        for seed in zip(*runs.values(), strict=True)
    ]
    if max(totals) > 1.3 * min(totals):
        times = ", ".join(f"{total / min(totals):.1f}" for total in totals)
        print(f"warning: other work slowed some seeds down: a step took {times} times as long")


def where_the_gain_comes_from(arms: dict[str, Rates], spacing: float) -> dict[str, dict]:
    """PODS against each baseline: how many fewer steps, and how much dearer a step.

    The ratio in time is the ratio in steps over the ratio of a step's costs, everything up to where
    each is at 99% of the baseline's best. If generating cost c times what it costs here, and the
    rest of a step the same, the ratio in time would be steps * cost(baseline, c) / cost(pods, c):
    the `curve`, over the seconds of generation over those of all the rest in a PODS step.
    """
    account = {}
    for baseline in ("grpo-ga", "grpo"):
        if not {baseline, "pods"} <= arms.keys():
            continue
        there = arrivals(arms[baseline], arms["pods"], spacing)
        if there is None:
            account[baseline] = {"steps ratio": None, "step cost ratio": None}
            continue
        # Seconds of a step's generation, and of the rest of it: baseline, PODS.
        generate = [point["generate"] / point["step"] for point in there]
        rest = [point["time"] / point["step"] - own for point, own in zip(there, generate)]

        def dearer(c: float, generate: list = generate, rest: list = rest) -> float:
            """A PODS step over the baseline's, if generating cost c times what it costs here."""
            theirs, ours = (c * g + r for g, r in zip(generate, rest))
            return ours / theirs

        steps, here = there[0]["step"] / there[1]["step"], generate[1] / rest[1]
        one = {"steps ratio": steps, "step cost ratio": dearer(1.0), "here": here}
        one["curve"] = [[c * here, steps / dearer(c)] for c in np.geomspace(0.01, 10, 61)]
        if baseline == "grpo":
            # The paper's GPU: a PODS step costs 1.34 vanilla steps (10.12 s and 7.56 s).
            one["with the paper's step cost"] = steps / 1.34
        account[baseline] = one
    return account


def draw_race(
    common: dict[str, Rates], tuned: dict[str, Rates], spacing: float, path: Path
) -> None:
    """Accuracy against training time, and where the seconds of a step go: the paper's figure."""
    panels = [(common, "one learning rate for all")]
    if tuned:
        panels.append((tuned, "each at its best learning rate"))
    figure, axes = new_figure(len(panels) + 1)
    for ax, (arms, title) in zip(axes, panels):
        for name, rates in arms.items():
            lr = best_rate(rates)
            label = f"{name}, lr {lr:g}" if arms is tuned else name
            draw_curve(ax, rates[lr], spacing, label, f"C{list(common).index(name)}")
        ax.set(title=f"Held-out accuracy, {title}", ylabel="share of right answers", ylim=(None, 1))
        ax.set_xlabel("training time in seconds, evaluation excluded")
    draw_phases(axes[-1], {name: rates[best_rate(rates)] for name, rates in common.items()})
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, loc="center right" if ax is not axes[-1] else "best")
    figure.savefig(path, dpi=110)


def draw_curve(ax, runs: list[dict], spacing: float, label: str, color: str) -> None:
    """The mean over seeds, with its standard error as a band."""
    times, accuracies = common_grid(runs, spacing)
    mean = accuracies.mean(0)
    error = accuracies.std(0, ddof=1) / math.sqrt(len(runs)) if len(runs) > 1 else 0 * mean
    ax.plot(times, mean, color=color, label=label)
    ax.fill_between(times, mean - error, mean + error, color=color, alpha=0.2, lw=0)


def draw_phases(ax, arms: dict[str, list[dict]]) -> None:
    """Stacked seconds of a step for each arm."""
    bottom = np.zeros(len(arms))
    for phase in train.PHASES:
        seconds = [
            statistics.fmean(run["seconds"][phase] for run in runs) for runs in arms.values()
        ]
        if max(seconds) > 0.001:
            ax.bar(list(arms), seconds, bottom=bottom, label=phase)
            bottom += seconds
    ax.set(title="Where a step's time goes", ylabel="seconds a step")
    ax.tick_params(axis="x", rotation=25)


def draw_account(arms: dict[str, Rates], account: dict[str, dict], path: Path) -> None:
    """Groups without signal, speed-up against the cost of generation, tolerance of the rate."""
    figure, (left, middle, right) = new_figure(3)
    for i, (name, rates) in enumerate(arms.items()):
        runs = next(iter(rates.values()))
        width = max(1, min(run["curve"]["step"][-1] for run in runs) // 20)  # steps averaged over
        grid, idle = common_grid(runs, width, "step", "idle")
        shares = np.diff(idle.mean(0), prepend=0.0) / width
        left.plot(grid, shares, color=f"C{i}", label=name)
        if len(rates) > 1:
            final = [[run["curve"]["accuracy"][-1] for run in runs] for runs in rates.values()]
            right.plot(list(rates), np.mean(final, 1), marker="o", color=f"C{i}", label=name)
    left.set(title="Groups without signal", xlabel="step", ylim=(0, 1))
    left.set_ylabel("share of the step's groups")
    right.set(title="Tolerance of the learning rate", xscale="log", xlabel="learning rate")
    right.set_ylabel("accuracy at the end, mean over seeds")

    for i, (baseline, one) in enumerate(account.items()):
        if "curve" not in one:
            continue
        middle.plot(*zip(*one["curve"]), color=f"C{i}", label=f"PODS against {baseline}")
        height = one["steps ratio"] / one["step cost ratio"]
        middle.plot(one["here"], height, "o", color=f"C{i}", label="this machine")
        if "with the paper's step cost" in one:
            style = {"color": f"C{i}", "ls": ":", "label": "a step at 1.34x, as on an L40S"}
            middle.axhline(one["with the paper's step cost"], **style)
    middle.axhline(1, color="gray", lw=0.8)
    middle.set(title="If generation cost less or more", xscale="log", ylabel="times sooner")
    middle.set_xlabel("generation / rest, seconds in a PODS step")
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)


SWEEPS = {
    "n": {f"n={n}": {"n": n, "m": 16} for n in (16, 32, 64, 128, 256)},
    "m": {f"m={m}": {"n": 64, "m": m} for m in (2, 4, 8, 16, 32, 64)},
}


def sweep(arguments: argparse.Namespace, base: train.Config, marks: list[float]) -> dict:
    """The paper's ablations: one number varied, everything else as in the race."""
    settings = {name: replace(base, **setting) for name, setting in SWEEPS[arguments.sweep].items()}
    runs = run_heats(settings, arguments.seeds, marks, arguments.jobs)
    arms = {name: {base.lr: one} for name, one in runs.items()}
    spacing = arguments.every / 4
    costs, gains = standings(arms, [next(iter(arms))], spacing)
    show_standings(f"sweep of {arguments.sweep} at learning rate {base.lr:g}", costs, gains)
    draw_race(arms, {}, spacing, arguments.out / f"{arguments.bench}.png")
    result = {"config": asdict(base), "seconds": marks[-1]}
    return result | {"costs": costs, "gains": gains, "runs": arms}


def difficulty(arguments: argparse.Namespace, base: train.Config, marks: list[float]) -> dict:
    """Vanilla GRPO and PODS from starts where right answers are ever rarer, both tuned by --grid.

    The more a student forgets, the rarer a right answer at the start (see `rare_start`). With 16
    rollouts a prompt most groups then hold none, and there is nothing to learn from; with 64 there
    are four times as many chances for one, and max-variance selection always keeps it.
    """
    prepare = partial(rare_start, arguments.out / "starts", arguments.warm_start)
    prepared = in_processes(arguments.jobs, prepare, arguments.forget)
    starts = dict(zip(arguments.forget, prepared, strict=True))
    arms, grid = ("grpo", "pods"), sorted({*arguments.grid, base.lr})
    settings = {
        f"{arm} {forget:g} {lr:g}": replace(base, **start, **ARMS[arm], lr=lr)
        for forget, start in starts.items()
        for arm, lr in itertools.product(arms, grid)
    }
    runs = run_heats(settings, arguments.seeds, marks, arguments.jobs)
    result = {"config": asdict(base), "seconds": marks[-1], "starts": {}}
    spacing, figures = arguments.every / 4, new_figure(len(starts))
    for forget, ax in zip(starts, figures[1]):
        raced = {arm: {lr: runs[f"{arm} {forget:g} {lr:g}"] for lr in grid} for arm in arms}
        first = statistics.fmean(run["curve"]["accuracy"][0] for run in raced["pods"][base.lr])
        costs, gains = standings(raced, ["grpo"], spacing)
        show_standings(f"a student who forgets {forget:.0%}, {first:.1%} right", costs, gains)
        warn_of_edges(raced)
        result["starts"][forget] = {"start": first, "costs": costs, "gains": gains, "runs": raced}
        for i, (arm, rates) in enumerate(raced.items()):
            lr = best_rate(rates)
            draw_curve(ax, rates[lr], spacing, f"{arm}, lr {lr:g}", f"C{2 * i}")
        ax.set(title=f"{first:.1%} right at the start", ylabel="share of right answers")
        ax.set(xlabel="training time in seconds", ylim=(0, 1))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figures[0].savefig(arguments.out / f"{arguments.bench}.png", dpi=110)
    return result


def rare_start(folder: Path, steps: int, forget: float) -> dict[str, str]:
    """A policy warm-started by a more forgetful student, and the sums that suffer most from it.

    Of sums with two carries the student gets about (1 - forget)^2 right, less what wrong tags cost.
    Both are kept in `folder`, and used again if they are there.

    Returns:
        The settings of train.py that choose them.
    """
    task, model = folder / "two_carries", folder / f"forget_{forget:g}_{steps}"
    task.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": problem.prompt, "answer": problem.answer})
            for problem in tasks.load_task("arithmetic", split)
            if carries(problem.prompt) == 2
        ]
        train.write_atomically(task / f"{split}.jsonl", "\n".join(lines) + "\n")
    if not model.is_dir():
        # As careless about carries that are not due as tasks.py's own student is by comparison.
        student = partial(careless_solution, forget=forget, invent=0.4 * (1 - forget))
        with redirect_stdout(io.StringIO()):
            policy = tiny.warm_start(steps=steps, student=student)
        train.save_model(policy, tiny.make_tokenizer(), model)
    return {"model": str(model), "task": str(task)}


def carries(prompt: str) -> int:
    """How many of a sum's two columns carry: `47+85=` -> 2."""
    a, b = map(int, prompt.removesuffix("=").split("+"))
    return (a % 10 + b % 10 >= 10) + (a + b >= 100)


# ---- peers ---------------------------------------------------------------------------------------


def peers(arguments: argparse.Namespace) -> dict:
    """One optimisation step of TRL's GRPOTrainer (1.16.0) and of train.py, step by step in turn.

    The same policy, prompts, n = m, micro-batch, loss ("dapo"), temperature and optimizer settings;
    plain PyTorch generation in both. Generation is the time inside the model's `generate` for TRL,
    the sampler's for train.py; the rest is scoring, update and bookkeeping. The first step of both
    is left out. At that step, and on TRL's own rollouts, both gradients are also compared: the
    cosine between them should be above 0.999, or the two do not do the same work.
    """
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        raise train.InputError("peers compares with TRL: pip install trl==1.16.0") from error
    flags = ["--n", str(arguments.n), "--m", str(arguments.n), "--prompts-per-step", "4"]
    config = settings_of(arguments, *flags, "--eval-problems", "16")
    P, steps = config.prompts_per_step, arguments.rounds + 1
    micro_batch = min(config.micro_batch, P * config.n)
    with tempfile.TemporaryDirectory() as folder:
        racer = Racer(config, Path(folder) / "train")
        problems = [problem for step in range(1, steps + 1) for problem in racer.prompts(step)[0]]
        turns = peer_callback(racer)
        model, tokenizer = train.load_model(config.model)
        model.generate = turns.timed(model.generate)
        settings = trl.GRPOConfig(
            output_dir=str(Path(folder) / "trl"),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=P * config.n // micro_batch,
            num_generations=config.n,
            max_completion_length=racer.max_new_tokens,
            max_steps=steps,
            temperature=config.temperature,
            learning_rate=config.lr,
            adam_beta2=config.adam_beta2,
            max_grad_norm=config.max_grad_norm,
            loss_type=config.loss_type,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=turns.reward,
            args=settings,
            train_dataset=Dataset.from_list([vars(problem) for problem in problems]),
            processing_class=tokenizer,
            callbacks=[turns],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        cosine = gradient_cosine(turns, config, racer.max_new_tokens)
    rows = peer_rows(turns, racer)
    print(table(f"one step, P={P}, n = m = {config.n}, micro-batch {micro_batch}", rows))
    print(f"cosine of the two gradients on the same rollouts: {cosine:.6f}")
    return {"trl": trl.__version__, "cosine": cosine, "rows": rows}


def peer_callback(racer: Racer):
    """A TrainerCallback that times TRL's steps, keeps what its first one did, and takes turns."""

    class Turns(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.generate, self.total, self.first, self.gradient = [], [], None, None

        def timed(self, generate: Callable) -> Callable:
            """The model's `generate`, with the seconds of each call kept."""

            def timed_generate(*args, **kwargs):
                start = time.perf_counter()
                result = generate(*args, **kwargs)
                self.generate.append(time.perf_counter() - start)
                return result

            return timed_generate

        def reward(self, prompts, completions, completion_ids, answer, **_) -> list[float]:
            """TRL's reward function: train.py's rewards; the first call's rollouts are kept."""
            rewards = train.score(completions, answer)["total"]
            if self.first is None:
                self.first = {"prompts": prompts, "ids": completion_ids, "rewards": rewards}
            return rewards

        def on_step_begin(self, *_, **__) -> None:
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, *_, model=None, **__) -> None:
            if self.gradient is None:
                self.gradient = flat_gradient(model)

        def on_step_end(self, *_, **__) -> None:
            self.total.append(time.perf_counter() - self.start)
            racer.advance_one()

    return Turns()


def flat_gradient(model: nn.Module) -> torch.Tensor:
    """All gradients in one vector."""
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).double()  # a cosine of float32 vectors can come out above 1


def gradient_cosine(turns, config: train.Config, max_new_tokens: int) -> float:
    """The cosine between TRL's first gradient and ours, on TRL's rollouts and the same weights."""
    model, tokenizer = train.load_model(config.model)
    n, first = config.n, turns.first
    prompts = [tokenizer(text)["input_ids"] for text in first["prompts"][::n]]
    ids = first["ids"]
    zeros = [[0.0] * len(row) for row in ids]  # log-probs that one step does not look at
    kept = pack(prompts, ids, zeros, eos_token_ids(model, tokenizer), tokenizer, model.device)
    advantages = train.group_advantages(torch.tensor(first["rewards"]).double().view(-1, n))
    train.update(update_only(model, config, max_new_tokens), kept, advantages)
    return torch.cosine_similarity(flat_gradient(model), turns.gradient, dim=0).item()


def peer_rows(turns, racer: Racer) -> list[dict]:
    """Seconds of a step, generation and the rest apart, without the first step of each."""
    ours = [row["seconds"] for row in racer.rows[1:]]
    times = {
        "train.py total": [sum(seconds.values()) for seconds in ours],
        "train.py generate": [seconds["generate"] for seconds in ours],
        "TRL total": turns.total[1:],
        "TRL generate": turns.generate[1:],
    }
    for name in ("train.py", "TRL"):
        pairs = zip(times[f"{name} total"], times[f"{name} generate"], strict=True)
        times[f"{name} rest"] = [total - generate for total, generate in pairs]
    rows = []
    for part in ("generate", "rest", "total"):
        row = {"part": part}
        row |= {f"{n} s": statistics.median(times[f"{n} {part}"]) for n in ("TRL", "train.py")}
        rows.append(row | {"TRL / train.py": ratio(times, f"TRL {part}", f"train.py {part}")})
    return rows


# ---- profile -------------------------------------------------------------------------------------


def matmul_peak(size: int = 1024) -> float:
    """Floating-point operations a second of the best of some large float32 matrix products."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.randn(2, size, size, device=device)
    times = interleaved({"matmul": partial(torch.matmul, a, b)}, rounds=9, least=0.1)
    return 2 * size**3 / min(times["matmul"])


def forward_flops(model: nn.Module, tokens: int, mean_context: float) -> float:
    """Floating-point operations of a forward pass over `tokens` tokens.

    2 for each weight that multiplies (input embeddings are looked up, so they count only if they
    are the output layer, too), and in attention 4 x width for each token and each token it sees.
    """
    config = model.config.get_text_config()
    weights = model.num_parameters()
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return tokens * (2 * weights + 4 * config.num_hidden_layers * width * mean_context)


def hot_operations(function: Callable[[], object], count: int) -> list[dict]:
    """The operations a call spends most time in; what is left is Python and the profiler itself."""
    function()
    with torch.profiler.profile() as profiler:
        seconds = seconds_of(function, 1)
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    shares = [1e-6 * event.self_cpu_time_total / seconds for event in events]
    rows = [
        {"operation": event.key, "calls": event.count, "share": share}
        for event, share in zip(events[:count], shares)
    ]
    rows.append({"operation": "all other operations", "calls": None, "share": sum(shares[count:])})
    return [*rows, {"operation": "between operations", "calls": None, "share": 1 - sum(shares)}]


def profile(arguments: argparse.Namespace) -> dict:
    """Where a PODS step spends its time, and the share of the machine's matmul peak it reaches.

    The peak is measured here, with the same threads: the best of some 1024 x 1024 float32 products.
    A small model reaches a small share of it; what matters is which part of a step is far below
    the other. Operations are torch's own, by the time spent in them and not in what they call.
    """
    config = settings_of(arguments, *arguments.train_flags, "--eval-problems", "16")
    P, n, m = config.prompts_per_step, config.n, config.m
    with tempfile.TemporaryDirectory() as folder:
        racer = Racer(config, Path(folder) / "run")
    for _ in range(arguments.rounds + 1):
        racer.advance_one()
    phases = [
        {
            "phase": phase,
            "seconds": statistics.median(row["seconds"][phase] for row in racer.rows[1:]),
        }
        for phase in train.PHASES
    ]
    total = sum(row["seconds"] for row in phases)
    phases = [row | {"share": row["seconds"] / total} for row in phases]
    print(table(f"a step of n={n}, m={m}, P={P}: median of {arguments.rounds}", phases))

    prompt_ids, length = racer.prompts(racer.step)[1], racer.max_new_tokens
    generate = partial(racer.sampler.generate, prompt_ids, n, length, config.temperature, seed=0)
    done = generate()
    kept = done.select(torch.arange(m).expand(P, m))
    advantages = torch.tensor([1.0, -1.0]).repeat(P, m)[:, :m]  # none is 0: all are computed
    run_update = partial(train.update, racer, kept, advantages)
    L, T = kept.prompt_ids.shape[1], kept.mask.shape[2]
    mean_length = done.mask.sum().item() / (P * n)
    flops = {
        "generate": forward_flops(
            racer.model, P * L + int(done.mask.sum()), L + mean_length / 2
        ),  # each prompt once, then token by token
        "update": 3 * forward_flops(racer.model, P * m * (L + T), (L + T) / 2),  # and backwards
    }
    peak, functions = matmul_peak(), {"generate": generate, "update": run_update}
    times = interleaved(functions, arguments.rounds)
    reached, operations = [], {}
    for name, function in functions.items():
        speed = flops[name] / statistics.median(times[name])
        reached.append(
            {"phase": name, "GFLOP": flops[name] / 1e9, "GFLOP/s": speed / 1e9}
            | {"peak GFLOP/s": peak / 1e9, "share of peak": speed / peak}
        )
        operations[name] = hot_operations(function, 6)
        print(table(f"{name}: share of a call's time by operation", operations[name]))
    print(table("work done", reached))
    return {"phases": phases, "reached": reached, "operations": operations}


# ---- command line --------------------------------------------------------------------------------


def group_size(text: str) -> tuple[int, int]:
    """`512x1024` -> 512 groups of 1024."""
    groups, _, n = text.partition("x")
    return int(groups), int(n)


def parse(argv: list[str]) -> argparse.Namespace:
    """One subcommand a bench; what all of them have comes first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")

    def command(function: Callable, rounds: int | None = None) -> argparse.ArgumentParser:
        summary = function.__doc__.partition("\n")[0]
        added = commands.add_parser(function.__name__, help=summary, description=function.__doc__)
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.set_defaults(function=function)
        added.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder to write")
        added.add_argument(
            "--threads", type=int, default=1, help="of the CPU; more is not steadier"
        )
        if rounds is not None:
            added.add_argument("--rounds", type=int, default=rounds, help="measurements of each")
        return added

    added = command(select, 7)
    added.add_argument("--sizes", type=group_size, nargs="+", help="such as 1x1024 512x64")
    added.add_argument("--patience", type=float, default=5.0, help="seconds a call may take")

    added = command(sampler, 5)
    added.add_argument("--model", default=train.Config.model, help="folder or hub name")
    added.add_argument("--task", default=train.Config.task, help="where the prompts come from")
    added.add_argument("--data", help="folder with the task's train.jsonl and test.jsonl")
    added.add_argument("--prompts", type=int, default=8, help="P")
    added.add_argument("--n", type=int, nargs="+", default=[16, 64, 256], help="rollouts a prompt")
    added.add_argument("--max-new-tokens", type=int, default=64, help="at most")

    added = command(update, 7)
    added.add_argument("--prompts", type=int, default=4, help="P")
    added.add_argument("--m", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="rollouts kept")
    added.add_argument("--vocabulary", type=int, default=151_936, help="V of the third table")
    added = command(accumulate, 15)
    added.add_argument("--prompts", type=int, default=4, help="P of each process")
    added.add_argument("--m", type=int, default=64, help="rollouts GRPO-GA trains on")
    added = command(race)
    added.add_argument("--minutes", type=float, default=0.3, help="training time of each run")
    added.add_argument("--every", type=float, default=1.5, help="seconds between evaluations")
    added.add_argument("--seeds", type=int, default=5, help="runs of each arm")
    added.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    added.add_argument(
        "--tuned", nargs="*", default=list(ARMS)[:3], choices=ARMS, help="get --grid"
    )
    added.add_argument("--grid", type=float, nargs="+", default=[3e-4, 4.5e-4, 6.75e-4])
    added.add_argument("--sweep", choices=[*SWEEPS, "difficulty"], help="vary this instead")
    added.add_argument(
        "--forget", type=float, nargs="+", default=[0.5, 0.85, 0.95], help="of --sweep difficulty"
    )
    added.add_argument("--warm-start", type=int, default=600, help="steps of imitation for these")
    added.add_argument("--jobs", type=int, default=min(2, os.cpu_count()), help="seeds at a time")
    added.add_argument("train_flags", nargs="*", help="after --: flags of train.py, for all arms")
    added = command(peers, 7)
    added.add_argument(
        "--n", type=int, default=64, help="rollouts a prompt, all of them trained on"
    )
    added = command(profile, 10)
    added.add_argument("train_flags", nargs="*", help="after --: flags of train.py")
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        values = value if isinstance(value, list) else [value]
        if any(isinstance(number, (int, float)) and not number > 0 for number in values):
            raise train.InputError(f"{train.flag(name)} {value}: must be above 0")
    arguments.command = shlex.join(["python", "bench.py", *argv])
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    argv = ["profile", *argv[1:]] if argv[:1] == ["--profile"] else argv
    try:
        arguments = parse(argv)
        arguments.out.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(arguments.threads)
        nowhere = io.StringIO()  # of several processes the first one speaks
        with redirect_stdout(nowhere if train.PROCESS > 0 else sys.stdout):
            result = arguments.function(arguments)
        if train.PROCESS == 0:
            write(arguments, result)
    except train.InputError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # the message names the file
        print(f"bench.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench.py: stopped before there was anything to report", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
