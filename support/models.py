"""A model and its tokenizer, from a folder or the hub, and what can be wrong with them.

model, tokenizer = load_model("tiny_policy")                # embedded, or "rare_policy"
model, tokenizer = load_model("Qwen/Qwen2.5-3B-Instruct", torch.bfloat16)
model, tokenizer = load_model("runs/.../model")             # of a run; an adapter comes merged
check_stops(model, tokenizer)                               # a completion can end
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as TokenizerBase

from rollouts import eos_token_ids
from support.errors import InputError, say

EMBEDDED = {name: Path(__file__).with_name(name) for name in ("tiny_policy", "rare_policy")}
# The method by which layers are computed again: transformers 5.24 warns of the name before it.
NEW, OLD = "activation_checkpointing_enable", "gradient_checkpointing_enable"
CHECKPOINTING = NEW if hasattr(PreTrainedModel, NEW) else OLD


def is_adapter(folder: str | Path) -> bool:
    """Whether the folder holds an adapter, and not a model of its own."""
    return Path(folder, "adapter_config.json").exists()


def load_model(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, TokenizerBase]:
    """Model and tokenizer from a folder or the hub, on the GPU if there is one.

    Raises:
        InputError: there is no such model, or it cannot be read.
    """
    path = str(EMBEDDED.get(name, name))
    if Path(path).is_dir():
        # A saved adapter names this folder, and may be loaded from another working directory.
        path = os.path.abspath(path)
    elif path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"--model {name}: no such folder, and not a hub name such as owner/model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if is_adapter(path):
            from support.adapters import load_with_adapter  # most runs have none

            model, *names = load_with_adapter(path, tokenizer, partial(load_weights, dtype=dtype))
            check_weights(model, *names)
        else:
            model = load_weights(path, dtype)
    except Exception as error:  # safetensors, tokenizers and transformers each raise their own
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        if Path(path, "model").is_dir():  # the folder of a run
            reason = f"did you mean {Path(path, 'model')}? ({reason})"
        raise InputError(f"--model {name}: {reason}") from error
    # With dropout the policy that is trained would not be the policy that was sampled from. Some
    # layers have a module for dropout, others only a number.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_weights(path: str, dtype: torch.dtype) -> nn.Module:
    """A transformers model; OSError or ValueError unless every tensor comes from its files."""
    # Left to itself, transformers draws what it does not find at random, and goes on.
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    other_shapes = [name for name, *_ in found["mismatched_keys"]]
    check_weights(model, found["missing_keys"], found["unexpected_keys"], other_shapes)
    try:
        model.generation_config.validate(strict=True)
    except ValueError as error:  # transformers reads such a file, but would refuse to write it
        say(f"{path}/generation_config.json: only its stop tokens are kept ({error})")
        eos = model.generation_config.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos)
    return model


def check_weights(
    model: nn.Module, missing: Sequence[str], unknown: Sequence[str], misshaped: Sequence[str] = ()
) -> None:
    """Raise ValueError unless a model's weights were all in its files, and are numbers."""
    wrong = {"missing": missing, "unknown to the model": unknown, "of another shape": misshaped}
    # The extremes of a tensor are NaN if any of its numbers is, and they take no memory.
    wrong["not finite"] = [
        name
        for name, weight in model.named_parameters()
        if weight.numel() and not torch.stack(weight.detach().aminmax()).isfinite().all()
    ]
    if any(wrong.values()):
        parts = [f"{len(x)} {what}, such as {min(x)}" for what, x in wrong.items() if x]
        raise ValueError(
            f"of the weights in its files {'; '.join(parts)}: get all of the folder anew; a model "
            "in a wrapper (module., _orig_mod.) must be saved without it"
        )


def check_stops(model: nn.Module, tokenizer: TokenizerBase) -> None:
    """Raise ValueError if no token ends a completion; say so if the chat template names another."""
    stops = eos_token_ids(model, tokenizer)
    known = model.get_input_embeddings().weight.shape[0]
    if not any(0 <= token < known for token in stops):
        given = f"{stops}, is beyond the vocabulary" if stops else "is given"
        raise ValueError(
            f"no end-of-sequence token {given}: name it as eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )
    end = turn_end(tokenizer)
    if end is not None and end not in stops:
        say(
            f"hint: the chat template ends a turn with {tokenizer.convert_ids_to_tokens(end)}, "
            f"which is no stop token: add {end} to eos_token_id in generation_config.json"
        )


def turn_end(tokenizer: TokenizerBase) -> int | None:
    """The special token that the chat template puts behind an answer; None if it puts none."""
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # no template, or one that allows no such turns: rendering has its own checks
        return None
    _, answer, rest = text.rpartition(turns[1]["content"])
    after = tokenizer(rest.strip(), add_special_tokens=False)["input_ids"] if answer else []
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return after[0] if after and after[0] in special - {tokenizer.unk_token_id} else None
