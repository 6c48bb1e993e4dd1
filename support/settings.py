"""The settings of a run: one dataclass, from which the command line is made (presets.py).

    config = Config(n=64, m=16)
    print(as_flags(config))                     # what differs from the defaults

A field's meaning, with its unit and when to change it, is what --help prints. Settings that cannot
work are refused here, in terms of the flags, before anything is loaded.
"""

import math
import numbers
import shlex
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_origin

import torch

from grpo import LOSS_TYPES, SCALES
from pods import RULES
from rewards import DEFAULT_WEIGHTS
from support.errors import InputError

REWARD_PARTS = tuple(DEFAULT_WEIGHTS)
PARTS = ", ".join(REWARD_PARTS)
TRACKERS = ("none", "tensorboard", "wandb", "trackio")  # and the packages that they need
DEFAULT_STEPS = 200
# Other numbers of a rollout or of an evaluation are logged under these names.
TAKEN = {"total", "step", "task", "problem", "prompt", "answer", "completion", "finished", "length"}
TAKEN |= {"read", "kept", "accuracy_se", "lenient_accuracy", "formed_accuracy", "group", "index"}
TAKEN |= {"finished_accuracy", "truncated", "completion_length", "problems", "samples"}
LOWEST_TEMPERATURE = 0.01  # of vLLM: below it, vLLM samples at this one and says nothing


def option(default, meaning: str, choices=None, **limits: float):
    """A field of `Config`. Limits: at_least, above, below; choices may grow later, as RULES."""
    return field(default=default, metadata={"help": meaning, "choices": choices, "limits": limits})


@dataclass
class Config:
    """All settings of a run; the command line is made from it, and `config.json` records it."""

    n: int = option(64, "rollouts generated for each prompt; raise while generation is cheap")
    m: int = option(16, "rollouts of each prompt that are trained on; m = n is plain GRPO")
    rule: str = option("max_variance", "which m of the n are kept", RULES)
    select_by: str = option("total", "the reward that the rule sees; a part, or the paper's: total")
    advantages: str = option("kept", "normalised over the m kept, or over all n", ("kept", "all"))
    scale: str = option("std", "what divides advantages: deviation, mean reward, nothing", SCALES)
    average_over: str = option(
        "all", "the loss is the mean over all groups, or over those with signal", ("all", "signal")
    )
    mask_truncated: bool = option(False, "rollouts cut off before their end add no loss (DAPO)")
    reward_weights: tuple[float, ...] = option(
        tuple(DEFAULT_WEIGHTS.values()), "accuracy, format and tag count; default: 1 0.1 0.1"
    )
    reward: tuple[str, ...] = option(
        (), "weights of parts by name: format=0, or mine.py:brevity=0.2, a function of your own"
    )
    prompts_per_step: int = option(
        4, "P, prompts a step of each process; more make the gradient less noisy", at_least=1
    )
    temperature: float = option(1.0, "of sampling, in training and evaluation alike", above=0)
    loss_type: str = option("dapo", "how tokens are averaged, see grpo.py", LOSS_TYPES)
    epochs: int = option(1, "optimiser steps on each batch of kept rollouts", at_least=1)
    clip: float = option(0.2, "clip range of the ratio; acts from the second epoch on", at_least=0)
    beta: float = option(0.0, "weight of the KL to the initial policy; 0: no reference", at_least=0)
    importance_cap: float | None = option(
        None, "largest weight that corrects for the sampler; 0: off; default: 2 with vllm, else 0"
    )
    lr: float = option(3e-4, "AdamW's learning rate after warm-up; 5e-6 for a 3B model", above=0)
    warmup_steps: int = option(5, "steps over which the learning rate rises to --lr", at_least=0)
    adam_beta2: float = option(0.95, "decay of AdamW's second moment", at_least=0, below=1)
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay", at_least=0)
    max_grad_norm: float = option(1.0, "the gradient is scaled down to this norm", above=0)

    task: str = option("arithmetic", "one of those below, or a JSONL file of question and answer")
    eval_task: tuple[str, ...] = option(
        (), "tasks to evaluate on, each a task or task=FOLDER; default: the task's test split"
    )
    data: str | None = option(None, "folder with train.jsonl and test.jsonl, instead of the hub")
    model: str = option("tiny_policy", "folder or hub name; embedded: tiny_policy, rare_policy")
    lora_rank: int = option(0, "rank of an adapter (the paper: 64); 0: all weights", at_least=0)
    merge: bool = option(False, "with --lora-rank, write the merged model too, to merged/")
    sampler: str = option("torch", "what generates; vllm for models above 100M", ("torch", "vllm"))
    max_prompt_tokens: int = option(512, "longer prompts are dropped", at_least=1)
    max_new_tokens: int | None = option(
        None, "longest completion; default: 512, or what the model's positions leave", at_least=1
    )

    micro_batch: int | None = option(
        None, "sequences a forward and backward pass; default: 64, on a GPU what fits", at_least=1
    )
    gradient_checkpointing: bool = option(False, "compute layers twice: slower, far less memory")
    dtype: str | None = option(
        None, "of computation; default: float32; vllm on a GPU: bfloat16", ("float32", "bfloat16")
    )
    gpu_memory_utilization: float = option(
        0.3, "share of the GPU that vLLM takes; raise if n is large", above=0, below=1
    )
    shard: bool = option(False, "spread weights, gradients, moments over all processes (FSDP2)")

    steps: int | None = option(
        None, f"steps to stop after; default: {DEFAULT_STEPS} unless --minutes is given", at_least=1
    )
    minutes: float | None = option(None, "of training to stop after, without evaluation", above=0)
    seed: int = option(0, "of prompts, rollouts and the random rule")
    eval_every: int = option(10, "steps between evaluations; 0: only before and after", at_least=0)
    eval_problems: int = option(1024, "held-out problems an evaluation uses; 0: all", at_least=0)
    eval_samples: int = option(1, "completions for each of them; 8 gives pass@8", at_least=1)
    save_every: int = option(20, "steps between checkpoints; the most a kill loses", at_least=1)
    tracker: str = option("none", "also log there", TRACKERS)
    threads: int | None = option(
        None, "CPU threads; default: 1 for models below 10M, else torch's choice", at_least=1
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            setattr(self, one.name, checked(one, getattr(self, one.name)))
        if self.steps is None and self.minutes is None:
            self.steps = DEFAULT_STEPS
        if self.dtype is None:  # vLLM's attention on a GPU has no true float32
            on_gpu = self.sampler == "vllm" and torch.cuda.is_available()
            self.dtype = "bfloat16" if on_gpu else "float32"
        if self.micro_batch is None and not torch.cuda.is_available():
            self.micro_batch = 64  # on a GPU plan.py settles it, when the processes are known
        if self.importance_cap is None:  # TorchSampler's policy is the trainer's own
            self.importance_cap = 2.0 if self.sampler == "vllm" else 0.0
        # The three parts have their weights in one place, however they were given.
        weights, own = dict(zip(REWARD_PARTS, self.reward_weights)), {}
        for part in self.reward:
            name, weight = part_and_weight(part)
            (weights if name in weights else own)[name] = weight
        self.reward_weights = tuple(weights.values())
        self.reward = tuple(f"{name}={weight}" for name, weight in own.items())
        check_together(self)


def kind(one: Field) -> tuple[type, bool]:
    """The type of a field's single value, and whether it holds several."""
    types = get_args(one.type) or (one.type,)  # float of `tuple[float, ...]`, int of `int | None`
    return types[0], get_origin(one.type) is tuple


def checked(one: Field, value: object) -> object:
    """The value as `Config` holds it, from a list, a NumPy number, a word for a tuple of one.

    Raises:
        InputError: it is of another type, as in a config.json edited by hand, or not allowed.
    """
    if value is None and one.default is None:
        return None
    name, (type_, several) = flag(one.name), kind(one)
    values = value if several and isinstance(value, list | tuple) else [value]
    accepted = {int: numbers.Integral, float: numbers.Real}.get(type_, type_)
    for part in values:
        if not isinstance(part, accepted) or (isinstance(part, bool) and type_ is not bool):
            raise InputError(f"{name} {part!r}: must be {type_.__name__}")
    if several:
        return tuple(map(type_, values))
    value, choices = type_(value), one.metadata["choices"]
    if choices and value not in choices:
        raise InputError(f"{name} {value}: choose one of {', '.join(choices)}")
    for limit, bound in one.metadata["limits"].items():
        fits = {"at_least": value >= bound, "above": value > bound, "below": value < bound}
        if not fits[limit] or value == math.inf:
            raise InputError(f"{name} {value}: must be {limit.replace('_', ' ')} {bound}")
    return value


def check_together(config: Config) -> None:
    """Raise InputError for settings that do not go together, naming the numbers and the flags."""
    own = (part_and_weight(part)[0].rpartition(":")[2] for part in config.reward)
    parts = (*REWARD_PARTS, *own)
    if config.select_by not in ("total", *parts):
        raise InputError(f"--select-by {config.select_by}: choose one of total, {', '.join(parts)}")
    if config.m < 2:
        raise InputError(f"--m {config.m} is too small: one rollout has no variance, use 2 or more")
    if config.m > config.n:
        raise InputError(f"--m {config.m} is larger than --n {config.n}: lower --m or raise --n")
    if config.average_over == "signal" and config.beta:
        raise InputError("--average-over signal: a KL (--beta) gives all groups a signal, use all")
    if config.sampler == "vllm" and config.temperature < LOWEST_TEMPERATURE:
        lowest = f"--sampler vllm goes down to {LOWEST_TEMPERATURE}, use torch below that"
        raise InputError(f"--temperature {config.temperature}: {lowest}")
    if config.importance_cap and not config.importance_cap >= 1:
        raise InputError(f"--importance-cap {config.importance_cap}: must be 0 (off), or 1 or more")
    if config.merge and not config.lora_rank:
        raise InputError("--merge: there is nothing to merge without --lora-rank")
    if (name := config.tracker) != "none" and find_spec(name) is None:
        raise InputError(f"--tracker {name} is not installed: pip install {name}")
    tasks = [task_and_folder(spec)[0] for spec in config.eval_task]
    if len(set(tasks)) < len(tasks):
        raise InputError(f"--eval-task {' '.join(config.eval_task)}: names one task twice")
    weights = [*config.reward_weights, *(part_and_weight(part)[1] for part in config.reward)]
    if len(config.reward_weights) != 3 or not all(map(math.isfinite, weights)) or not any(weights):
        raise InputError(f"--reward-weights: need three finite numbers, not all 0: {PARTS}")
    if taken := [part for part in parts[3:] if part in TAKEN or parts.count(part) > 1]:
        raise InputError(f"--reward {taken[0]}: logs have that name already, call it otherwise")


def part_and_weight(part: str) -> tuple[str, float]:
    """What --reward takes: `format=0` -> ("format", 0.0); `mine.py:brevity=0.2` likewise."""
    name, _, weight = part.rpartition("=")
    with suppress(ValueError):
        if name in REWARD_PARTS or ".py:" in name:
            return name, float(weight)
    raise InputError(f"--reward {part}: need NAME=WEIGHT, NAME one of {PARTS}, FILE.py:FUNCTION")


def task_and_folder(spec: str) -> tuple[str, str | None]:
    """What an evaluation task means: `task` or `task=FOLDER`; a file may have = in its name."""
    name, _, folder = (spec, "", "") if Path(spec).is_file() else spec.partition("=")
    return name, folder or None


def flag(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


def as_flags(config: Config) -> str:
    """The settings that differ from the defaults as flags, to read and to copy; several lines."""
    lines, default = [""], vars(Config())
    for name, value in vars(config).items():
        if value is None or value == default[name]:
            continue
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words = shlex.join([flag(name), *map(str, values)])
        if len(lines[-1]) + len(words) > 99:
            lines.append("")
        lines[-1] += f" {words}"
    return "\n".join(f" {line}" for line in lines if line)
