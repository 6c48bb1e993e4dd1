"""What could only be found out on a GPU: one command, about ten minutes, to be run and sent back.

    python bench.py gpu                                        # Qwen2.5-0.5B-Instruct
    python bench.py gpu -- --model Qwen/Qwen2.5-3B-Instruct    # the preset's own model
    torchrun --nproc-per-node 2 -- bench.py gpu                # several processes, and --shard

Each part is printed and written as it comes. One that fails leaves its traceback there, and the
next one begins. All of it works without a GPU, too, with a small model: so it is tested.

Legend: P prompts, n rollouts a prompt, m kept, L prompt and T completion tokens.
"""

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

import train
from benches.measure import evaluated, machine, train_settings, write
from benches.update import full_update
from rollouts import Rollouts
from support.errors import InputError
from support.plan import IN_GENERATION, IN_UPDATE, architecture, longest, plan
from support.presets import this_machine
from support.processes import RANK
from support.run import PHASES, Run
from support.settings import Config

PRESET = ("--preset", "gsm8k-qwen2.5-3b-l40s", "--model", "Qwen/Qwen2.5-0.5B-Instruct")
SEVERAL = int(os.environ.get("WORLD_SIZE", "1")) > 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64], help="rollouts a prompt")
    parser.add_argument("--steps", type=int, default=20, help="of every case, the n in turn")


def gpu(arguments: argparse.Namespace) -> dict:
    """Only on a GPU: is the sampler the trainer's policy, does the plan hold, what a step takes.

    For the tiny policy, and for a preset with an adapter, with all weights and in float32:
    log-probs of sampler and trainer before and after the engine's first sleep, seconds of sleep and
    sync, tokens a second, seconds of a step's phases by n, accuracy before and after some steps,
    memory against the plan.
    """
    if not torch.cuda.is_available():
        raise InputError("gpu: torch finds no GPU here; the other benches need none")
    config, result = train_settings(arguments, *PRESET), {}
    save = partial(write, arguments.out, "gpu", arguments.command)
    measure(config, sorted(arguments.n), arguments.steps, partial(part, result, save))
    return result


def part(result: dict, save: Callable, name: str, function: Callable, *arguments) -> None:
    """Call a function, print and save what it returns as a part of the result, or why it failed."""
    try:
        result[name] = function(*arguments)
    except Exception:  # whatever it is: the other parts do not depend on it
        result[name] = {"failed": traceback.format_exc()}
    if RANK == 0:
        print(f"\n{name}", *(f"  {key}: {value}" for key, value in result[name].items()), sep="\n")
        save(result)


def measure(config: Config, sizes: Sequence[int], steps: int, report: Callable) -> None:
    """All parts, on whatever there is.

    Args:
        config: with an adapter; its n is replaced by each of the sizes, which ascend.
        steps: of every case, at least two of each size.
        report: called with each part's name, its function and that one's arguments.
    """
    config = replace(config, n=sizes[-1], m=min(config.m, sizes[0]))
    cases = {"adapter": config, "all weights": replace(config, lora_rank=0)}
    if SEVERAL:
        cases["spread weights"] = replace(config, lora_rank=0, shard=True)
    else:
        tiny = Config(n=sizes[-1], m=min(16, sizes[0]), eval_problems=256)
        cases = {"tiny policy": tiny} | cases | {"float32": replace(config, dtype="float32")}
    report("machine", machine)
    for name, case in cases.items():
        runs = []
        report(f"{name}: start", start, case, runs)
        for run in runs:  # none if it could not be started
            report(f"{name}: log-probs", gaps, run)
            report(f"{name}: generation", generation, run)
            report(f"{name}: learning", learning, run, sizes, steps)
            report(f"{name}: memory", memory, run)
            run.leave() if SEVERAL else run.sampler.close()


def start(config: Config, runs: list[Run]) -> dict[str, object]:
    """Make the run, model and engine included, and append it to `runs`."""
    begin = time.perf_counter()
    runs.append(Run(config))
    found = {"seconds": time.perf_counter() - begin, "run": runs[0].description()}
    if engine := getattr(runs[0].sampler, "llm", None):
        cache = engine.llm_engine.vllm_config.cache_config
        found["cache tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
    return found | {"attention": runs[0].model.config._attn_implementation}


def gaps(run: Run) -> dict[str, object]:
    """|sampler's - trainer's log-prob| as the engine starts and after it slept; seconds of that."""
    found, reload = {"before the first sleep": gap(run)}, partial(run.sampler.sync, run.model)
    # The second sync finds the engine awake: what the first one took longer was waking up.
    calls = {"sleep": run.sampler.sleep, "wake and reload": reload, "reload": reload}
    for name, call in calls.items():
        begin = time.perf_counter()
        call()
        found[f"{name}, seconds"] = time.perf_counter() - begin
    return found | {"after the first sleep": gap(run)}


@torch.no_grad()
def gap(run: Run) -> dict[str, float]:
    """`mean` and `max` over the tokens of some rollouts."""
    rollouts = sampled(run, 4, seed=0)
    ids, attention = rollouts.sequences()  # [4P, L+T]
    mask = rollouts.mask.flatten(0, 1)  # [4P, T]
    trained = run.learner.policy(ids, attention, mask.shape[1], run.config.temperature)
    difference = (trained - rollouts.log_probs.flatten(0, 1)).abs()[mask]
    return {"mean": difference.mean().item(), "max": difference.max().item()}


def sampled(run: Run, n: int, seed: int) -> Rollouts:
    """n rollouts of each of the first step's prompts."""
    _, prompts = run.prompts(1)
    return run.sampler.generate(prompts, n, run.max_new_tokens, run.config.temperature, seed)


def generation(run: Run) -> dict[str, float]:
    """Tokens a second: those of completions, and with the padding up to the longest one."""
    sampled(run, run.config.n, seed=0)
    begin = time.perf_counter()
    mask = sampled(run, run.config.n, seed=1).mask  # [P, n, T]
    seconds = time.perf_counter() - begin
    return {"tokens/s": int(mask.sum()) / seconds, "padded tokens/s": mask.numel() / seconds}


def learning(run: Run, sizes: Sequence[int], steps: int) -> dict[str, object]:
    """Held-out accuracy before and after some steps; for each n, in turn, the median of theirs."""
    rows = {n: [] for n in sizes}
    found = {"accuracy before": evaluated(run)["accuracy"]}
    for step in range(1, steps + 1):
        run.config.n = sizes[step % len(sizes)]
        rows[run.config.n].append(train.train_step(run, step)[0])
    found["accuracy after"] = evaluated(run)["accuracy"]
    for n, (_, *warm) in rows.items():  # the first of each warms up
        counted = [row for row in warm if not row["skipped"]] or warm  # those with an update
        median = {p: statistics.median(row["seconds"][p] for row in counted) for p in PHASES}
        found |= {f"n={n}, seconds": median, f"n={n}, log-prob gap": counted[-1]["logprob_gap"]}
    return found


def memory(run: Run) -> dict[str, str]:
    """GB in generation and in an update, both of the longest completions, beside the plan's."""
    planned, measured = plan(run.config, this_machine()), {}
    sampled(run, run.config.n, seed=0)
    measured[IN_GENERATION] = used_gb()
    S, T = longest(architecture(run.config.model), run.config)
    update = full_update(run.learner, run.config.prompts_per_step, run.config.m, S - T, T)
    run.sampler.sleep()
    update()
    measured[IN_UPDATE] = used_gb()  # torch keeps what it had at the peak
    run.sampler.sync(run.model)
    pairs = {name: (planned[name] / 1e9, gb) for name, gb in measured.items()}
    return {name: f"planned {a:.2f}, measured {b:.2f}" for name, (a, b) in pairs.items()}


def used_gb() -> float:
    """What is taken of the device, by anybody: vLLM's memory is not all torch's to count."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return (total - free) / 1e9
