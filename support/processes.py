"""Several processes that train one policy: who is who, what is exchanged, who writes.

    torchrun --nproc-per-node 8 -- train.py --preset gsm8k-qwen2.5-3b-h100 [--shard]

    processes = Processes()                       # one process: everything below does nothing
    policy = processes.wrap(policy, shard=False)  # DDP, or FSDP2
    with processes.gradients_sent(policy, last=True): ...     # around a forward and backward pass
    rows = processes.gather({"reward": 0.4})      # everyone's, to everyone
    processes.on_first(write_file)                # one process writes, all learn how it went

Each process has its own prompts, random numbers and sampler; all that they share is the gradient.
Plain torch.distributed, the same code over gloo on CPUs and NCCL on GPUs.

Left out: pipeline and tensor parallelism, which no model of the paper's size needs for training.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from support.errors import InputError

# A launcher sets all four. One alone may be a cluster's, and says nothing about this program.
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
# Which process this is: needed before the processes have found each other.
RANK = int(os.environ["RANK"]) if LAUNCHED else 0


class Processes:
    """The processes of one run. With one, every method is the obvious nothing.

    Attributes:
        rank, count: which one this is, of how many.
        first: whether it is the one that writes files and speaks.
        device: where its model is.
    """

    def __init__(self) -> None:
        self.rank = RANK
        self.count = int(os.environ["WORLD_SIZE"]) if LAUNCHED else 1
        self.first = self.rank == 0
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", "0")) if LAUNCHED else 0
            self.device = torch.device("cuda", local)
            torch.cuda.set_device(self.device)
        # A group of one process is not ours: vLLM makes one, even alone.
        if self.count > 1 and not dist.is_initialized():
            # Small things are exchanged by CPU, gradients by GPU. All others wait for hours while
            # the first process writes a large model to a slow disk.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(hours=2))

    # -- the policy

    def wrap(self, policy: nn.Module, shard: bool) -> nn.Module:
        """The policy so that backward passes average gradients over the processes.

        Args:
            policy: `Policy`, which makes the whole computation one forward pass: DDP and FSDP
                work through hooks on the forward pass of the module they wrap.
            shard: FSDP2: every process keeps 1/count of weights, gradients and moments, and gathers
                a layer's weights while it computes the layer. Else DDP: everyone keeps everything.

        Raises:
            InputError: `shard` with one process.
        """
        if self.count == 1:
            if shard:
                raise InputError("--shard needs several processes: start train.py by torchrun")
            return policy
        if not shard:
            # Gradients live in DDP's own buffer: else each would be held twice.
            return DistributedDataParallel(
                policy, gradient_as_bucket_view=True, forward_sync_buffers=False
            )
        mesh = init_device_mesh(self.device.type, (self.count,))
        blocks = set(policy.model._no_split_modules or ())  # names of the decoder layers' classes
        for module in policy.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        return fully_shard(policy, mesh=mesh)

    @contextmanager
    def gradients_sent(self, policy: nn.Module, last: bool) -> Iterator[None]:
        """Around one micro-batch: gradients are sent to the other processes with the last one only.

        Left to itself, DDP sends all of them after every micro-batch: GRPO-GA would pay 4 times.
        """
        if isinstance(policy, FSDPModule):
            policy.set_requires_gradient_sync(last)
        alone = not isinstance(policy, DistributedDataParallel)
        with nullcontext() if alone or last else policy.no_sync():
            yield

    def spread_again(self, policy: nn.Module) -> None:
        """To be called after a forward pass that no backward pass follows.

        FSDP leaves the outermost weights gathered for the backward pass, which spreads them again.
        """
        if isinstance(policy, FSDPModule):
            policy.reshard()

    # -- what is exchanged

    def gather(self, thing: object) -> list:
        """Everyone's `thing`, by rank, for everyone. It is pickled: keep it small."""
        if self.count == 1:
            return [thing]
        things = [None] * self.count
        dist.all_gather_object(things, thing)
        return things

    def any(self, asked: bool) -> bool:
        """Whether any process says yes. All must ask, at the same place."""
        return any(self.gather(asked)) if self.count > 1 else asked

    def on_first(self, work: Callable[[], object], send: bool = True) -> object:
        """Let the first process do it; its result is that of all processes.

        One process alone writes files. If it failed alone, the others would wait for it forever: it
        raises its error, and they end without a word.

        Args:
            send: False: the result stays with the first process, the others get None.
        """
        result, error = None, None
        if self.first:
            try:
                result = work()
            except (InputError, OSError) as caught:
                error = caught
        if self.count > 1:
            outcome = [result if send else None, error]
            dist.broadcast_object_list(outcome)
            if not self.first:
                result, error = outcome
        if error is not None and self.first:
            raise error
        if error is not None:
            raise SystemExit(2 if isinstance(error, InputError) else 1)
        return result

    def leave(self) -> None:
        """Part from the other processes, so that all can end."""
        if self.count > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Largest(float):
    """A number of which, over the processes, the largest counts."""


def combined(rows: Sequence[dict]) -> dict:
    """One row from those of all processes: counts add up, flags are 1 if any is, floats average,
    lists are joined.

    Seconds are averaged too: every process takes part in every update, so all need equally long,
    and a process that waits for the others does that in `update`. None, where a process has no
    such number, does not count.
    """
    row = {}
    for name in rows[0]:
        values = [other[name] for other in rows if other[name] is not None]
        kind = type(values[0]) if values else None
        if kind is dict:
            row[name] = combined(values)
        elif kind is bool:
            row[name] = int(any(values))
        elif kind is Largest:
            row[name] = max(values)
        elif kind is list:
            row[name] = [number for part in values for number in part]
        elif kind is int:
            row[name] = sum(values)
        else:
            row[name] = sum(values) / len(values) if values else None
    return row
