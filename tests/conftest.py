"""Shared by all tests: no network, one thread (the fastest for tiny models), and random models."""

import json
import os
import subprocess
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

torch.set_num_threads(1)


def random_model(kind: str, vocab_size: int = 19, seed: int = 0, **options) -> PreTrainedModel:
    """A tiny untrained model, without dropout, whose predictions are far from uniform."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        options = size | dropout | {"initializer_range": 0.2} | options
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=vocab_size, bos_token_id=None, eos_token_id=0, **options)
        )
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    options = size | {"initializer_range": 0.2} | options
    return model(config(vocab_size=vocab_size, bos_token_id=None, eos_token_id=0, **options))


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until the condition holds; fail if the process ends before, or time runs out."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def without_times(out: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl but for what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("time", "seconds")} for row in rows]


@pytest.fixture(params=["qwen2", "llama", "gpt2"])
def model(request) -> PreTrainedModel:
    """Rotary positions with and without biases and tied embeddings, and learned ones."""
    return random_model(request.param)


def edit(path: Path, **changes) -> None:
    """Change entries of a JSON file; None removes one."""
    entries = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in entries.items() if value is not None}
    path.write_text(json.dumps(kept))


def text_tokenizer(template: str | None = None, **special) -> PreTrainedTokenizerFast:
    """One token for each byte and special token: 256 and `<|end|>`, `<|im_end|>`, `<unk>`."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im_end|>", "<unk>"])
    options = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": template} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
