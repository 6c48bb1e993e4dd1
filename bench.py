"""What PODS costs and what it buys, measured side by side in one run.

    python bench.py race       # accuracy against training time: GRPO, GRPO-GA, PODS, other rules
    python bench.py select     # the rule against torch.sort, the authors' loop and brute force
    python bench.py sampler    # tokens per second of each sampler, and the share of the prefill
    python bench.py update     # time and peak memory of the update against m
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

import argparse
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

import rollouts
import train
from pods import max_variance
from rollouts import Rollouts, TorchSampler, eos_token_ids

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
    for _ in range(rounds):
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


SELECT_WAYS = {
    "sort": "torch.sort alone",
    "max_variance": "pods.max_variance",
    "authors": "m + 1 subsets of size m",
    "brute": "all C(n, m) subsets",
}
ONE_GROUP = ((1, n) for n in (16, 64, 256, 1024, 4096, 65_536, 1_000_000))
SELECT_SIZES = (*ONE_GROUP, *itertools.product((16, 512, 4096), (64, 1024)))


# ---- select --------------------------------------------------------------------------------------


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
    most = max(row["n"] for row in rows if row["groups"] > 1)
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
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: no row for it")
    else:
        found["vllm"] = rollouts.VLLMSampler(model, tokenizer)
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
    config = train.Config(model=arguments.model, task=arguments.task, data=arguments.data)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    run = SimpleNamespace(
        config=config, model=model, optimizer=optimizer, reference=None, max_new_tokens=case.T
    )
    return partial(train.update, run, kept, advantages)


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


def peak_bytes() -> int:
    """The most memory ever held: by torch's allocator on a GPU, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage would count what the parent process held, too
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text()).group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, else KiB


def in_new_process(function: Callable, *arguments: object) -> object:
    """The function's result, computed by a fresh Python process."""
    quiet = transformers.logging.disable_progress_bar
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=quiet) as pool:
        return pool.submit(function, *arguments).result()


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
            needed, _ = in_new_process(update_memory, case)
            row = {"m": case.m, "micro-batches": math.ceil(case.m * P / case.micro_batch)}
            row |= {"ms": 1e3 * statistics.median(times[case.m]), "memory MB": needed / 1e6}
            row["time / largest m"] = ratio(times, case.m, sizes[-1])
            rows.append(row)
        for row in rows:
            row["memory / largest m"] = row["memory MB"] / rows[-1]["memory MB"]
        print(table(f"update on {P} prompts, {title}", rows))
        result[title] = rows
    result["large vocabulary"] = vocabulary_rows(sizes, arguments.vocabulary)
    print(table(f"one prompt, V={arguments.vocabulary:,}", result["large vocabulary"]))
    draw_update(result, arguments.out / "update.png")
    return {"tables": result}


def vocabulary_rows(sizes: list[int], vocabulary: int) -> list[dict]:
    """Peak memory, and the largest float32 tensor, beside what all logits would take."""
    rows = []
    for m in sizes:
        case = UpdateCase(m, P=1, T=32, micro_batch=m, vocabulary=vocabulary)
        needed, largest = in_new_process(update_memory, case)
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
    for key in ("[m, T, V] float32 MB", "largest tensor MB", "memory MB"):
        right.plot(*zip(*[(row["m"], row[key]) for row in vocabulary[1]]), marker="o", label=key)
    left.set(title="Time of an update", ylabel="milliseconds")
    middle.set(title="Memory of an update", ylabel="MB beyond weights and optimizer")
    right.set(title="A large vocabulary", ylabel="MB")
    for axes in (left, middle, right):
        axes.set(xlabel="rollouts kept for each prompt, m", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


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

    def command(function: Callable, rounds: int) -> argparse.ArgumentParser:
        summary = function.__doc__.partition("\n")[0]
        added = commands.add_parser(function.__name__, help=summary, description=function.__doc__)
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.set_defaults(function=function)
        added.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder to write")
        added.add_argument("--rounds", type=int, default=rounds, help="measurements of each thing")
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
    arguments = parser.parse_args(argv)
    arguments.command = shlex.join(["python", "bench.py", *argv])
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse(argv)
        arguments.out.mkdir(parents=True, exist_ok=True)
        write(arguments, arguments.function(arguments))
    except train.InputError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
