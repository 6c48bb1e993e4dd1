"""The settings of a run: one dataclass, from which the command line is made.

    config = Config(n=64, m=16)                             # or
    config, command = parse(["--n", "64", "--m", "16"], "what --help says first")
    print(as_flags(config))                                 # all of it as flags, to copy

A field is one line of meaning with its unit and when to change it; that line is what --help prints.
Whatever cannot work is refused here, in terms of the flags, before anything is loaded.
"""

import argparse
import dataclasses
import json
import math
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import torch

from grpo import LOSS_TYPES
from pods import RULES
from rewards import DEFAULT_WEIGHTS
from support.errors import InputError
from support.presets import PRESETS
from support.processes import RANK

REWARD_PARTS = tuple(DEFAULT_WEIGHTS)
TRACKERS = ("none", "tensorboard", "wandb", "trackio")  # and the packages that they need
DEFAULT_STEPS = 200
LOWEST_TEMPERATURE = 0.01  # of vLLM: below it, vLLM samples at this one and says nothing
# What a resumed run may change: how long, in how much memory, and what is kept of it.
CHANGEABLE = (
    "steps",
    "minutes",
    "micro_batch",
    "gradient_checkpointing",
    "gpu_memory_utilization",
    "shard",
    "threads",
    "save_every",
    "tracker",
)


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
    select_by: str = option(
        "total", "the reward that the rule sees; the paper: total", ("total", *REWARD_PARTS)
    )
    advantages: str = option(
        "kept", "normalised over the m kept, or over all n before the selection", ("kept", "all")
    )
    scale: str = option(
        "std", "advantages in deviations of their group; none: as REINFORCE", ("std", "none")
    )
    average_over: str = option(
        "all", "the loss is the mean over all groups, or over those with signal", ("all", "signal")
    )

    task: str = option("arithmetic", "task name, or a JSONL file of question and answer")
    eval_task: tuple[str, ...] = option(
        (), "tasks to evaluate on, each a task or task=FOLDER; default: the task's test split"
    )
    data: str | None = option(
        None, "folder with train.jsonl, test.jsonl to read instead of the hub"
    )
    model: str = option(
        "tiny_policy", "model folder or hub name; embedded: tiny_policy (default), rare_policy"
    )
    sampler: str = option(
        "torch", "what generates the rollouts; vllm for models above 100M", ("torch", "vllm")
    )
    gpu_memory_utilization: float = option(
        0.3, "share of the GPU that vLLM takes while it generates; raise if n is large"
    )
    dtype: str | None = option(
        None, "of computation; default: float32; vllm on a GPU: bfloat16", ("float32", "bfloat16")
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
    shard: bool = option(
        False, "with several processes: spread weights, gradients and moments over them (FSDP2)"
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
    tracker: str = option("none", "also log there", TRACKERS)
    threads: int | None = option(
        None,
        "CPU threads; default: 1 for models below 10M parameters, else torch's choice",
        at_least=1,
    )

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            self.steps = DEFAULT_STEPS
        if self.dtype is None:  # vLLM's attention on a GPU has no true float32
            on_gpu = self.sampler == "vllm" and torch.cuda.is_available()
            self.dtype = "bfloat16" if on_gpu else "float32"
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
    if config.average_over == "signal" and config.beta:
        raise InputError("--average-over signal: a KL (--beta) gives all groups a signal, use all")
    if not 0 < config.gpu_memory_utilization <= 1:
        raise InputError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization}: must be above 0, at most 1"
        )
    if config.sampler == "vllm" and config.temperature < LOWEST_TEMPERATURE:
        raise InputError(
            f"--temperature {config.temperature}: --sampler vllm goes down to "
            f"{LOWEST_TEMPERATURE}, use --sampler torch below that"
        )
    if config.importance_cap and not config.importance_cap >= 1:
        raise InputError(f"--importance-cap {config.importance_cap}: must be 0 (off), or 1 or more")
    if config.merge and not config.lora_rank:
        raise InputError("--merge: there is nothing to merge without --lora-rank")
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise InputError(
            f"--tracker {config.tracker} is not installed: pip install {config.tracker}"
        )
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
    type_, several, optional = kind(field.name)
    if value is None and optional:
        return
    types = (int, float) if type_ is float else type_
    for part in value if several and isinstance(value, tuple) else (value,):
        if not isinstance(part, types) or (isinstance(part, bool) and type_ is not bool):
            raise InputError(f"{flag(field.name)} {value!r}: must be {type_.__name__}")


def kind(name: str) -> tuple[type, bool, bool]:
    """A field's type as the command line needs it.

    Returns:
        The type of a single number or word, whether the field holds several, whether it may be
        None: `tuple[float, ...]` is (float, True, False), `int | None` is (int, False, True).
    """
    hint = get_type_hints(Config)[name]
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True, False
    (type_, *_), optional = get_args(hint) or (hint,), type(None) in get_args(hint)
    return type_, False, optional


def task_and_folder(spec: str) -> tuple[str, str | None]:
    """What an evaluation task means: `task` or `task=FOLDER`; a file may have = in its name."""
    name, _, folder = (spec, "", "") if Path(spec).is_file() else spec.partition("=")
    return name, folder or None


def importance_cap(config: Config) -> float:
    """The cap of `importance_weights`, 0 for none: TorchSampler's policy is the trainer's own."""
    if config.importance_cap is None:
        return 2.0 if config.sampler == "vllm" else 0.0
    return config.importance_cap


# ---- the command line ----------------------------------------------------------------------------


def flag(name: str) -> str:
    """The command line's spelling of a field's name."""
    return "--" + name.replace("_", "-")


def as_flags(config: Config) -> str:
    """All settings as flags of the command line, to read and to copy; several lines."""
    lines = [""]
    for name, value in vars(config).items():
        if value is None or value is False or value == ():
            continue
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        words = shlex.join([flag(name), *map(str, values)])
        if len(lines[-1]) + len(words) > 99:
            lines.append("")
        lines[-1] += f" {words}"
    return "\n".join(f" {line}" for line in lines)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the pages of usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"train.py: {message} (--help lists the flags)\n" if RANK == 0 else None)


def parse(argv: list[str] | None, description: str = "") -> tuple[Config, argparse.Namespace]:
    """The configuration, and the flags that are no settings: preset, out, resume, and so on."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Config):
        type_, several, _ = kind(field.name)
        text = field.metadata["help"].replace("%", "%%")
        if type_ is bool:
            switch = {"action": argparse.BooleanOptionalAction, "default": argparse.SUPPRESS}
            parser.add_argument(flag(field.name), help=text, **switch)
            continue
        parser.add_argument(
            flag(field.name),
            type=type_,
            nargs="+" if several else None,
            choices=field.metadata["choices"],
            default=argparse.SUPPRESS,
            help=text + ("" if field.default in (None, ()) else f" (default: {field.default})"),
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
    given = PRESETS.get(command.preset, {}) | with_tuples(given)
    if command.resume and command.eval_only:
        raise InputError("--eval-only evaluates --model: give --model OUT/model, not --resume")
    if command.resume:
        given = resumed_settings(command.out, given)
    try:
        return Config(**given), command
    except TypeError as error:  # a config.json edited by hand: "64" is not 64
        raise InputError(f"--resume: wrong settings in config.json: {error}") from error


def with_tuples(settings: dict) -> dict:
    """Settings as `Config` holds them: argparse and JSON make lists of what is a tuple there."""
    return {k: tuple(value) if isinstance(value, list) else value for k, value in settings.items()}


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
    # A run of a version that had fewer settings had today's defaults of the others.
    stored = with_tuples(
        {field.name: stored.get(field.name, field.default) for field in dataclasses.fields(Config)}
    )
    for name, value in given.items():
        if name not in CHANGEABLE and value != stored[name]:
            raise InputError(
                f"{flag(name)} {value} differs from the run's {stored[name]}: a resumed run keeps "
                f"its settings, but for {', '.join(map(flag, CHANGEABLE))}"
            )
    if "steps" in given or "minutes" in given:
        stored |= {"steps": None, "minutes": None}
    return stored | given
