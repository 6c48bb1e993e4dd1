"""What could only be found out on a GPU: one command, about ten minutes, to be run and sent back.

    python bench.py gpu                                        # Qwen2.5-0.5B-Instruct
    python bench.py gpu -- --model Qwen/Qwen2.5-3B-Instruct    # the preset's own model

Every part works without a GPU, too, with a small model: so they are tested.

Legend: P prompts, n rollouts a prompt, m kept, L prompt and T completion tokens.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict

import torch

import train
from benches.measure import table, train_settings
from benches.update import full_rollouts
from support.errors import InputError
from support.plan import IN_GENERATION, IN_UPDATE, architecture, longest, plan
from support.presets import this_machine
from support.run import PHASES, Run
from support.settings import Config

PRESET = ("--preset", "gsm8k-qwen2.5-3b-l40s", "--model", "Qwen/Qwen2.5-0.5B-Instruct")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64], help="rollouts a prompt")
    parser.add_argument("--steps", type=int, default=3, help="of each n, after one to warm up")


def gpu(arguments: argparse.Namespace) -> dict:
    """Only on a GPU: is the sampler the trainer's policy, does the plan hold, what a step takes.

    Steps of a preset on one GPU: log-probs of sampler and trainer before and after the engine's
    first sleep and in each step; seconds a phase, by n; tokens a second of the sampler; memory
    against the plan, with completions as long as they may be.
    """
    if not torch.cuda.is_available():
        raise InputError("gpu: torch finds no GPU here; the other benches need none")
    return measure(train_settings(arguments, *PRESET), sorted(arguments.n), arguments.steps)


def measure(config: Config, sizes: Sequence[int], count: int) -> dict:
    """All parts, on whatever there is.

    Args:
        config: of one process; its n is replaced by each of the sizes.
        sizes: n, ascending.
        count: steps of each, after one that warms up.
    """
    config.n, config.m = sizes[-1], min(config.m, sizes[0])
    planned = plan(config, this_machine())
    run = Run(config)
    print(run.description())
    result = {"config": asdict(config), "gaps": gaps(run)}
    rows = steps(run, sizes, count)
    result["gaps"] += [{"when": f"step {row['step']}"} | row["logprob_gap"] for row in rows]
    print(table("|sampler's - trainer's log-prob|", result["gaps"]))
    result["phases"] = phases(rows)
    print(table("seconds of a step, median of those with an update", result["phases"]))
    result["memory"] = memory_rows(run, planned)
    print(table("memory, planned for the longest completions", result["memory"]))
    run.sampler.close()
    return result | {"steps": rows}


def gaps(run: Run) -> list[dict]:
    """Sampler against trainer: as the engine starts, and after it slept and got its weights."""
    rows = [{"when": "before the first sleep"} | gap(run)]
    run.sampler.sleep()
    run.sampler.sync(run.model)
    return [*rows, {"when": "after the first sleep"} | gap(run)]


@torch.no_grad()
def gap(run: Run) -> dict[str, float]:
    """`mean` and `max` of |sampler's - trainer's log-prob| over the tokens of some rollouts."""
    _, prompts = run.prompts(1)
    temperature = run.config.temperature
    rollouts = run.sampler.generate(prompts, 4, run.max_new_tokens, temperature, seed=0)
    ids, attention = rollouts.sequences()  # [4P, L+T]
    mask, sampled = rollouts.mask.flatten(0, 1), rollouts.log_probs.flatten(0, 1)  # [4P, T]
    trained = run.learner.policy(ids, attention, mask.shape[1], temperature)
    difference = (trained - sampled).abs()[mask]
    return {"mean": difference.mean().item(), "max": difference.max().item()}


def steps(run: Run, sizes: Sequence[int], count: int) -> list[dict]:
    """train.py's own steps, the sizes in turn, each row with its n; the first of each warms up."""
    rows = []
    for _ in range(count + 1):
        for n in sizes:
            run.config.n = n
            row, _ = train.train_step(run, len(rows) + 1)
            rows.append({"step": len(rows) + 1, "n": n} | row)
    run.config.n = sizes[-1]
    return rows


def phases(rows: Sequence[dict]) -> list[dict]:
    """For each n the median seconds of every phase, and the sampler's tokens a second.

    Args:
        rows: of `steps`. A step without signal has no update: it counts only if all are like that.
    """
    result = []
    for n in dict.fromkeys(row["n"] for row in rows):
        warm = [row for row in rows if row["n"] == n][1:]
        counted = [row for row in warm if not row["skipped"]] or warm
        seconds = {p: statistics.median(row["seconds"][p] for row in counted) for p in PHASES}
        speeds = [
            row["completion_length"] * n * row["groups"] / row["seconds"]["generate"]
            for row in counted
        ]
        total = statistics.median(sum(row["seconds"].values()) for row in counted)
        result.append({"n": n, "steps": len(counted)} | seconds)
        result[-1] |= {"total": total, "tokens/s": statistics.median(speeds)}
    return result


def memory_rows(run: Run, planned: dict[str, int]) -> list[dict]:
    """GB as planned and as measured, in generation, of a micro-batch, and in the update.

    The update is train.py's, twice and without a step away from the weights, on rollouts of random
    tokens that are as long as any may be; the first brings what stays, AdamW's moments among it.
    """
    config, learner, model = run.config, run.learner, run.model
    _, prompts = run.prompts(1)
    run.sampler.generate(prompts, config.n, run.max_new_tokens, config.temperature, seed=0)
    generating = used_bytes()
    S, T = longest(architecture(config.model), config)
    kept = full_rollouts(model, config.prompts_per_step, config.m, S - T, T)
    advantages = torch.tensor([1.0, -1.0]).repeat(config.prompts_per_step, config.m)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.0
    run.sampler.sleep()
    for _ in range(2):
        there = restart_peak()
        train.update(learner, kept, advantages[:, : config.m], T)
    taken, updating = peak_bytes() - there, used_bytes()
    run.sampler.sync(run.model)
    batch = min(config.micro_batch, config.prompts_per_step * config.m)
    measured = {IN_GENERATION: generating, IN_UPDATE: updating}
    measured[f"micro-batch of {batch} sequences"] = taken
    return [
        {"what": what, "planned GB": planned[what] / 1e9, "measured GB": size / 1e9}
        for what, size in measured.items()
    ]


def used_bytes() -> int:
    """What is taken of the device, by whomever: vLLM's memory is not all torch's to count."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_bytes() -> int:
    """The most that torch held since `restart_peak`."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def restart_peak() -> int:
    """Forget the peak so far; returns what torch holds."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
