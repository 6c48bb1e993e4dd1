"""A learner's weights and moments: whole on the first process to be saved, and given back to all.

    state = state_of(learner)               # {"model": ..., "optimizer": ...}; empty on the others
    set_state(learner, state, moments)      # the others bring an empty state
    tensors = gathered(model.state_dict().items(), processes)

Tensor by tensor: a GPU has no room for all of them a second time. Left out: torch's
`set_optimizer_state_dict`, which makes moments of 0 and holds them beside those that it reads.
"""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from logprobs import whole
from support.learner import Learner
from support.processes import Processes

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW holds of each weight


def trained(learner: Learner) -> list[tuple[str, nn.Parameter]]:
    """The weights that are trained, by name, in the same order in all processes."""
    named = learner.model.named_parameters()
    return [(name, weight) for name, weight in named if weight.requires_grad]


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], processes: Processes
) -> dict[str, torch.Tensor]:
    """The tensors by name, whole and in the CPU's memory; empty on all but the first process."""
    found = {}
    for name, tensor in tensors:
        tensor = whole(tensor.detach()).cpu()
        if processes.first:
            found[name] = tensor
    return found


def state_of(learner: Learner) -> dict:
    """`model`: the trained weights; `optimizer`: the moments of those that had a gradient."""
    processes, state = learner.processes, {"model": gathered(trained(learner), learner.processes)}
    moments = {}
    for name, weight in trained(learner):
        if held := learner.optimizer.state.get(weight):
            moments[name] = gathered(((kind, held[kind]) for kind in MOMENTS), processes)
    return state | ({"optimizer": {"state": moments}} if moments else {})


@torch.no_grad()
def set_state(learner: Learner, state: dict, with_moments: Collection[str]) -> None:
    """The reverse of `state_of`.

    Args:
        state: on the first process. The others receive their part of it.
        with_moments: the names of the weights that have moments in it.
    """
    weights, moments = state.get("model", {}), state.get("optimizer", {}).get("state", {})
    for name, weight in trained(learner):
        weight.copy_(received(weights.get(name), weight, learner.processes))
        for kind in MOMENTS if name in with_moments else ():
            # The number of steps is one float32, the others are like the weight.
            like = torch.empty((), device=weight.device) if kind == "step" else weight
            moment = received(moments.get(name, {}).get(kind), like, learner.processes)
            learner.optimizer.state[weight][kind] = moment


def received(tensor: torch.Tensor | None, like: torch.Tensor, processes: Processes) -> torch.Tensor:
    """The first process's tensor on every process, where FSDP spreads `like` a part of it."""
    if processes.first:
        tensor = tensor.to(like.device, like.dtype)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(tensor, like.device_mesh, like.placements)
    if processes.count > 1:
        dist.broadcast(tensor, 0)
    return tensor
