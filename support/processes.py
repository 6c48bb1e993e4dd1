"""The processes that train one policy: what they exchange, who writes and speaks, what stops them.

    torchrun --nproc-per-node 8 -- train.py --preset gsm8k-qwen2.5-3b-h100 [--shard]

    processes = Processes()                       # one process: everything below does nothing
    processes.equalise(model)                     # all start from the first one's weights
    processes.average_gradients(weights)          # after the last backward pass of an update
    policy = processes.shard(policy)              # instead of these two: FSDP2
    rows = processes.gather({"reward": 0.4})      # everyone's, to everyone
    processes.on_first(write_file)                # one process writes, all learn how it went
    with StopSignal(processes) as stop:           # Ctrl-C, SIGTERM, a scheduler's warning, ...
        while not stop.asked(): ...               # the same answer in all processes

Each process has its own prompts, random numbers and sampler; all that they share is the gradient.
This is plain torch.distributed, the same code over gloo on CPUs and NCCL on GPUs.

It is not DistributedDataParallel, which holds each gradient twice: here gradients add up in place
and are averaged once (docs/larger_models.md). Left out: pipeline and tensor parallelism.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

from logprobs import whole
from support.errors import LAUNCHED, RANK, InputError

# A closed terminal sends SIGHUP, Slurm warns by SIGUSR1 or SIGUSR2, SIGXCPU says that the limit of
# CPU time is near. Windows has only the first two.
NAMES = "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class Processes:
    """The processes of one run. With one, every method is the obvious nothing."""

    def __init__(self) -> None:
        self.rank, self.count = RANK, int(os.environ["WORLD_SIZE"]) if LAUNCHED else 1
        self.first = RANK == 0  # it writes files and speaks
        self.device = torch.device("cpu")  # of the model
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", "0")) if LAUNCHED else 0
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        # A group of one process is not ours: vLLM makes one, even alone.
        if self.count > 1 and not dist.is_initialized():
            # Small things are exchanged by CPU, gradients by GPU. The timeout is long because all
            # others wait while the first process writes a large model to a slow disk.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(hours=2))

    def equalise(self, model: nn.Module) -> None:
        """Give all the first one's weights, or folders that differ would train two policies."""
        if self.count > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def average_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the mean of all processes' gradients, in their common order.

        A process without anything to learn from sends zeros, or the others would wait for it. A
        weight that no process used (a vision tower) stays without a gradient, which AdamW skips.
        """
        if self.count == 1:
            return
        weights = list(weights)
        used = self.gather([weight.grad is not None for weight in weights])
        used = [weight for weight, anywhere in zip(weights, map(any, zip(*used))) if anywhere]
        for weight in used:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad)
            weight.grad /= self.count

    def shard(self, policy: nn.Module) -> nn.Module:
        """The policy (`logprobs.Policy`) with its weights spread over the processes by FSDP2.

        Every process keeps 1/count of weights, gradients and moments, and gathers a layer's weights
        while it computes the layer. After every micro-batch each process gets its part of the mean
        gradient (reduce-scatter), so all make equally many passes. InputError with one process.
        """
        if self.count == 1:
            raise InputError("--shard needs several processes: start train.py by torchrun")
        options = {"mesh": init_device_mesh(self.device.type, (self.count,))}
        if policy.dtype == torch.bfloat16:  # gathered in it; gradients are still added in float32
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        blocks = set(policy.model._no_split_modules or ())  # names of the decoder layers' classes
        for module in policy.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        return fully_shard(policy, **options)

    def gather(self, thing: object) -> list:
        """The `thing` of every process, by rank, for all. It is pickled: keep it small."""
        if self.count == 1:
            return [thing]
        things = [None] * self.count
        dist.all_gather_object(things, thing)
        return things

    def gathered(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Tensors by name, whole and on the CPU; empty on all but the first process."""
        found = {}
        for name, tensor in tensors:
            tensor = whole(tensor.detach()).cpu()
            if self.first:
                found[name] = tensor
        return found

    def received(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The first process's tensor for everyone, where FSDP spreads `like` a part of it."""
        if self.first:
            tensor = tensor.to(like.device, like.dtype)
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if isinstance(like, DTensor):
            return distribute_tensor(tensor, like.device_mesh, like.placements)
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def on_first(self, work: Callable[[], object], send: bool = True) -> object:
        """Let the first process do `work`; its result is that of all (without `send`: its alone).

        If the first process failed alone, the others would wait for it forever. So it raises its
        error, and the others end without a word.
        """
        if self.count == 1:
            return work()
        result, error = None, None
        if self.first:
            try:
                result = work()
            except (InputError, OSError) as caught:
                error = caught
        outcome = [result if send else None, error]
        dist.broadcast_object_list(outcome)
        if error is not None:
            raise error
        sent, error = outcome
        if error is not None:
            raise SystemExit(2 if isinstance(error, InputError) else 1)
        return result if self.first else sent

    def leave(self) -> None:
        """Part from the other processes, so that all can end."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Largest(float):
    """A number that becomes the largest of the processes' numbers, not their mean."""


COMBINED = {
    bool: lambda flags: int(any(flags)),
    int: sum,
    float: lambda numbers: sum(numbers) / len(numbers),
    Largest: max,
    list: lambda lists: [one for part in lists for one in part],
    dict: lambda rows: combined(rows),
}


def combined(rows: Sequence[dict]) -> dict:
    """One row from those of all processes, by the kind of each value.

    Seconds are averaged: every process takes part in every update, so all need equally long, and a
    process that waits for the others does so in `update`. None, which is no number, does not count.
    """
    row = {}
    for name in rows[0]:
        values = [other[name] for other in rows if other[name] is not None]
        row[name] = COMBINED[type(values[0])](values) if values else None
    return row


class StopSignal:
    """Keeps a signal until the step is done: it asks to finish the step, save and leave.

    A second Ctrl-C leaves at once. Other signals never do: a closed terminal sends SIGHUP twice,
    SIGXCPU comes every second. A signal that is ignored (`nohup`) is left alone.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.number, self.time = None, 0.0  # of the first signal that came
        self.stopped = False  # whether the processes have agreed to stop

    def __enter__(self) -> "StopSignal":
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether to stop. A signal may reach one process only; all stop at the same step."""
        self.stopped = any(self.processes.gather(self.number is not None))
        return self.stopped

    @property
    def exit_code(self) -> int:
        """The shell's convention for a program that ended by this signal."""
        return 128 + (self.number or signal.SIGTERM)

    def _caught(self, number: int, _frame) -> None:
        # A launcher passes on to its processes the Ctrl-C that they had from the terminal.
        wait = 3 if self.processes.count > 1 else 0
        if self.number is None:
            self.number, self.time = number, time.monotonic()
            if self.processes.first:
                later = f", in {wait} seconds or later," if wait else ""
                message = f"finishing this step and saving; Ctrl-C{later} stops at once"
                tqdm.write(message, file=sys.stderr)
        elif number == signal.SIGINT and time.monotonic() - self.time >= wait:
            raise KeyboardInterrupt


class Lasting:
    """A stream of output. Once it cannot be written any more, what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        """Write at once, so that nothing is left for Python to write, and fail, at the end."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # the pipe or the terminal is closed, the disk is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextmanager
def lasting_output() -> Iterator[None]:
    """Around the program: `| head` ends nothing, and only the first process uses stdout."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere if RANK else Lasting(sys.stdout)),
        redirect_stderr(Lasting(sys.stderr)),
    ):
        yield
