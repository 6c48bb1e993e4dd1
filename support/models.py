"""A model and its tokenizer, from a folder or the hub.

model, tokenizer = load_model("tiny_policy")                # embedded, or "rare_policy"
model, tokenizer = load_model("Qwen/Qwen2.5-3B-Instruct", torch.bfloat16)
model, tokenizer = load_model("runs/.../model")             # of a run; an adapter comes merged
"""

import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from support.adapters import is_adapter, load_with_adapter
from support.checks import check_finite, check_names, keep_savable
from support.errors import InputError
from support.tiny import EMBEDDED


def load_model(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Model and tokenizer from a folder or the hub, on the GPU if there is one.

    Raises:
        InputError: there is no such model, or it cannot be read.
    """
    path = str(EMBEDDED.get(name, name))
    if Path(path).is_dir():
        # An adapter's folder names it, and may be loaded from anywhere.
        path = os.path.abspath(path)
    elif path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"--model {name}: no such folder, and not a hub name such as owner/model")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if is_adapter(path):
            model = load_with_adapter(path, dtype, tokenizer, load_weights)
        else:
            model = load_weights(path, dtype)
    except Exception as error:  # safetensors, tokenizers and transformers each raise their own
        reason = (str(error).strip() or "no message").splitlines()[0]
        if not isinstance(error, (OSError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"
        if Path(path, "model").is_dir():  # the folder of a run
            reason = f"did you mean {Path(path, 'model')}? ({reason})"
        raise InputError(f"--model {name}: {reason}") from error
    # Dropout makes the policy that is trained another one than the policy that was sampled from.
    # Some layers have a module for it, others only a number.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_weights(path: str, dtype: torch.dtype) -> nn.Module:
    """A transformers model, every tensor of it from its files.

    Left to itself, transformers draws what it does not find at random, and goes on.

    Raises:
        ValueError: weights are missing, unknown, of another shape, or not finite.
        OSError: there is no such model.
    """
    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    missing, unknown = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    misshaped = sorted(name for name, *_ in found["mismatched_keys"])
    check_names(missing, unknown, misshaped, len(model.state_dict()))
    check_finite(model.named_parameters())
    keep_savable(model, path)
    return model
