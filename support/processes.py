"""Several processes that train one policy: who is who, what is exchanged, who writes.

    torchrun --nproc-per-node 8 -- train.py --preset gsm8k-qwen2.5-3b-h100 [--shard]

    processes = Processes()                       # one process: everything below does nothing
    processes.equalise(model)                     # all start from the first one's weights
    processes.average_gradients(weights)          # after the last backward pass of an update
    policy = processes.shard(policy)              # instead of these two: FSDP2
    rows = processes.gather({"reward": 0.4})      # everyone's, to everyone
    processes.on_first(write_file)                # one process writes, all learn how it went

Each process has its own prompts, random numbers and sampler; all that they share is the gradient.
This is plain torch.distributed, the same code over gloo on CPUs and NCCL on GPUs.

It is not DistributedDataParallel: DDP keeps gradients in buffers of its own, and micro-batches
whose gradients are not sent yet add up beside those buffers, so each gradient is held twice. Here
gradients add up in place and are averaged once, after the last micro-batch. The price is that DDP
would send the first gradients while the others are still computed: for a 3B model (12 GB of
gradients) over NVLink that is by arithmetic about 0.1 s of a step of 13 s.

Left out: pipeline and tensor parallelism, which no model of the paper's size needs for training.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from logprobs import whole
from support.errors import InputError

# A launcher sets all four. A cluster may set one of them, which says nothing about this program.
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
# The number of this process, which is needed before the processes have found each other.
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
            # Small things are exchanged by CPU, gradients by GPU. The timeout is long because all
            # others wait while the first process writes a large model, perhaps to a slow disk.
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(hours=2))

    # -- one policy, one gradient

    def equalise(self, model: nn.Module) -> None:
        """Give all processes the first one's weights; equal steps keep them equal.

        Without this, a folder that differs between two machines would train two policies.
        """
        if self.count > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def average_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes the mean of all processes' gradients.

        A process without anything to learn from has no gradients: it sends zeros, or the others
        would wait for it. A weight that no process used (a vision tower, where there is only text)
        stays without a gradient everywhere, and AdamW passes over it.

        Args:
            weights: what is trained, in the same order in all processes.
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
        """The policy with its weights spread over the processes by FSDP2 (`--shard`).

        Every process keeps 1/count of weights, gradients and moments, and gathers a layer's weights
        while it computes the layer. After every micro-batch each process gets its part of the mean
        gradient (reduce-scatter), so that no process ever holds a whole gradient. Processes
        therefore make equally many passes.

        Args:
            policy: `logprobs.Policy`, which makes the whole computation one forward pass: FSDP
                works through hooks on the forward pass of the module that it wraps. With dtype
                bfloat16 weights are gathered in it, and gradients are still added up in float32.

        Raises:
            InputError: there is one process only.
        """
        if self.count == 1:
            raise InputError("--shard needs several processes: start train.py by torchrun")
        options = {"mesh": init_device_mesh(self.device.type, (self.count,))}
        if policy.dtype == torch.bfloat16:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        blocks = set(policy.model._no_split_modules or ())  # names of the decoder layers' classes
        for module in policy.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        return fully_shard(policy, **options)

    def spread_again(self, policy: nn.Module) -> None:
        """To be called after a forward pass that no backward pass follows.

        FSDP leaves the outermost weights gathered for the backward pass, which spreads them again.
        """
        if isinstance(policy, FSDPModule):
            policy.reshard()

    # -- what is exchanged

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

    def any(self, asked: bool) -> bool:
        """Whether any process says yes. All must ask, at the same place."""
        return any(self.gather(asked))

    def on_first(self, work: Callable[[], object], send: bool = True) -> object:
        """Let the first process do `work`; its result is that of all processes.

        If the first process failed alone, the others would wait for it forever. So it raises its
        error, and the others end without a word.

        Args:
            send: if False, the result stays with the first process, and the others get None.
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
    """A number that becomes the largest of the processes' numbers, not their mean."""


def combined(rows: Sequence[dict]) -> dict:
    """One row from those of all processes: counts add up, flags are 1 if any is, floats average,
    lists are joined.

    Seconds are averaged too: every process takes part in every update, so all need equally long,
    and a process that waits for the others does so in `update`. A process that has no such number
    gives None, which does not count.
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
