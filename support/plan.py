"""What a run will do and whether its memory suffices, before it is begun: --dry-run.

    print(dry_run(config))                                       # here
    print(dry_run(config, MACHINES["gsm8k-qwen2.5-3b-h100"]))    # on the paper's machine

`memory.py` counts; here the counts are added up for the processes of a machine and laid out. Left
out: time, which sizes do not tell.

Legend: P prompts a process and step, n rollouts a prompt, m kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from support.memory import (
    GRADIENTS,
    MOMENTS,
    WEIGHTS,
    architecture,
    gathered_bytes,
    generation_bytes,
    longest,
    parameter_counts,
    standing_bytes,
    update_bytes,
)
from support.presets import Machine, this_machine
from support.settings import Config

USABLE = 0.95  # the rest is CUDA's, a sleeping vLLM's, and lost between the allocator's blocks
# What each kind of data parallelism divides among the processes; the plain kind, DDP, nothing.
DIVIDED = {"DDP": (), "--shard": (GRADIENTS, MOMENTS, WEIGHTS)}


@dataclass(frozen=True)
class Plan:
    """The bytes of one process. Lists have a number for each kind of data parallelism."""

    kinds: list[str]
    standing: dict[str, list[int]]  # what is there for the whole run, by what it is for
    generation: dict[str, int]  # what generation takes besides
    gathered: list[int]  # of the weights that are divided, what an update has whole at a time
    allocated: Callable[[int], int]  # sequences of a micro-batch -> what it takes besides
    usable: float

    def always(self) -> list[int]:
        """What is there for the whole run."""
        return [sum(column) for column in zip(*self.standing.values())]

    def generating(self) -> list[int]:
        """All that is there while rollouts are generated."""
        return [there + sum(self.generation.values()) for there in self.always()]

    def updating(self, sequences: int) -> list[int]:
        """All that is there in an update with micro-batches of this size."""
        needed = self.allocated(sequences)
        return [there + g + needed for there, g in zip(self.always(), self.gathered)]

    def largest_micro_batch(self, kind: str, most: int) -> int:
        """The largest micro-batch of at most `most` sequences that fits; 0 for none."""
        i = self.kinds.index(kind)
        fitting = (b for b in range(most, 0, -1) if self.updating(b)[i] <= self.usable)
        return next(fitting, 0)


def plan(config: Config, machine: Machine) -> Plan:
    """Add up what `memory.py` counts.

    Raises:
        InputError: nothing is known about the model, see `architecture`.
    """
    shape, N = architecture(config.model), machine.processes
    count, trained = parameter_counts(shape, config)
    kinds = list(DIVIDED) if N > 1 else ["DDP"]  # one process knows only one
    # Gradients are whole until they are sent, which the update does with the last micro-batch.
    several = config.m * config.prompts_per_step > config.micro_batch
    undivided = {("--shard", GRADIENTS)} if several else set()
    standing = {
        part: [
            size // N if part in DIVIDED[kind] and (kind, part) not in undivided else size
            for kind in kinds
        ]
        for part, size in standing_bytes(count, trained, config).items()
    }
    if N > 1 and config.sampler == "torch":  # parts of weights cannot be sampled from
        standing["the sampler's weights"] = [0, standing[WEIGHTS][0]]
    generation = generation_bytes(shape, config, count, machine)
    gathered = [sum(gathered_bytes(shape, config)) if DIVIDED[kind] else 0 for kind in kinds]
    usable = USABLE * machine.memory
    return Plan(kinds, standing, generation, gathered, update_bytes(shape, config), usable)


def dry_run(config: Config, machine: Machine | None = None) -> str:
    """What a run will do, and the memory it will need, as text. Needs no weights and no network.

    An estimate: exact in what it counts, but with a CPU's kernels, every sequence as long as it may
    be, and gradients there from the start, as they are from the second micro-batch on.

    Args:
        config: the settings of the run.
        machine: where it is to run; default: here, in one process.

    Raises:
        InputError: nothing is known about the model, see `architecture`.
    """
    machine = machine or this_machine()
    one = plan(config, machine)
    shape = architecture(config.model)
    (S, _), (count, trained) = longest(shape, config), parameter_counts(shape, config)
    N, P, n = machine.processes, config.prompts_per_step, config.n
    kept, batch = P * config.m, min(P * config.m, config.micro_batch)
    unit = (1e9, "GB") if one.always()[0] > 1e9 else (1e6, "MB")

    def line(label: str, numbers: list[int], limit: float = math.inf) -> str:
        """One row of the table; with a limit, whether the numbers fit."""
        cells = [f"{number / unit[0]:,.1f} {unit[1]}" for number in numbers]
        if limit < math.inf:
            fits = ["fits" if number <= limit else "out of memory" for number in numbers]
            cells = [f"{cell} {fit}" for cell, fit in zip(cells, fits)]
        return f"  {label:28} " + "".join(f"{cell:23}" for cell in cells).rstrip()

    text = [
        f"plan for {N} x {machine.name} ({machine.memory / 1e9:.1f} GB each, "
        f"{one.usable / 1e9:.1f} to be counted on)",
        f"  {count:,} parameters, {trained:,} trained",
        f"  a step: {N * P} prompt(s), {N * P * n} rollouts of at most {S} tokens with their "
        f"prompt, {N * kept} kept",
        f"  a process: {math.ceil(kept / batch)} micro-batch(es) of {batch} sequences, "
        f"{config.epochs} optimiser step(s)",
        "memory of a process",
    ]
    if N > 1:
        text.append(" " * 31 + "".join(f"{kind:23}" for kind in one.kinds).rstrip())
    text += [line(part, column) for part, column in one.standing.items()]
    text.append(line("always there", one.always(), one.usable))
    text += [line(part, [size]) for part, size in one.generation.items()]
    text.append(line("in generation", one.generating(), one.usable))
    if N > 1:
        text.append(line("gathered for the update", one.gathered))
    text.append(line(f"micro-batch of {batch} sequences", [one.allocated(batch)]))
    text.append(line("in the update", one.updating(batch), one.usable))
    text.append("the update, if all that is kept were one micro-batch")
    for m in [*(2**i for i in range(2, 20) if 2**i < n), n]:
        text.append(line(f"m = {m}, {P * m} sequences", one.updating(P * m), one.usable))
    for kind in one.kinds:
        found = conclusion(one.largest_micro_batch(kind, P * n), config, N)
        text.append(f"{kind}: " * (N > 1) + found)
    return "\n".join(text)


def conclusion(largest: int, config: Config, processes: int) -> str:
    """What it means that `largest` is the largest micro-batch with enough memory, 0 for none."""
    n, kept = config.n, config.prompts_per_step * config.m
    if not largest:
        cures = [] if config.gradient_checkpointing else ["--gradient-checkpointing"]
        cures += [] if config.lora_rank else ["--lora-rank"]
        cures += ["--shard"] if processes > 1 else []
        return f"no micro-batch fits: try {', '.join([*cures, 'a smaller model'])}"
    if largest == config.prompts_per_step * n:
        return f"n = m = {n} fits in one micro-batch"
    yours = min(kept, config.micro_batch)
    verdict = "fits" if yours <= largest else "out of memory"
    all_in_one = f"n = m = {n} in one: out of memory"
    return f"--micro-batch up to {largest} fits ({yours}: {verdict}); {all_in_one}"
