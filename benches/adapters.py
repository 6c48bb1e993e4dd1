"""How much of an adapter's update does a sampler see that gets it merged, in bfloat16?

    python bench.py adapters --model HuggingFaceTB/SmolLM2-135M-Instruct
    python bench.py adapters --updates 1 5 20 50 200 --lr 5e-6

A bfloat16 number has 8 bits: what is added to a weight W is lost if it is less than half a step,
0.2% to 0.4% of W. The trainer adds the adapter's output to that of W, and loses nothing; a sampler
that gets W + s B A as one matrix, rounded to the nearest number, sees nothing of an element until
its update has grown large enough. Rounded by chance, it sees the right share of them.

Legend: T completion tokens, R rank.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import nn

import train
from benches.measure import table
from benches.update import full_rollouts
from logprobs import Policy
from support.adapters import dithered, merged_weights
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.settings import Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--model", default=Config.model, help="folder or hub name")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 5, 20, 50])
    parser.add_argument("--lr", type=float, default=5e-6, help="the paper's")
    parser.add_argument("--rank", type=int, default=64, help="R, the paper's")


def adapters(arguments: argparse.Namespace) -> dict:
    """Of an adapter's update, the share that is there once it is merged in bfloat16.

    Updates on the same rollouts again and again: the best case, since all of them add up. Then, for
    merged weights rounded to the nearest number and by chance (as our samplers get them): the share
    of the merged matrices' update that is there, 1 being all of it; how far log-probs of the
    rollouts moved, and how far the sampler's are from the trainer's. Both compute in float32, so
    that nothing but the merging is seen.
    """
    T = 24
    model, copy = [load_model(arguments.model)[0] for _ in range(2)]  # the trainer's, the sampler's
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()  # a model that was stored like that
    config = Config(lora_rank=arguments.rank, lr=arguments.lr)
    learner = Learner(model, config, Processes())
    kept = full_rollouts(copy, P=1, m=4, L=8, T=T)
    inputs = (*kept.sequences(), T)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    rows = []
    with torch.no_grad():
        before = learner.policy(*inputs)  # [4, T]
    for count in range(1, max(arguments.updates) + 1):
        train.update(learner, kept, advantages, T)
        if count not in arguments.updates:
            continue
        exact = dict(merged_weights(learner.model))
        with torch.no_grad():
            trainers = learner.policy(*inputs)
        row = {"updates": count, "log-probs moved": (trainers - before).abs().mean().item()}
        for way, rounded in ROUNDED.items():
            merged = {name: rounded(weight).float() for name, weight in exact.items()}
            copy.load_state_dict(merged)
            with torch.no_grad():
                gap = (Policy(copy)(*inputs) - trainers).abs().mean().item()
            row |= {f"share, {way}": share_merged(learner.model, merged), f"gap, {way}": gap}
        rows.append(row)
    print(table(f"{arguments.model}, R={arguments.rank}, merged in bfloat16", rows))
    return {"model": arguments.model, "rows": rows}


ROUNDED = {
    "nearest": torch.Tensor.bfloat16,
    "by chance": lambda weight: dithered(weight, seed=0),
    "not at all": lambda weight: weight,
}


@torch.no_grad()
def share_merged(model: nn.Module, merged: dict[str, torch.Tensor]) -> float:
    """<merged - W, update> / <update, update>, over all elements of all layers with an adapter."""
    there = whole = 0.0
    for name, layer in adapted_layers(model):
        update = layer.get_delta_weight("default").double()  # [out, in]
        weight = layer.base_layer.weight.double()
        there += ((merged[f"{name}.weight"].double() - weight) * update).sum().item()
        whole += (update * update).sum().item()
    return there / whole


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each layer that has an adapter."""
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name, module
