"""Low-rank adapters: train two thin matrices a layer instead of the layer (arXiv 2106.09685).

    model = add_lora(model, rank=64)     # a PEFT model; only the adapter has gradients
    with model.disable_adapter(): ...    # the policy as it was loaded: the KL's reference, for free
    for name, tensor in merged_weights(model): ...    # the weights of an ordinary model that does
                                         # the same, made on the side

A layer W becomes W + s B A with A [R, in] random, B [out, R] zero at first, s = alpha / R = 1. Only
A and B are trained, so the optimiser's state and the checkpoint are small.

Merging here never touches W. The usual way, adding s B A to W and subtracting it again after the
weights have been read, leaves a rounding error in W each time, and a run does it every step. Nor
are merged bfloat16 weights rounded to the nearest number, which would lose most of a young adapter.

Left out: everything peft has beyond the plain adapter that the paper used.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from logprobs import whole
from support.checks import check_finite, check_names
from support.errors import say

# The paper's seven: all linear layers of a decoder block (names shared by Llama, Qwen and kin).
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """The model with a fresh adapter of this rank on the paper's seven projections, alpha = rank.

    The policy is unchanged at first, because B is zero. Adapter weights are float32 whatever the
    model is in: an update of 5e-6 is rounded away in bfloat16.

    Args:
        model: a transformers causal language model; its layers are wrapped in place.
        rank: R, the inner size of the adapter.
        seed: of A. Without one, two processes would start from different adapters.

    Raises:
        ValueError: the model has none of the seven projections.
    """
    import peft  # here, because it takes seconds and the default does without

    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if lacking := [name for name in PROJECTIONS if name not in present]:
        say(f"the adapter goes without {', '.join(lacking)}: the model has no layers of that name")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,  # dropout would train another policy than the one that was sampled from
        target_modules=list(PROJECTIONS),
    )
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
    for module in wrapped.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            # Autocast sees to it: of a bfloat16 input PEFT would make, and keep, a float32 copy
            # that autocast casts back.
            module.cast_input_dtype_enabled = False
    return wrapped


def load_with_adapter(
    folder: str | Path, dtype: torch.dtype, tokenizer, load: Callable[[str, torch.dtype], nn.Module]
) -> nn.Module:
    """The ordinary model that a folder written by an adapter's `save_pretrained` stands for.

    The adapter is merged once, for good: what is loaded can be sampled, trained, or given a new
    adapter like any other model.

    Args:
        tokenizer: of the folder; it may have tokens that the base model lacks.
        load: of the base model, from a folder or the hub.

    Raises:
        OSError, ValueError: the base model or the adapter's weights cannot be used.
    """
    import peft

    config = peft.PeftConfig.from_pretrained(folder)
    base = config.base_model_name_or_path
    try:
        model = load(base, dtype)
    except (OSError, ValueError) as error:
        raise OSError(f"the adapter's base model {base} cannot be loaded: {error}") from error
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    model = peft.PeftModelForCausalLM(model, config)
    found = model.load_adapter(folder, "default")
    check_names(found.missing_keys, found.unexpected_keys, [], len(model.state_dict()))
    check_finite(model.named_parameters())
    # Merging leaves the rest frozen, as it was under the adapter.
    return model.merge_and_unload().requires_grad_(True)


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder holds an adapter, and not a model of its own."""
    return Path(folder, "adapter_config.json").exists()


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight, as if the model had no adapter but had learned the same.

    One layer at a time and beside the model: nothing is changed and no second model is held. A
    model without an adapter yields its own weights. Tied weights come under both of their names.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for i, (name, tensor) in enumerate(base.state_dict().items()):
        if ".lora_" in name:
            continue
        layer_name, adapted, kind = name.rpartition(".base_layer.")
        if adapted:
            name = f"{layer_name}.{kind}"
        if adapted and kind == "weight":
            layer = base.get_submodule(layer_name)
            (adapter,) = layer.active_adapters
            delta = layer.get_delta_weight(adapter)  # [out, in], float32
            merged = whole(tensor.to(delta.dtype) + delta)
            yield name, dithered(merged, i) if tensor.dtype == torch.bfloat16 else merged
        else:
            yield name, whole(tensor)


def dithered(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """float32 as bfloat16, rounded up or down by chance, the likelier the nearer.

    Rounded to the nearest, a weight stays what it was until its update is half a step of bfloat16,
    0.2% to 0.4% of it: at the paper's learning rate nearly all of a run's first updates would be
    lost to the sampler, see `bench.py adapters`. By chance, the right share of a matrix's elements
    moves by a step, and on average nothing is lost. A weight that is a bfloat16 number stays one,
    and the same seed is the same chance: the result is a function of the weights alone.
    """
    generator = torch.Generator(tensor.device).manual_seed(seed)
    chance = {"generator": generator, "device": tensor.device, "dtype": torch.int32}
    # A bfloat16 number is a float32 one whose lower 16 bits are 0.
    bits = tensor.contiguous().view(torch.int32) + torch.randint(2**16, tensor.shape, **chance)
    return (bits & -(2**16)).view(torch.float32).bfloat16()
