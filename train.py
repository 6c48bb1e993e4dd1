"""Train a policy with PODS: generate n rollouts a prompt, score all, select m, update on those.

    python train.py --n 64 --m 16                 # the embedded default: learns to carry, 1 minute
    python train.py --n 16 --m 16                 # vanilla GRPO
    python train.py --n 64 --m 64                 # GRPO-GA: all rollouts, by gradient accumulation
    python train.py --preset gsm8k-qwen2.5-3b-l40s --dry-run    # the paper's: plan and memory
    accelerate launch --multi_gpu --num_processes 8 train.py --preset gsm8k-qwen2.5-3b-h100
    python train.py --resume --out runs/...       # go on where a run was stopped or killed
    python train.py --eval-only --model DIR --task gsm8k --eval-samples 8

Read `train_step` first: one screen, the paper's algorithm phase by phase. The baselines are
settings of the same loop, not other code.

Everything random is a function of (seed, step, process): prompts, rollouts, the random rule. A run
that is resumed needs no generator state to repeat exactly what the uninterrupted one did.

Legend: P prompts, n rollouts a prompt, m kept, B = P*m sequences, L prompt and T completion tokens.
Left out: schedules other than warm-up then constant (the paper's), and everything that an option
nobody used would add.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the seconds of imports: no pages of traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import copy
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import pickle
import random
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo import (
    LOSS_TYPES,
    Policy,
    check_output_layer,
    group_advantages,
    grpo_loss,
    has_signal,
    importance_weights,
    loss_normalizer,
)
from pods import RULES, down_sample
from rewards import DEFAULT_WEIGHTS, grader_stats, score
from rollouts import Rollouts, TorchSampler, max_positions
from support import tasks
from support.adapters import add_lora, is_adapter, load_with_adapter, merged_weights, whole
from support.memory import dry_run
from support.presets import MACHINES, PRESETS, this_machine
from support.tiny import TINY_POLICY
from support.vllm import VLLMSampler

PHASES = ("generate", "score", "select", "update", "sync")
REWARD_PARTS = tuple(DEFAULT_WEIGHTS)
DEFAULT_STEPS = 200
CHANGEABLE = (  # in a resumed run: how long, in how much memory, and what is kept of it
    *("steps", "minutes", "micro_batch", "gradient_checkpointing", "gpu_memory_utilization"),
    *("threads", "save_every", "tracker"),
)
# Which process this is, as launchers say it: needed before there is an accelerator to ask.
PROCESS = int(os.environ.get("RANK", "0"))


class InputError(ValueError):
    """Something the user can mend; shown as one line, exit code 2."""


# ---- configuration -------------------------------------------------------------------------------


def option(default, meaning: str, choices=None, at_least=None, above=None):
    """A field of `Config`: its default, its meaning and when to change it, its allowed values."""
    metadata = {"help": meaning, "choices": choices, "at_least": at_least, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Config:
    """One line a setting; the command line is made from it, and `config.json` records it."""

    n: int = option(64, "rollouts generated for each prompt; raise while generation is cheap")
    m: int = option(16, "rollouts of each prompt that are trained on; m = n is plain GRPO")
    rule: str = option("max_variance", "which m of the n are kept", tuple(RULES))

    task: str = option("arithmetic", "task name, or a JSONL file of question and answer")
    eval_task: tuple[str, ...] = option(
        (), "tasks to evaluate on, each a task or task=FOLDER; default: the task's test split"
    )
    data: str | None = option(
        None, "folder with train.jsonl, test.jsonl to read instead of the hub"
    )
    model: str = option(
        "tiny_policy", "model folder or hub name; default: the embedded tiny policy"
    )
    sampler: str = option(
        "torch", "what generates the rollouts; vllm for models above 100M", ("torch", "vllm")
    )
    gpu_memory_utilization: float = option(
        0.3, "share of the GPU that vLLM takes while it generates; raise if n is large"
    )
    dtype: str = option(
        "float32", "of computation; what is trained is always float32", ("float32", "bfloat16")
    )
    reward_weights: tuple[float, float, float] = option(
        (1.0, 0.1, 0.1), "weights of accuracy, format and tag count; selection sees their sum"
    )

    prompts_per_step: int = option(
        4, "P, prompts a step of each process; more make the gradient less noisy", at_least=1
    )
    temperature: float = option(1.0, "of sampling, for training and evaluation alike", above=0)
    max_prompt_tokens: int = option(512, "longer prompts are dropped", at_least=1)
    max_new_tokens: int | None = option(
        None, "longest completion; default: 512, or what the model's positions leave", at_least=1
    )

    loss_type: str = option("dapo", "how tokens are averaged, see grpo.py", LOSS_TYPES)
    epochs: int = option(1, "optimiser steps on each batch of kept rollouts", at_least=1)
    clip: float = option(
        0.2, "clip range of the probability ratio; acts from the second epoch on", at_least=0
    )
    beta: float = option(
        0.0, "weight of the KL to the initial policy; 0 needs no reference model", at_least=0
    )
    importance_cap: float | None = option(
        None, "largest weight that corrects for the sampler; 0: off; default: 2 with vllm, else 0"
    )
    micro_batch: int = option(
        64, "sequences a forward and backward pass; lower to save memory", at_least=1
    )
    gradient_checkpointing: bool = option(
        False, "keep less for the backward pass and compute it again: slower, far less memory"
    )
    lora_rank: int = option(
        0, "train an adapter of this rank (the paper: 64); 0: all weights", at_least=0
    )
    merge: bool = option(False, "with --lora-rank, write the merged model too, to merged/")
    lr: float = option(
        3e-4, "AdamW's learning rate after the warm-up; 5e-6 for a 3B model", above=0
    )
    warmup_steps: int = option(5, "steps over which the learning rate rises to --lr", at_least=0)
    adam_beta2: float = option(0.95, "decay of AdamW's second moment")
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay", at_least=0)
    max_grad_norm: float = option(1.0, "the gradient is scaled down to this norm", above=0)

    steps: int | None = option(
        None,
        f"stop after this many steps; default: {DEFAULT_STEPS} unless --minutes is given",
        at_least=1,
    )
    minutes: float | None = option(
        None, "stop after this much training time, evaluation excluded", above=0
    )
    seed: int = option(0, "of prompts, rollouts and the random rule")
    eval_every: int = option(10, "steps between evaluations; 0: only before and after", at_least=0)
    eval_problems: int = option(1024, "held-out problems an evaluation uses; 0: all", at_least=0)
    eval_samples: int = option(1, "completions for each of them; 8 gives pass@8", at_least=1)
    save_every: int = option(
        20, "steps between checkpoints; what a killed run loses at most", at_least=1
    )
    tracker: str = option(
        "none", "also log there, by Accelerate", ("none", "tensorboard", "wandb", "trackio")
    )
    threads: int | None = option(
        None,
        "CPU threads; default: 1 for models below 10M parameters, else torch's choice",
        at_least=1,
    )

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            self.steps = DEFAULT_STEPS
        if isinstance(self.eval_task, str):
            self.eval_task = (self.eval_task,)
        check(self)


def check(config: Config) -> None:
    """Raise InputError for settings that cannot work, naming the numbers and the flags."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        check_type(field, value)
        choices, at_least, above = map(field.metadata.get, ("choices", "at_least", "above"))
        if value is None:
            continue
        if choices and value not in choices:
            raise InputError(f"{flag(field.name)} {value}: choose one of {', '.join(choices)}")
        if at_least is not None and not at_least <= value < math.inf:
            raise InputError(f"{flag(field.name)} {value}: must be {at_least} or more")
        if above is not None and not above < value < math.inf:
            raise InputError(f"{flag(field.name)} {value}: must be a number above {above}")
    if config.m < 2:
        raise InputError(f"--m {config.m} is too small: one rollout has no variance, use 2 or more")
    if config.m > config.n:
        raise InputError(f"--m {config.m} is larger than --n {config.n}: lower --m or raise --n")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise InputError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization}: must be above 0, at most 1"
        )
    if config.importance_cap and not config.importance_cap >= 1:
        raise InputError(f"--importance-cap {config.importance_cap}: must be 0 (off), or 1 or more")
    if config.merge and not config.lora_rank:
        raise InputError("--merge: there is nothing to merge without --lora-rank")
    if not 0 <= config.adam_beta2 < 1:
        raise InputError(f"--adam-beta2 {config.adam_beta2}: must be in [0, 1)")
    names = [task_and_folder(spec)[0] for spec in config.eval_task]
    if len(set(names)) < len(names):
        raise InputError(f"--eval-task {' '.join(config.eval_task)}: names one task twice")
    weights = config.reward_weights
    if len(weights) != 3 or not all(map(math.isfinite, weights)) or not any(weights):
        raise InputError(
            "--reward-weights: need three numbers, not all 0: " + ", ".join(REWARD_PARTS)
        )


def check_type(field: dataclasses.Field, value: object) -> None:
    """Raise InputError for what the command line would not take: a config.json edited by hand."""
    if value is None and "None" in str(field.type):
        return
    type_ = plain_type(field)
    types = (int, float) if type_ is float else type_
    for part in value if isinstance(value, tuple) and is_tuple(field) else (value,):
        if not isinstance(part, types) or (isinstance(part, bool) and type_ is not bool):
            raise InputError(f"{flag(field.name)} {value!r}: must be {type_.__name__}")


def plain_type(field: dataclasses.Field) -> type:
    """The type of a field's numbers or words: float of `float | None` and `tuple[float, ...]`."""
    return next(type_ for type_ in (bool, int, float, str) if type_.__name__ in str(field.type))


def is_tuple(field: dataclasses.Field) -> bool:
    """Whether the field holds several of them."""
    return str(field.type).startswith("tuple")


def task_and_folder(spec: str) -> tuple[str, str | None]:
    """What an evaluation task means: `task` or `task=FOLDER`; a file may have = in its name."""
    name, _, folder = (spec, "", "") if Path(spec).is_file() else spec.partition("=")
    return name, folder or None


def importance_cap(config: Config) -> float:
    """The cap of `importance_weights`, 0 for none: TorchSampler's policy is the trainer's own."""
    if config.importance_cap is None:
        return 2.0 if config.sampler == "vllm" else 0.0
    return config.importance_cap


def flag(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


def as_flags(config: Config) -> str:
    """All settings as flags of the command line, to read and to copy; several lines."""
    words = []
    for name, value in vars(config).items():
        if value is None or value is False or value == ():
            continue
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words.append("\0".join([flag(name), *map(str, values)]))  # not to be parted by a new line
    lines = textwrap.fill(" ".join(words), 100, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent(lines.replace("\0", " "), "  ")


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the pages of usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"train.py: {message} (--help lists the flags)\n" if PROCESS == 0 else None)


def parse(argv: list[str] | None) -> tuple[Config, argparse.Namespace]:
    """The configuration, and the flags that are no settings: preset, out, resume, and so on."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        if field.type is bool:
            switch = {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
            parser.add_argument(flag(field.name), help=field.metadata["help"], **switch)
            continue
        shown = "" if field.default in (None, ()) else f" (default: {field.default})"
        parser.add_argument(
            flag(field.name),
            type=plain_type(field),
            nargs="+" if is_tuple(field) else None,
            choices=field.metadata["choices"],
            default=argparse.SUPPRESS,
            help=field.metadata["help"].replace("%", "%%") + shown,
        )
    parser.add_argument(
        "--preset", choices=PRESETS, help="settings to start from; other flags override its own"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only print the settings, the plan and its memory"
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/ and the time)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--eval-only", action="store_true", help="only evaluate --model on --task")
    given = vars(parser.parse_args(argv))
    names = ("preset", "dry_run", "out", "resume", "eval_only")
    command = argparse.Namespace(**{name: given.pop(name) for name in names})
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    given = PRESETS.get(command.preset, {}) | given
    if command.resume and command.eval_only:
        raise InputError("--eval-only evaluates --model: give --model OUT/model, not --resume")
    if command.resume:
        given = resumed_settings(command.out, given)
    try:
        return Config(**given), command
    except TypeError as error:  # a config.json edited by hand: "64" is not 64
        raise InputError(f"--resume: wrong settings in config.json: {error}") from error


def resumed_settings(out: Path | None, given: dict) -> dict:
    """The settings of the run in `out`, but for those that do not change what is learned."""
    if out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with")
    try:
        stored = json.loads((out / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"--resume: {out} holds no run, config.json: {error}") from error
    if not isinstance(stored, dict):
        raise InputError(f"--resume: {out / 'config.json'} holds no settings")
    stored = {
        field.name: stored.get(field.name, field.default) for field in dataclasses.fields(Config)
    }
    stored = {k: tuple(value) if isinstance(value, list) else value for k, value in stored.items()}
    for name, value in given.items():
        if name not in CHANGEABLE and value != stored[name]:
            raise InputError(
                f"{flag(name)} {value} differs from the run's {stored[name]}: a resumed run keeps "
                f"its settings, but for {', '.join(map(flag, CHANGEABLE))}"
            )
    if "steps" in given or "minutes" in given:
        stored |= {"steps": None, "minutes": None}
    return stored | given


# ---- the loop ------------------------------------------------------------------------------------


def train(config: Config, out: Path, resume: bool = False) -> list[dict]:
    """Run PODS, write everything to `out`, return the rows of `metrics.jsonl`.

    Raises:
        InputError: the model, the data or `out` cannot be used.
    """
    run = Run(config, out, resume)
    with run.stoppable():
        for step in run.steps():
            train_step(run, step)
        return run.finish()


def train_step(run: "Run", step: int) -> None:
    """One step of the paper's algorithm: generate, score, select, update."""
    config, weights = run.config, dict(zip(REWARD_PARTS, run.config.reward_weights))
    P, n, m = config.prompts_per_step, config.n, config.m
    problems, prompt_ids = run.prompts(step)  # P problems, P lists of token ids

    with run.clock("generate"):
        rollouts = run.sampler.generate(
            prompt_ids, n, run.max_new_tokens, config.temperature, run.step_seed("rollouts", step)
        )  # [P, n, T]
    with run.clock("score"):
        completions = [text for group in rollouts.texts for text in group]
        answers = [problem.answer for problem in problems for _ in range(n)]
        failures = grader_failures()
        parts = score(completions, answers, weights, run.opens_think)
        rewards = torch.tensor(parts["total"], dtype=torch.float64).view(P, n)  # [P, n]
    with run.clock("select"):
        # Each group is decided by its own rewards alone: processes need not communicate for it.
        generator = torch.Generator().manual_seed(run.step_seed("rule", step))
        keep = down_sample(rewards, m, config.rule, generator)  # [P, m]
        kept, kept_rewards = rollouts.select(keep), rewards.gather(-1, keep)  # [P, m]
        # Normalised once, on the kept rewards: the mean of all n is not their zero.
        advantages = group_advantages(kept_rewards)  # [P, m]
    with run.clock("update"):
        run.sampler.sleep()  # the memory is the update's until the sync
        for group in run.optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        stats = update(run, kept, advantages)
    with run.clock("sync"):
        run.sampler.sync(run.model)

    stats |= {
        "reward": rewards.mean().item(),  # of all n: how good the policy is
        "reward_kept": kept_rewards.mean().item(),  # of the kept m: pulled towards the middle
        "reward_std": rewards.std(-1).mean().item(),
        "accuracy": sum(parts["accuracy"]) / len(completions),
        "completion_length": rollouts.mask.sum(-1).double().mean().item(),
        "truncated": 1 - rollouts.finished.double().mean().item(),
        "groups": P,
        "groups_without_signal": int((~has_signal(kept_rewards)).sum()),
        "grader_failures": grader_failures() - failures,
    }
    run.record(stats, examples(step, problems, rollouts, parts, keep))


def grader_failures() -> int:
    """Answers so far that the grader gave up on, too big or too slow: scored 0, perhaps right."""
    stats = grader_stats()
    return stats["failed"] + stats["refused"]


def update(run: "Run", kept: Rollouts, advantages: torch.Tensor) -> dict[str, float]:
    """One batch's optimiser steps (`epochs` of them) on the kept rollouts, in micro-batches.

    Rollouts whose advantage is 0, above all groups without signal, have no gradient and are not
    computed, but they stay in the normaliser: the gradient is the paper's, only cheaper. (A KL term
    gives them a gradient, so with one they are computed.) If nothing is left, no step is made.

    With several processes each brings its own rollouts, and the gradient is that of all of them
    together. It is sent once an optimiser step, with the last micro-batch.

    Args:
        run: accelerator, policy, optimizer, reference and config are used.
        kept: m rollouts of each of P prompts.
        advantages: [P, m].

    Returns:
        `loss` of the last epoch, `grad_norm` before clipping, `skipped` (1: there was nothing to
        learn from, or a gradient was not finite and the rest left out), and `logprob_gap`, the
        `mean` and `max` of |sampler's - trainer's log-prob| over the tokens that
        were computed (None if none were): about 1e-6 in float32 and 1e-2 in bfloat16. More means
        that the sampler acts on other weights, or at another temperature, than are trained.
    """
    config = run.config
    input_ids, attention_mask = kept.sequences()  # [B, L+T]
    mask = kept.mask.flatten(0, 1)  # [B, T]
    sampled = kept.log_probs.flatten(0, 1)  # [B, T], the sampler's own
    advantages = advantages.to(mask.device).flatten()  # [B]
    L = kept.prompt_ids.shape[1]
    rows = torch.arange(len(mask), device=mask.device)
    if config.beta == 0:
        rows = rows[advantages != 0]
    # A micro-batch is as long as its longest row: rows of like length together leave less padding
    # to compute. The longest come first, so that what does not fit the memory shows at once.
    rows = rows[mask.sum(-1)[rows].argsort(descending=True, stable=True)]
    batches, own, normalizer = equal_passes(run, mask, rows)

    def log_probs(policy: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        T = int(mask[batch].sum(-1).max())  # no need to compute what all of them have as padding
        inputs = (input_ids[batch, : L + T], attention_mask[batch, : L + T])
        return policy(*inputs, T, config.temperature)  # [micro-batch, T]

    # The ratio's denominator belongs to the policy that generated, fixed before the first step.
    # With a single step that is the policy of this very forward pass: no need to compute it twice.
    old = {}
    if config.epochs > 1:
        with torch.no_grad():
            old = {i: log_probs(run.policy, batch) for i, batch in enumerate(batches)}

    def loss_and_gap(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch i's part of the loss, and |sampler's - trainer's log-prob| [tokens]."""
        batch = batches[i]
        current, reference = log_probs(run.policy, batch), None
        if config.beta > 0:
            with torch.no_grad(), run.reference_policy() as policy:
                reference = log_probs(policy, batch)
        before, importance = old.setdefault(i, current.detach()), None
        inside = batch, slice(current.shape[1])  # this micro-batch in a tensor of [B, T]
        if importance_cap(config) > 0:
            importance = importance_weights(
                before, sampled[inside], mask[inside], importance_cap(config)
            )
        loss = grpo_loss(
            current,
            before,
            advantages[batch],
            mask[inside],
            loss_type=config.loss_type,
            normalizer=normalizer,
            clip=config.clip,
            beta=config.beta,
            ref_log_probs=reference,
            importance=importance,
        )
        return loss * (i < own), (before - sampled[inside]).abs()[mask[inside]]

    stats = {"loss": 0.0, "grad_norm": 0.0, "skipped": 0 if batches else 1}
    stats["logprob_gap"] = {"mean": None, "max": None}
    for _ in range(config.epochs if batches else 0):
        run.optimizer.zero_grad()
        loss_sum, gaps = 0.0, []
        for i in range(len(batches)):
            with once_at_the_end(run.accelerator, run.policy, i == len(batches) - 1):
                loss, gap = loss_and_gap(i)
                run.accelerator.backward(loss)
            loss_sum += loss.item()
            gaps += [gap] if i < own else []
        norm = run.accelerator.clip_grad_norm_(run.policy.parameters(), config.max_grad_norm)
        stats |= {"loss": loss_sum, "grad_norm": float(whole(norm))}
        if gaps:
            gap = torch.cat(gaps)
            stats["logprob_gap"] = {"mean": gap.mean().item(), "max": gap.max().item()}
        if not math.isfinite(stats["grad_norm"]):  # one step along it would leave no weight finite
            return stats | {"skipped": 1}
        run.optimizer.step()
    return stats


def equal_passes(
    run: "Run", mask: torch.Tensor, rows: torch.Tensor
) -> tuple[list[torch.Tensor], int, float]:
    """The update's micro-batches, so that the processes together compute one gradient.

    What engines average is each process's sum over *its* share of the tokens, so all must divide by
    the same number: the mean share. And where gradients are sent a process waits for all others, so
    all make equally many passes: who has fewer micro-batches repeats a row, to be weighted 0.

    Args:
        mask: [B, T] of all that this process kept.
        rows: which of the B have a gradient.

    Returns:
        Row numbers of each pass; how many passes are this process's own; the loss's normaliser.
    """
    config = run.config
    batches = list(rows.split(config.micro_batch)) if len(rows) else []
    normalizer = loss_normalizer(mask, config.loss_type, run.max_new_tokens)
    shares = from_all(run.accelerator, normalizer, len(batches))  # [processes, 2]
    idle = int(shares[:, 1].max()) - len(batches)
    first_row = torch.zeros(1, dtype=torch.long, device=mask.device)
    return batches + [first_row] * idle, len(batches), shares[:, 0].mean().item()


def from_all(accelerator: Accelerator, *numbers: float) -> torch.Tensor:
    """The numbers of every process, float64 [processes, numbers], the same for all of them."""
    own = torch.tensor([numbers], dtype=torch.float64, device=accelerator.device)
    return accelerator.gather(own)


@contextmanager
def once_at_the_end(accelerator: Accelerator, policy: nn.Module, last: bool) -> Iterator[None]:
    """Around one micro-batch: gradients are sent to the other processes with the last one alone.

    Left to itself, DDP sends all of them after every micro-batch: GRPO-GA would pay 4 times.
    """
    # DDP and FSDP go by the context, DeepSpeed's engine by the flag.
    accelerator.sync_gradients = last
    with nullcontext() if last else accelerator.no_sync(policy):
        yield


def examples(
    step: int,
    problems: Sequence[tasks.Problem],
    rollouts: Rollouts,
    parts: dict,
    keep: torch.Tensor,
) -> list[dict]:
    """A few rollouts of the step's first prompt, to read: kept ones, and ones that were not."""
    n = rollouts.mask.shape[1]
    kept = set(keep[0].tolist())
    shown = sorted(kept)[:1] + sorted(kept)[-1:] + [i for i in range(n) if i not in kept][:2]
    return [
        {"step": step, "prompt": problems[0].prompt, "answer": problems[0].answer}
        | {"completion": rollouts.texts[0][i], "finished": bool(rollouts.finished[0, i])}
        | {name: values[i] for name, values in parts.items()}
        | {"kept": i in kept}
        for i in shown
    ]


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(run: "Run", data: "Data") -> dict[str, float]:
    """Accuracy by sampling at the training temperature, `eval_samples` completions a problem.

    Returns:
        `accuracy` (mean over all completions) with `accuracy_se` (its standard error: the spread of
        the problems' own means over the root of their number, so that repeats of one problem do not
        count as new evidence); `pass@k` for k = 1, 4, 8 up to eval_samples; `format`; `truncated`
        (share without EOS); `completion_length` in tokens; `problems`, `samples`.
    """
    config, problems, k = run.config, data.problems, run.config.eval_samples
    # Prompts a call: few enough for the memory, and the same number whatever the number of
    # processes, so that it decides nothing but who does which call.
    N, process = run.accelerator.num_processes, run.accelerator.process_index
    at_once = max(1, 128 // k)
    parts = {name: [] for name in REWARD_PARTS}
    parts |= {"finished": [], "length": []}
    for start in range(0, len(problems), at_once)[process::N]:
        chunk = slice(start, start + at_once)
        seed = derived_seed(config.seed, "evaluation", start)
        rollouts = run.sampler.generate(
            data.prompt_ids[chunk], k, run.max_new_tokens, config.temperature, seed
        )  # [P, k, T]
        completions = [text for group in rollouts.texts for text in group]
        answers = [problem.answer for problem in problems[chunk] for _ in range(k)]
        scores = score(completions, answers, opens_think=run.opens_think)
        for name in REWARD_PARTS:
            parts[name] += scores[name]
        parts["finished"] += rollouts.finished.flatten().tolist()
        parts["length"] += rollouts.mask.sum(-1).flatten().tolist()
    # One list for all processes; the k samples of a problem stay together.
    shares = gather_object([parts])
    parts = {name: [value for share in shares for value in share[name]] for name in parts}
    count = len(parts["length"])
    correct = torch.tensor(parts["accuracy"], dtype=torch.float64).view(-1, k)  # [problems, k]
    means = correct.mean(-1)
    result = {"accuracy": means.mean().item()}
    result["accuracy_se"] = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else 0.0
    for tries in (1, 4, 8):
        if tries <= k:
            right = correct.sum(-1).int().tolist()
            result[f"pass@{tries}"] = sum(pass_at_k(k, c, tries) for c in right) / len(right)
    return result | {
        "format": sum(parts["format"]) / count,
        "truncated": 1 - sum(parts["finished"]) / count,
        "completion_length": sum(parts["length"]) / count,
        "problems": len(problems),
        "samples": k,
    }


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a correct one.

    The unbiased estimator 1 - C(samples - correct, k) / C(samples, k) (arXiv 2107.03374).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


# ---- what a run holds ----------------------------------------------------------------------------


def derived_seed(*parts: object) -> int:
    """A seed that depends on all its parts, the same in every process and Python version."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of the training problems in one pass over them; each pass has its own."""
    order = list(range(count))
    random.Random(derived_seed(seed, "order", epoch)).shuffle(order)
    return order


def load_model(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, transformers.PreTrainedTokenizerBase]:
    """Model and tokenizer from a folder or the hub, or InputError. An adapter comes merged."""
    path = str(TINY_POLICY) if name == Config.model else name
    if Path(path).is_dir():
        # An adapter's folder names it, and may be loaded from anywhere.
        path = os.path.abspath(path)
    elif path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"--model {name}: no such folder, and not a hub name such as owner/model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        load = load_with_adapter if is_adapter(path) else AutoModelForCausalLM.from_pretrained
        model = load(path, dtype=dtype)
    except Exception as error:  # safetensors, tokenizers and transformers each raise their own
        reason = (str(error).strip() or "no message").splitlines()[0]
        if not isinstance(error, (OSError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"
        if Path(path, "model").is_dir():  # the folder of a run
            reason = f"did you mean {Path(path, 'model')}? ({reason})"
        raise InputError(f"--model {name}: {reason}") from error
    # Dropout makes the policy that is trained another one than the policy that was sampled from.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def make_accelerator(tracker: str = "none", out: Path | None = None) -> Accelerator:
    """The engine: one process as it is, several by DDP, or by what `accelerate launch` was told.

    Raises:
        InputError: the tracker's package is not installed.
    """
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise InputError(f"--tracker {tracker} is not installed: pip install {tracker}")
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=None if tracker == "none" else tracker,
        project_dir=out,
        kwargs_handlers=[
            # Else DDP would hold every gradient a second time, to send it.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            # All others wait while the first process writes a large model to a slow disk.
            InitProcessGroupKwargs(timeout=timedelta(hours=2)),
        ],
    )
    asked_for_several = {"MASTER_ADDR", "ACCELERATE_USE_CPU"} <= os.environ.keys()
    if asked_for_several and accelerator.num_processes == 1:
        raise InputError(
            "accelerate launch has started one process only, as it does where there is no GPU: "
            "give it --multi_gpu too (this file then uses the CPU)"
        )
    return accelerator


def distribute(
    accelerator: Accelerator, policy: Policy, optimizer: torch.optim.Optimizer, config: Config
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Policy and optimizer as the engine wraps them; unchanged with one process.

    Raises:
        InputError: an engine that leaves no whole weights to sample from or to save.
    """
    state = accelerator.state
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise InputError("FSDP of version 1 is not supported: set fsdp_version: 2, see README.md")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        if state.deepspeed_plugin.zero_stage > 2:
            raise InputError("ZeRO-3 is not supported: set zero_stage: 2, or use FSDP")
        # It clips and steps by itself, with the last micro-batch, and wants a size to report.
        state.deepspeed_plugin.deepspeed_config |= {
            "gradient_clipping": config.max_grad_norm,
            "train_micro_batch_size_per_gpu": config.micro_batch,
            "gradient_accumulation_steps": 1,  # else it would divide every loss by it
        }
    return accelerator.prepare(policy, optimizer)


class Data:
    """A task's problems with their prompts rendered for one tokenizer."""

    def __init__(self, task: str, split: str, source: str | None, tokenizer, config: Config):
        try:
            problems = tasks.load_task(task, split, source)
            self.problems, self.prompt_ids = tasks.encode(
                problems, tokenizer, config.max_prompt_tokens
            )
        except ValueError as error:
            raise InputError(str(error)) from error
        unknown = tokenizer.unk_token_id
        if unknown not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
            strange = sum(unknown in ids for ids in self.prompt_ids)
            if strange:
                raise InputError(
                    f"--model {config.model} cannot read {strange} of {len(self.problems)} prompts "
                    f"of --task {task}: choose a model whose tokenizer is made for text"
                )

    def subset(self, count: int) -> "Data":
        """`count` problems (0: all), the same ones for every seed, so that runs can be compared."""
        order = epoch_order(len(self.problems), 0, 0)[: count or None]
        part = copy.copy(self)
        part.problems = [self.problems[i] for i in order]
        part.prompt_ids = [self.prompt_ids[i] for i in order]
        return part


class Run:
    """Everything around the loop: model, data, clock, logs, evaluation, checkpoints."""

    def __init__(self, config: Config, out: Path, resume: bool = False, train: bool = True) -> None:
        self.config, self.out = config, Path(out)
        self.accelerator = make_accelerator(config.tracker if train else "none", self.out)
        self.policy = self.optimizer = self.reference = None  # which an evaluation does without
        self._load_model(train)
        longest = self._load_data(train)
        self.max_new_tokens = self._max_new_tokens(longest)
        self.sampler = self._sampler(longest + self.max_new_tokens)
        if train:
            self._begin(resume)

    def _load_model(self, train: bool) -> None:
        """The model and what training adds to it: the KL's reference, an adapter, checkpointing."""
        config = self.config
        # What is trained is stored in float32: in bfloat16 an update of 5e-6 to a weight of 0.02 is
        # rounded away. Only weights that stay as they are may be stored as they are computed with.
        trains_all, dtype = train and not config.lora_rank, getattr(torch, config.dtype)
        stored = torch.float32 if trains_all else dtype
        self.model, self.tokenizer = load_model(config.model, stored)
        self.parameters = self.model.num_parameters()
        torch.set_num_threads(
            config.threads or (1 if self.parameters < 10_000_000 else torch.get_num_threads())
        )
        if train and config.beta > 0 and not config.lora_rank:
            # The policy as it was loaded; with an adapter it is the model without it.
            self.reference = Policy(copy.deepcopy(self.model).eval(), dtype)
        if train and config.gradient_checkpointing:
            # Only in train mode, which nothing else here depends on: no layer drops out.
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        if train and config.lora_rank:
            seed = derived_seed(config.seed, "adapter")
            try:
                self.model = add_lora(self.model, config.lora_rank, seed)
            except ValueError as error:
                raise InputError(f"--lora-rank with --model {config.model}: {error}") from error
        try:
            check_output_layer(self.model)
        except ValueError as error:
            raise InputError(f"--model {config.model}: {error}") from error

    def _load_data(self, train: bool) -> int:
        """The problems to train on and to evaluate on; returns the length of the longest prompt."""
        config = self.config
        self.eval_data = {
            name: self._data(name, "test", folder).subset(config.eval_problems)
            for name, folder in map(task_and_folder, config.eval_task or (config.task,))
        }
        every = list(self.eval_data.values())
        if train:
            self.train_data = self._data(config.task, "train")
            every.append(self.train_data)
        self.opens_think = tasks.opens_think(self.tokenizer, every[-1].prompt_ids[0])
        return max(len(ids) for data in every for ids in data.prompt_ids)

    def _begin(self, resume: bool) -> None:
        """Policy, optimizer and the run's folder, ready for the next step."""
        config = self.config
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        trained_count = sum(weight.numel() for weight in trained)
        optimizer = torch.optim.AdamW(
            trained,
            lr=config.lr,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        policy = Policy(self.model, getattr(torch, config.dtype))
        self.policy, self.optimizer = distribute(self.accelerator, policy, optimizer, config)
        self.step, self.time, self.rows, self.failed, self.saved = 0, 0.0, [], 0, 0
        self.stop_signal, self.stop_time, self.stopped = None, 0.0, False
        self.seconds = dict.fromkeys(PHASES, 0.0)
        N, engine = self.accelerator.num_processes, self.accelerator.distributed_type.value
        engine = "DDP" if engine.startswith("MULTI") else engine
        print(
            f"model {config.model}: {self.parameters:,} parameters on {self.model.device}, "
            f"{trained_count:,} trained, {torch.get_num_threads()} CPU thread(s)\n"
            f"task {config.task}: {len(self.train_data.problems)} problems, "
            f"{config.prompts_per_step} a step"
            + (f" in each of {N} processes ({engine})" if N > 1 else "")
            + f", n={config.n} rollouts each, m={config.m} kept by {config.rule}\n"
            f"writing to {self.out}"
        )
        self._open(resume)
        try:
            self.accelerator.init_trackers("pods", {k: str(v) for k, v in vars(config).items()})
        except Exception as error:  # each tracker raises its own: no account, no network
            raise InputError(f"--tracker {config.tracker}: {error}") from error
        # After all that can fail, so that the command can be given again.
        settings = json.dumps(dataclasses.asdict(config), indent=1)
        self.on_main(partial(write_atomically, self.out / "config.json", settings))

    def _data(self, task: str, split: str, source: str | None = None) -> Data:
        """A task's problems, from a folder of its own or from the one of --task."""
        source = source or (self.config.data if task == self.config.task else None)
        return Data(task, split, source, self.tokenizer, self.config)

    def _max_new_tokens(self, longest_prompt: int) -> int:
        """As asked for, or what the model's positions leave."""
        limit = max_positions(self.model)
        room = (limit or math.inf) - longest_prompt
        wanted = self.config.max_new_tokens or min(512, max(room, 0))
        if wanted > room or wanted < 1:
            raise InputError(
                f"--max-new-tokens {wanted} and a prompt of {longest_prompt} tokens do not fit the "
                f"model's {limit} positions: lower --max-new-tokens or --max-prompt-tokens"
            )
        return int(wanted)

    def _sampler(self, max_length: int) -> TorchSampler | VLLMSampler:
        """`max_length`: the tokens that the longest prompt and completion may have together."""
        dtype, share = getattr(torch, self.config.dtype), self.config.gpu_memory_utilization
        if self.config.sampler == "torch":
            # FSDP leaves each process a part of every weight, and nobody samples from that.
            own = copy.deepcopy(self.model) if self._by(DistributedType.FSDP) else self.model
            return TorchSampler(own, self.tokenizer, dtype)
        try:
            return VLLMSampler(self.model, self.tokenizer, max_length, dtype, share)
        except ImportError as error:
            raise InputError(str(error)) from error

    # -- the loop's needs

    @contextmanager
    def reference_policy(self) -> Iterator[nn.Module]:
        """The policy as it was loaded, for as long as the context lasts."""
        if self.reference is not None:
            yield self.reference
        else:
            with self.model.disable_adapter():
                yield self.policy

    def prompts(self, step: int) -> tuple[list[tasks.Problem], list[list[int]]]:
        """This process's P problems of a step and their token ids, which follow from the step."""
        count, P = len(self.train_data.problems), self.config.prompts_per_step
        first = ((step - 1) * self.accelerator.num_processes + self.accelerator.process_index) * P
        indices = []
        for position in range(first, first + P):
            epoch, index = divmod(position, count)
            indices.append(epoch_order(count, self.config.seed, epoch)[index])
        data = self.train_data
        return [data.problems[i] for i in indices], [data.prompt_ids[i] for i in indices]

    def step_seed(self, purpose: str, step: int) -> int:
        """A seed for this step and this process. Sharing one, all would draw the same numbers."""
        process = self.accelerator.process_index
        return derived_seed(self.config.seed, purpose, step, *([process] if process else []))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to this step's `phase`."""
        start = time.perf_counter()
        yield
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run behind Python's back
        self.seconds[phase] += time.perf_counter() - start

    def steps(self) -> Iterator[int]:
        """The numbers of the steps still to do; ends on --steps, --minutes, Ctrl-C or SIGTERM."""
        # disable=None: where the output is a terminal.
        hidden = None if self.accelerator.is_main_process else True
        self.bar = tqdm(total=self.config.steps, initial=self.step, unit="step", disable=hidden)
        with self.bar:
            if not self.rows:
                self._append({"step": self.step, "time": self.time} | self._evaluate())
            while not self._done():
                # A signal may have reached one process only; all leave after the same step.
                if self.accelerator.check_trigger():
                    self.stopped = True
                    break
                self.step += 1
                self.seconds = dict.fromkeys(PHASES, 0.0)
                yield self.step

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM are `_stop`'s: in the steps and while the end is written."""
        handlers = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers[number] = signal.signal(number, self._stop)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _frame) -> None:
        """First signal: finish the step, save, leave. Second: leave at once."""
        if self.stop_signal is not None:
            # A launcher passes on to its processes the Ctrl-C that they had from the terminal.
            passed_on = time.monotonic() - self.stop_time < 3
            if self.accelerator.num_processes > 1 and passed_on:
                return
            raise KeyboardInterrupt
        self.stop_signal, self.stop_time = number, time.monotonic()
        self.accelerator.set_trigger()
        if self.accelerator.is_main_process:
            later = ", in 3 seconds or later," if self.accelerator.num_processes > 1 else ""
            message = f"finishing this step and saving; once more{later} to stop at once"
            tqdm.write(message, file=sys.stderr)

    def _done(self) -> bool:
        """Whether --steps or --minutes are over."""
        steps, minutes = self.config.steps, self.config.minutes
        by_steps = steps is not None and self.step >= steps
        return by_steps or (minutes is not None and self.time >= 60 * minutes)

    def record(self, stats: dict, shown: list[dict]) -> None:
        """Log the step; evaluate and save when it is time to."""
        config = self.config
        stats = combined(gather_object([stats | {"seconds": self.seconds}]))
        self.time += sum(stats["seconds"].values())
        row = {"step": self.step, "time": self.time} | stats
        due = config.eval_every and self.step % config.eval_every == 0
        if due or self._done():
            row |= self._evaluate()
        self._append(row, shown)
        self.bar.set_postfix(reward=f"{row['reward']:.3f}", accuracy=f"{row['accuracy']:.3f}")
        self.bar.update()
        self.failed = self.failed + 1 if not_finite(row) else 0
        if self.failed and self.accelerator.is_main_process:
            tqdm.write(f"step {self.step}: the gradient is not finite, no update", file=sys.stderr)
        if self.failed == 3:
            hint = ""
            if not self._by(DistributedType.DEEPSPEED):  # which has already stepped along them
                self._save_models()
                hint = f", from the weights before these with --model {self.out / 'model'}"
            raise InputError(
                f"3 gradients in a row were not finite: start a new run with a lower --lr{hint}"
            )
        if self.step - self.saved >= config.save_every and not self.failed:
            self._save()

    def evaluation(self) -> dict[str, dict[str, float]]:
        """The numbers of `evaluate` for each evaluation task."""
        return {name: evaluate(self, data) for name, data in self.eval_data.items()}

    def _evaluate(self) -> dict:
        """`eval_accuracy` (of the first evaluation task) and `eval`, all numbers of all tasks."""
        results = self.evaluation()
        shown = ", ".join(f"{name} {result['accuracy']:.3f}" for name, result in results.items())
        tqdm.write(f"step {self.step:4}  {self.time:7.1f} s  held-out accuracy: {shown}")
        return {"eval_accuracy": next(iter(results.values()))["accuracy"], "eval": results}

    def finish(self) -> list[dict]:
        """Save the state and the model, draw the curves, say what happened."""
        self._save()
        self._save_models()
        self.on_main(partial(draw_curves, self.rows, self.out / "curves.png"))
        print(summary(self.rows, self.out))
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.leave()
        if self.stopped:
            N = self.accelerator.num_processes
            start = "python" if N == 1 else f"the same launcher ({N} processes) and"
            print(f"stopped; go on with: {start} train.py --resume --out {self.out}")
            raise SystemExit(128 + (self.stop_signal or signal.SIGTERM))
        return self.rows

    def leave(self) -> None:
        """Part from the other processes, if there are any, so that all can end.

        In this order: an engine ends its own process groups, and a policy that outlives its group
        would wait forever for a thread of the group's. (A single process has no group; one that it
        finds belongs to an engine that may live on.)
        """
        if self.accelerator.num_processes > 1:
            self.sampler.close()
            self.policy = self.accelerator.free_memory(self.policy, self.optimizer)[0]
            self.accelerator.state.destroy_process_group()

    def on_main(self, work: Callable[[], object]) -> object:
        """Let the first process do it; its result is that of all processes.

        One process alone writes files. If it failed alone, the others would wait for it forever: it
        raises its error, and they end without a word.
        """
        outcome = [None, None]
        if self.accelerator.is_main_process:
            try:
                outcome[0] = work()
            except (InputError, OSError) as error:
                outcome[1] = error
        broadcast_object_list(outcome)
        error = outcome[1]
        if error is not None and self.accelerator.is_main_process:
            raise error
        if error is not None:
            raise SystemExit(2 if isinstance(error, InputError) else 1)
        return outcome[0]

    # -- files

    def _open(self, resume: bool) -> None:
        """Make the folder of a new run, or bring an interrupted one back to its checkpoint."""
        if not resume:
            self.on_main(self._make_folder)
            return
        # The first process reads the files; what it knows of them is sent to all.
        state = {}  # of the first process: weights are too large to be sent as an object
        found = self.on_main(partial(self._go_back, state))
        self.rows, self.step, self.time = found["rows"], found["step"], found["time"]
        self.saved = self.step
        N, before = self.accelerator.num_processes, found["processes"]
        if before != N:
            print(f"the run had {before} process(es) and goes on with {N}: from here on it sees")
            print("other prompts and rollouts than it would have seen")
        if found["checkpoint"]:
            self._set_state(state, found["moments"])
        self.sampler.sync(self.model)
        over = ": there is nothing left to do, give a larger --steps or --minutes"
        print(f"resuming after step {self.step}" + (over if self._done() else ""))

    def _make_folder(self) -> None:
        """The folder of a new run, empty."""
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out} is a file: name a folder")
        if self.out.exists() and any(path.name != "lock" for path in self.out.iterdir()):
            raise InputError(f"--out {self.out} is not empty: add --resume to go on with a run")
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock()

    def _lock(self) -> None:
        """Keep others from writing here: the same command given twice, a killed launcher's orphans.

        The system takes the lock back when this process ends, however it ends.
        """
        self.lock = open(self.out / "lock", "a")  # noqa: SIM115, it is held as long as the run is
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"--out {self.out}: another process is still writing there") from error

    def _go_back(self, state: dict) -> dict:
        """Fill `state` from the checkpoint, and drop what was logged after it.

        Returns:
            `checkpoint`: is there one; else the run begins anew. `moments`: are AdamW's in it.
            Its `step`, `time` and number of `processes`. `rows`: of metrics.jsonl, up to it.
        """
        self._lock()
        state.update(load_checkpoint(self.out / "checkpoint") or {})
        shapes = {name: tuple(weight.shape) for name, weight in state.get("model", {}).items()}
        if state and shapes != self._trained():
            raise InputError(f"--resume: the checkpoint in {self.out} is of another model")
        # Lines of steps after the checkpoint are dropped: those steps are done again.
        last = state.get("step", -1)
        lost = [row["step"] for row in read_rows(self.out / "metrics.jsonl") if row["step"] > last]
        finished = (self.out / "model").exists()
        settings = json.loads((self.out / "config.json").read_text())  # so far
        save_every = settings.get("save_every", Config.save_every)
        # Steps that fail put off the first checkpoint, but three in a row end the run.
        if not state and lost and (finished or max(lost) > save_every + 2):
            raise InputError(
                f"--resume: {self.out} holds {max(lost)} steps and no checkpoint that can be read: "
                "start a new run in another --out"
            )
        left = {}
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            left[name] = [row for row in read_rows(self.out / name) if row["step"] <= last]
            write_atomically(self.out / name, "".join(map(json_line, left[name])))
        found = {"checkpoint": bool(state), "moments": "optimizer" in state}
        found |= {"rows": left["metrics.jsonl"], "step": state.get("step", 0)}
        found |= {"time": state.get("time", 0.0)}
        return found | {"processes": state.get("processes", self.accelerator.num_processes)}

    def _append(self, row: dict, shown: Sequence[dict] = ()) -> None:
        """Log one row, and a few rollouts."""
        self.rows.append(row)
        self.accelerator.log(flat(row), step=row["step"])

        def write() -> None:
            for name, new in (("metrics.jsonl", [row]), ("rollouts.jsonl", shown)):
                with open(self.out / name, "a") as file:
                    file.writelines(json_line(line) for line in new)

        self.on_main(write)

    def _trained(self) -> dict[str, tuple[int, ...]]:
        """The names of what is trained, and the shapes."""
        named = self.model.named_parameters()
        return {name: tuple(weight.shape) for name, weight in named if weight.requires_grad}

    def _state(self) -> dict:
        """Trained weights and optimizer, whole, on the first process; empty on the others."""
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        # Tied weights come under both names; the one that is no parameter's has no need to be kept.
        trained = self._trained()
        weights = get_model_state_dict(self.model, options=options)
        state = {"model": {name: weights[name] for name in weights if name in trained}}
        # DeepSpeed's optimizer is in pieces that only it can put together: its moments are lost.
        # And before its first step an optimizer has none: asking would make one, and count it.
        optimizer = self.optimizer.optimizer
        if optimizer.state and not self._by(DistributedType.DEEPSPEED):
            state["optimizer"] = get_optimizer_state_dict(self.model, optimizer, options=options)
        return state

    def _set_state(self, state: dict, moments: bool) -> None:
        """The reverse of `_state`: the first process has it, and sends the others their part."""
        options = StateDictOptions(
            full_state_dict=True,
            broadcast_from_rank0=self.accelerator.num_processes > 1,
            strict=False,  # frozen weights are not in it
        )
        set_model_state_dict(self.model, state.get("model", {}), options=options)
        optimizer, by_deepspeed = self.optimizer.optimizer, self._by(DistributedType.DEEPSPEED)
        if by_deepspeed:  # it steps from a copy of its own, and would bring the old weights back
            optimizer.refresh_fp32_params()
        if moments and not by_deepspeed:
            moments = state.get("optimizer", {})
            set_optimizer_state_dict(self.model, optimizer, moments, options=options)
        elif by_deepspeed:
            print("AdamW's moments start anew: DeepSpeed keeps them in a form of its own")

    def _by(self, engine: DistributedType) -> bool:
        """Whether this engine moves the gradients."""
        return self.accelerator.distributed_type == engine

    def _save(self) -> None:
        """Write a checkpoint; the one before it stays, as a reserve."""
        progress = {"step": self.step, "time": self.time}
        state = progress | {"processes": self.accelerator.num_processes} | self._state()
        self.on_main(partial(save_checkpoint, state, self.out / "checkpoint"))
        self.saved = self.step

    def _save_models(self) -> None:
        """model/, and merged/ if it is asked for."""
        base = self.model.get_base_model() if self.config.lora_rank else None
        if base is not None and is_adapter(self.config.model):
            # An adapter on top of an adapter is no folder that anyone could load.
            self._save_model("model", base, merged_weights(self.model))
        else:
            self._save_model("model", self.model, self.model.state_dict().items())
        if self.config.merge:
            self._save_model("merged", base, merged_weights(self.model))

    def _save_model(self, name: str, model: nn.Module, weights: Iterable) -> None:
        """Write a model to a folder of the run. `weights` may be in parts on several processes."""
        names = {name for name, _ in model.named_parameters()}
        twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        whole_weights = {}
        for key, weight in weights:
            # With an adapter only that is written. Tied weights are written once.
            frozen = self.config.lora_rank and key in names and key not in self._trained()
            if key in twice or (frozen and model is self.model):
                continue
            weight = whole(weight).cpu()  # not all of them at once in the memory of a GPU
            if self.accelerator.is_main_process:
                whole_weights[key] = weight
        self.on_main(partial(save_model, model, self.tokenizer, self.out / name, whole_weights))


def save_checkpoint(state: dict, folder: Path) -> None:
    """Write the state under another name first: a kill at any moment leaves a whole file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{state['step']:06}.pt"
    try:
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch hides a full disk behind a RuntimeError
        path.with_suffix(".tmp").unlink(missing_ok=True)
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise OSError(f"cannot write {path}: {reason}") from error
    os.replace(path.with_suffix(".tmp"), path)
    for old in checkpoints(folder)[:-2]:  # the one before stays, as a reserve
        old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The files of checkpoints, oldest first."""
    return sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem.partition("_")[2]))


def load_checkpoint(folder: Path) -> dict | None:
    """The newest checkpoint that can be read, or None."""
    for path in reversed(checkpoints(folder)):
        try:
            return torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            print(f"{path} is damaged; trying the checkpoint before it", file=sys.stderr)
    return None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that no reader, and no crash, sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def json_line(row: dict) -> str:
    """A row as a line of JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None)) + "\n"


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file that a killed run may have left in the middle of a line.

    Raises:
        InputError: a line that is not the last is no row.
    """
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
            rows[-1]["step"]
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines):
                raise InputError(f"{path}, line {number} is damaged: mend or remove it") from error
            return rows[: number - 1]
    return rows


def save_model(model: nn.Module, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that `from_pretrained` loads, complete or not at all.

    Args:
        weights: by name; default: the model's own.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
    except Exception as error:  # a full disk; safetensors raises its own
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"cannot write {folder}: {error}") from error
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def combined(rows: Sequence[dict]) -> dict:
    """One step's row from those of all processes: counts add up, the rest is averaged.

    Seconds are averaged too: every process takes part in every update, so all need equally long,
    and a process that waits for the others does that in `update`.
    """
    row = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, dict):
            row[name] = combined(values)
            continue
        values = [value for value in values if value is not None]
        if name in ("groups", "groups_without_signal", "grader_failures"):
            row[name] = sum(values)
        elif name in ("max", "skipped"):
            row[name] = max(values, default=None)
        else:
            row[name] = sum(values) / len(values) if values else None
    return row


def not_finite(row: dict) -> bool:
    """Whether a step's gradient was not finite, which metrics.jsonl holds as null."""
    return row["grad_norm"] is None or not math.isfinite(row["grad_norm"])


def flat(row: dict, prefix: str = "") -> dict[str, float]:
    """The row's numbers under names like seconds/update, as trackers want them."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif value is not None:
            numbers[prefix + name] = value
    return numbers


# ---- what is shown at the end --------------------------------------------------------------------


def summary(rows: Sequence[dict], out: Path) -> str:
    """Where the time went and what was learned, as a table."""
    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return f"no step was done; {out} holds the settings"
    lines = [f"\n{'phase':10} {'seconds':>9} {'s/step':>8} {'share':>6}"]
    total = sum(sum(row["seconds"].values()) for row in steps)
    for phase in PHASES:
        seconds = sum(row["seconds"][phase] for row in steps)
        share = seconds / total if total else 0.0
        lines.append(f"{phase:10} {seconds:9.2f} {seconds / len(steps):8.4f} {share:6.1%}")
    lines.append(f"{'total':10} {total:9.2f} {total / len(steps):8.4f}  over {len(steps)} steps")
    evaluated = [row for row in rows if "eval" in row]
    for name, after in evaluated[-1]["eval"].items():
        before = evaluated[0]["eval"][name]
        lines.append(
            f"held-out accuracy on {name}: {before['accuracy']:.3f} at step "
            f"{evaluated[0]['step']}, {after['accuracy']:.3f} +- {after['accuracy_se']:.3f} "
            f"at step {evaluated[-1]['step']} "
            f"({after['problems']} problems, {after['samples']} sample(s) each)"
        )
    idle = sum(row["groups_without_signal"] for row in steps)
    lines.append(
        f"groups without signal: {idle} of {sum(row['groups'] for row in steps)} "
        f"(all kept rewards equal, nothing to learn)"
    )
    skipped = sum(map(not_finite, steps))
    if skipped:
        lines.append(f"steps without an update, because the gradient was not finite: {skipped}")
    lines.append(f"{out}: metrics.jsonl, rollouts.jsonl, curves.png, model/, checkpoint/")
    return "\n".join(lines)


def draw_curves(rows: Sequence[dict], path: Path) -> None:
    """Accuracy and reward against training time, and where a step's time goes."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    minutes = [row["time"] / 60 for row in steps]

    evaluated = [row for row in rows if "eval" in row]
    left.plot(minutes, [row["accuracy"] for row in steps], color="tab:gray", lw=0.8, alpha=0.6)
    left.lines[-1].set_label("rollouts (training prompts)")
    for name in evaluated[0]["eval"]:
        left.errorbar(
            [row["time"] / 60 for row in evaluated],
            [row["eval"][name]["accuracy"] for row in evaluated],
            yerr=[row["eval"][name]["accuracy_se"] for row in evaluated],
            marker="o",
            ms=3,
            capsize=2,
            label=f"held out: {Path(name).name}",
        )
    left.set(title="Accuracy", ylabel="share of right answers", ylim=(-0.02, 1.02))

    middle.plot(minutes, [row["reward"] for row in steps], label="all n rollouts")
    middle.plot(minutes, [row["reward_kept"] for row in steps], label="the m kept", alpha=0.7)
    middle.set(title="Mean reward before and after selection", ylabel="reward")

    phases = [phase for phase in PHASES if any(row["seconds"][phase] > 0 for row in steps)]
    parts = [[row["seconds"][phase] for row in steps] for phase in phases]
    right.stackplot([row["step"] for row in steps], parts, labels=phases)
    right.set(title="Where a step's time goes", xlabel="step", ylabel="seconds a step")
    for axes in (left, middle):
        axes.set_xlabel("training time in minutes, evaluation excluded")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best")
    figure.savefig(path, dpi=110)


# ---- command line --------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere if PROCESS > 0 else sys.stdout),  # one process speaks for all
    ):
        return carry_out(argv)


def planned(config: Config, preset: str | None) -> str:
    """The plan of `--dry-run`: for the GPUs at hand, or else for those that the preset is for."""
    made_for = MACHINES.get(preset)
    if made_for is None or torch.cuda.is_available():
        processes = made_for.processes if made_for else 1
        made_for = this_machine(int(os.environ.get("WORLD_SIZE", processes)))
    try:
        return dry_run(config, made_for)
    except ValueError as error:
        raise InputError(str(error)) from error


def carry_out(argv: list[str] | None) -> int:
    """Train or evaluate; whatever the user can mend becomes one line and an exit code."""
    try:
        config, command = parse(argv)
    except InputError as error:
        if PROCESS == 0:  # the others read the same command line
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    try:
        origin = "of the run" if command.resume else f"from --preset {command.preset or 'cpu'}"
        if not command.eval_only:
            print(f"settings {origin}:\n{as_flags(config)}")
        if command.dry_run:
            print(planned(config, command.preset))
            return 0
        out = command.out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
        if command.eval_only:
            if PROCESS == 0:
                out.mkdir(parents=True, exist_ok=True)  # before the hours of work, not after
            run = Run(config, out, train=False)
            results = json.dumps(run.evaluation(), indent=1)
            print(results)
            run.on_main(partial(write_atomically, out / "eval.json", results + "\n"))
            print(f"written to {out / 'eval.json'}")
            run.leave()
        else:
            train(config, out, command.resume)
    except InputError as error:
        # Most are the same for all processes, but a folder may be missing on one machine only.
        which = f"process {PROCESS}: " if PROCESS > 0 else ""
        print(f"train.py: {which}{error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        # On a CPU it has no class of its own.
        if "gloo" in reason or isinstance(error, torch.distributed.DistBackendError):
            which = f"process {PROCESS}: "
            print(f"train.py: {which}another process has ended ({reason})", file=sys.stderr)
            return 1
        if "probability tensor" in reason:  # so torch calls what sampling finds then
            print(
                "train.py: the policy gives no probabilities any more, its weights have grown out "
                "of bounds: start a new run with a lower --lr (or --weight-decay, --beta)",
                file=sys.stderr,
            )
            return 2
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in reason:
            raise
        print(
            f"train.py: out of memory ({reason}): in the update lower --micro-batch (a resumed "
            "run may, too) or --m, in generation --n or --max-new-tokens",
            file=sys.stderr,
        )
        return 1
    except OSError as error:  # disk full, no permission: the message names the file
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped at once; the last checkpoint, if any, is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
