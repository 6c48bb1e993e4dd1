"""What settings are made from: presets, the command line, the run that goes on.

    config, command = parse(["--preset", "rare", "cppo", "--n", "32"], "what --help says first")

What a preset does not name is the default of settings.py; a comment says what is not the paper's.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch

from pods import RULES
from support.errors import InputError
from support.settings import Config, flag, kind
from support.tasks import TASKS

QWEN_3B, QWEN_7B = "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
LLAMA_3B = "meta-llama/Llama-3.2-3B-Instruct"

ONE_GPU = {
    # The paper's, except two savings in its published configuration that cost exactness: there
    # the frozen weights have 4 bits and AdamW's moments 8, here they are bfloat16 and float32.
    "model": QWEN_3B,
    "n": 64,
    "m": 16,
    "dtype": "bfloat16",
    "lora_rank": 64,
    "lr": 5e-6,
    "warmup_steps": 0,  # constant from the first step on
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "loss_type": "grpo",
    "beta": 0.0,
    "temperature": 0.9,
    "prompts_per_step": 1,
    "max_prompt_tokens": 512,
    "max_new_tokens": 512,
    "reward_weights": (1.0, 0.1, 0.1),
    "sampler": "vllm",
    "minutes": 360.0,  # where the figures end
    "micro_batch": 8,  # ours; it changes no result
    "eval_every": 180,  # about half an hour, as often as the paper wrote checkpoints
    "eval_problems": 0,  # all
}
EIGHT_GPUS = ONE_GPU | {
    # The paper's. What is not published for eight GPUs (temperature, betas, weight decay, gradient
    # norm) is one GPU's. Each process accumulates four groups of m; the authors' are of one prompt.
    "task": "gsm8k",
    "lora_rank": 0,
    "n": 128,
    "m": 32,
    "prompts_per_step": 4,  # of each process
    "micro_batch": 32,
    "gradient_checkpointing": True,  # the paper's, too
    "max_new_tokens": 1024,
    "reward_weights": (1.0, 1.0, 1.0),
    "minutes": 30.0,
    "eval_every": 10,  # ours
}
PRESETS: dict[str, dict[str, object]] = {
    "cpu": {},
    "rare": {"model": "rare_policy", "task": "carries", "minutes": 0.5},  # ours
    "gsm8k-qwen2.5-3b-l40s": ONE_GPU | {"task": "gsm8k"},
    "math-qwen2.5-3b-l40s": ONE_GPU | {"task": "math", "eval_task": ("math500",), "n": 32, "m": 8},
    "gsm8k-llama3.2-3b-l40s": ONE_GPU
    | {"model": LLAMA_3B, "task": "gsm8k", "beta": 0.04, "minutes": 90.0, "eval_every": 60},
    # No logs are published; n and m are GSM8K's, by our guess.
    "sciknoweval-qwen2.5-3b-l40s": ONE_GPU | {"task": "sciknoweval"},
    # The paper's baseline of these two is GRPO-GA with n = m = 32 and 16 prompts a process.
    "gsm8k-qwen2.5-3b-h100": EIGHT_GPUS,
    "gsm8k-qwen2.5-7b-a100": EIGHT_GPUS  # vLLM's share is to hold its weights and many rollouts
    | {"model": QWEN_7B, "shard": True, "gpu_memory_utilization": 0.6},
}
# Of rewards that are 0 or 1 the maximum of the variance is half right, half wrong.
ADA = {"rule": "max_variance", "select_by": "accuracy", "advantages": "all"}
# What each rival changes of a run with these n, m and prompts a step P. All train on P * m rollouts
# a step as the run did, except GRPO-GA, which trains on all P * n.
RIVALS: dict[str, Callable[[int, int, int], dict[str, object]]] = {
    "grpo": lambda n, m, P: {"n": m},
    "grpo-ga": lambda n, m, P: {"m": n},
    "reinforce": lambda n, m, P: {"n": m, "scale": "none"},
    "2-grpo": lambda n, m, P: {"n": 2, "m": 2, "prompts_per_step": max(1, P * m // 2)},
    "cppo": lambda n, m, P: {"rule": "max_advantage", "advantages": "all"},
    "reinforce-ada": lambda n, m, P: ADA,
    "maxrl": lambda n, m, P: {"n": m, "scale": "mean"},
}
MEANINGS = {  # for --help; the others are the paper's
    "cpu": "the defaults: the embedded policy, a minute on a CPU",
    "rare": "the embedded policy that is hardly ever right, where many rollouts pay",
    "grpo": "trains on all it generates, n = m (arXiv 2402.03300)",
    "grpo-ga": "trains on all n, m = n, by gradient accumulation (the paper's second baseline)",
    "reinforce": "GRPO without dividing by the deviation: reward minus the group's mean",
    "2-grpo": "n = m = 2 with as many more prompts (arXiv 2510.00977)",
    "cppo": "keeps the largest advantages, normalised over all n (arXiv 2503.22342)",
    "reinforce-ada": "keeps half right, half wrong; advantages over all n (arXiv 2510.04996)",
    "maxrl": "GRPO divided by the group's mean reward, not its deviation (arXiv 2602.02710)",
}


@dataclass(frozen=True)
class Machine:
    """Where a run takes place: N processes with `memory` bytes each."""

    name: str
    memory: int
    processes: int = 1


# What each preset was made for; memory as PyTorch reports it. Those not named suit any machine.
L40S = Machine("L40S", int(44.5 * 2**30))
MACHINES = {name: L40S for name in PRESETS if name.endswith("l40s")} | {
    "gsm8k-qwen2.5-3b-h100": Machine("H100", int(79.1 * 2**30), processes=8),
    "gsm8k-qwen2.5-7b-a100": Machine("A100", int(79.1 * 2**30), processes=8),
}


def this_machine(processes: int = 1) -> Machine:
    """A GPU for each process if there is one here, else this computer's memory, in equal parts."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return Machine(device.name, device.total_memory, processes)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("this computer, no GPU", memory // processes, processes)


def machine_for(presets: Sequence[str]) -> Machine:
    """The GPUs at hand, or else those that the last of the presets was made for."""
    made_for = [MACHINES[name] for name in presets if name in MACHINES]
    if made_for and not torch.cuda.is_available():
        return made_for[-1]
    processes = made_for[-1].processes if made_for else 1
    return this_machine(int(os.environ.get("WORLD_SIZE", processes)))


# What a resumed run may change: how long, in how much memory, and what is kept of it.
CHANGEABLE = ("steps", "minutes", "micro_batch", "gradient_checkpointing", "gpu_memory_utilization")
CHANGEABLE += ("shard", "threads", "save_every", "tracker")
# The parts of --help, each by its first field.
GROUPS = {"n": "what is learned", "task": "data and model", "micro_batch": "memory", "steps": "run"}


def parse(argv: list[str] | None, description: str = "") -> tuple[Config, argparse.Namespace]:
    """The configuration, and all flags: also those that are no settings, out, resume and so on."""
    layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=100)
    usage = "python train.py [--preset NAME ...] [flags] (--help lists them)"
    texts = {"description": description, "epilog": choices()}
    parser = argparse.ArgumentParser("train.py", usage, **texts, formatter_class=layout)

    def refuse(message: str) -> None:
        raise InputError(message)

    parser.error = refuse  # one line, by one of several processes
    known = {"nargs": "+", "metavar": "NAME", "choices": [*PRESETS, *RIVALS], "default": []}
    parser.add_argument("--preset", **known, help="settings to start from, listed below")
    for field in fields(Config):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        type_, several = kind(field)
        options = {"help": field.metadata["help"], "default": argparse.SUPPRESS}
        if type_ is bool:
            group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, **options)
            continue
        if several:  # words add up when a flag is repeated, three weights do not
            options |= {"nargs": "+", "action": "extend" if type_ is str else "store"}
        elif field.default is not None:
            options["help"] += f" (default: {field.default})"
        if field.metadata["choices"]:
            options["choices"] = field.metadata["choices"]
        else:
            options["metavar"] = {int: "N", float: "X", str: "NAME"}[type_]
        group.add_argument(flag(field.name), type=type_, **options)
    group.add_argument("--out", type=Path, help="folder of the run (default: runs/ and the time)")
    switch = partial(group.add_argument, action="store_true")
    switch("--resume", help="go on with the run in --out")
    switch("--dry-run", help="only print the settings, the plan and its memory")
    switch("--eval-only", help="only evaluate --model on --task")
    command = parser.parse_args(argv)
    if command.resume and command.eval_only:
        raise InputError("--eval-only evaluates --model: give --model OUT/model, not --resume")
    settings = {name: value for name, value in vars(command).items() if name in vars(Config)}
    given = combined(command.preset, settings)
    return resumed(command.out, given) if command.resume else Config(**given), command


def choices() -> str:
    """The end of --help: a line for each rule, preset and task."""
    docs = {name: re.split(r" Arguments|\n", rule.__doc__ or "")[0] for name, rule in RULES.items()}
    papers = {name: f"the paper's, {one.processes} x {one.name}" for name, one in MACHINES.items()}
    presets = "presets: several combine, later ones win, and flags win over all"
    text = []
    for title, meanings in (("rules", docs), (presets, MEANINGS | papers), ("tasks", TASKS)):
        text += [f"{title}:", *(f"  {name:29} {meaning}" for name, meaning in meanings.items()), ""]
    return "\n".join(text)


def combined(presets: Sequence[str], given: dict | None = None) -> dict[str, object]:
    """The settings of several presets and the `given` ones: later ones win, given ones over all."""
    settings, given = {}, given or {}
    for name in presets:
        sizes = vars(Config) | settings | given
        n, m, P = sizes["n"], sizes["m"], sizes["prompts_per_step"]
        settings |= RIVALS[name](n, m, P) if name in RIVALS else PRESETS[name]
    return settings | given


def resumed(out: Path | None, given: dict) -> Config:
    """The settings of the run in `out`; the `given` ones may change nothing that is learned."""
    if out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with")
    try:
        stored = dict(**json.loads((out / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--resume: {out} holds no run, config.json: {error}") from error
    # A run of a version that had fewer settings had today's defaults of the others.
    stored = {name: value for name, value in stored.items() if name in vars(Config)}
    before = Config(**stored)
    if "steps" in given or "minutes" in given:
        stored |= {"steps": None, "minutes": None}
    now = Config(**stored | given)
    for name, value in vars(now).items():
        if name not in CHANGEABLE and value != getattr(before, name):
            raise InputError(
                f"{flag(name)} {value} differs from the run's {getattr(before, name)}: a resumed "
                f"run keeps its settings, except {', '.join(map(flag, CHANGEABLE))}"
            )
    return now
