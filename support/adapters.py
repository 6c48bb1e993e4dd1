"""Low-rank adapters: train two thin matrices a layer instead of the layer (arXiv 2106.09685).

    model = add_lora(model, rank=64)     # a PEFT model; only the adapter has gradients
    with model.disable_adapter(): ...    # the policy as it was loaded: the KL's reference, for free
    for name, tensor in merged_weights(model): ...    # an ordinary model's weights, made beside it

A layer W becomes W + B A with A [R, in] random and B [out, R] zero at first. peft's own merging
adds B A to W and subtracts it later, which leaves a rounding error in W in every step with vLLM.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from logprobs import whole
from support.errors import say

# The paper's seven: all linear layers of a decoder block (names shared by Llama, Qwen and kin).
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """The model with a fresh float32 adapter of rank R on the seven projections, in place.

    The seed decides A. No dropout: it would train another policy than was sampled from. ValueError
    if the model has none of the seven.
    """
    import peft  # here, because the import takes seconds and the default needs none

    present = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if lacking := [name for name in PROJECTIONS if name not in present]:
        say(f"the adapter goes without {', '.join(lacking)}: the model has no layers of that name")
    sizes = {"r": rank, "lora_alpha": rank}  # the factor of B A is alpha / R = 1
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=list(PROJECTIONS), **sizes)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
    for module in wrapped.modules():
        # Autocast casts the input; peft would first make and keep a copy of it in float32.
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return wrapped


def load_with_adapter(
    folder: str, tokenizer, load: Callable[[str], nn.Module]
) -> tuple[nn.Module, list[str], list[str]]:
    """The ordinary model that an adapter's folder stands for: base and adapter, merged for good.

    `load` gets the base model by its name. With the model come the names of what the adapter's
    files lack, and of what it has no place for.
    """
    import peft

    config = peft.PeftConfig.from_pretrained(folder)
    base = config.base_model_name_or_path
    try:
        model = load(base)
    except (OSError, ValueError) as error:
        raise OSError(f"the adapter's base model {base} cannot be loaded: {error}") from error
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # tokens were added
        model.resize_token_embeddings(len(tokenizer))
    tied, output = model.config.tie_word_embeddings, model.get_output_embeddings()
    if tied:  # take them apart, or what is merged into one would be in both
        output.weight = nn.Parameter(output.weight.detach().clone())
    wrapped = peft.PeftModelForCausalLM(model, config)
    found = wrapped.load_adapter(folder, "default")
    model = wrapped.merge_and_unload().requires_grad_(True)
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    model.config.tie_word_embeddings = tied and torch.equal(first, last)
    model.tie_weights()
    # peft reads whole layers that were trained, too, but calls their names unexpected.
    return model, found.missing_keys, [x for x in found.unexpected_keys if ".lora_" in x]


@torch.no_grad()
def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight, as if the model had no adapter but had learned the same.

    One layer at a time and beside the model: nothing is changed and no second model is held. Tied
    weights come under both of their names.
    """
    base = without_adapter(model)
    for i, (name, tensor) in enumerate(base.state_dict().items()):
        layer_name, adapted, kind = name.rpartition(".base_layer.")
        if adapted and kind == "weight":
            delta = base.get_submodule(layer_name).get_delta_weight("default")  # [out, in] float32
            merged = whole(tensor.to(delta.dtype) + delta)
            tensor = dithered(merged, i) if tensor.dtype == torch.bfloat16 else merged
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), whole(tensor)


def without_adapter(model: nn.Module) -> nn.Module:
    """The transformers model itself, whether or not PEFT's is around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def dithered(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """float32 as bfloat16, rounded up or down by chance; the nearer of the two is the likelier.

    Rounded to the nearest, a weight stays what it was until its update is half a step of bfloat16,
    0.2% to 0.4% of it: the sampler would lose nearly all of a young adapter. Rounded by chance, the
    right share of a matrix's elements moves by a step.
    """
    generator = torch.Generator(tensor.device).manual_seed(seed)
    chance = {"generator": generator, "device": tensor.device, "dtype": torch.int32}
    # A bfloat16 number is a float32 one whose lower 16 bits are 0.
    bits = tensor.contiguous().view(torch.int32) + torch.randint(2**16, tensor.shape, **chance)
    return (bits & -(2**16)).view(torch.float32).bfloat16()
