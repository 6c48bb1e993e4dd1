"""Models from folders: ordinary ones, adapters, broken ones."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import log_probs, small, trained_weights
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import train
from support import tiny
from support.errors import InputError
from support.models import EMBEDDED, load_model
from support.run import Run
from support.storage import Folder


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_policies_are_found_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(name)
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert model.num_parameters() == 281_600


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_stored_in_the_dtype_that_is_asked_for(dtype):
    model, _ = load_model("tiny_policy", dtype)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_dropout_is_off_while_training(tmp_path):
    """Otherwise the ratio is not 1 at the first step, and the KL not 0."""
    size = dict(num_hidden_layers=2, num_attention_heads=2, vocab_size=19, hidden_size=32)
    torch.manual_seed(0)
    models = {
        # As modules, and as a number that attention reads.
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=32, n_layer=2, n_head=2)),
        "llama": LlamaForCausalLM(LlamaConfig(**size, attention_dropout=0.5)),
    }
    ids = torch.tensor([[1, 2, 3, 4]])
    for name, model in models.items():
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)
        model.save_pretrained(tmp_path / name)
        tiny.make_tokenizer().save_pretrained(tmp_path / name)
        loaded, _ = load_model(str(tmp_path / name))
        loaded.train()
        assert torch.equal(loaded(ids).logits, loaded(ids).logits)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{}", "x"])
def test_broken_model_folders_are_one_line(tmp_path, file, content):
    folder = tmp_path / "model"
    shutil.copytree(tiny.TINY_POLICY, folder)
    (folder / file).write_text(content)
    with pytest.raises(InputError, match=f"^--model {folder}: ") as error:
        load_model(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["./missing", "missing", "/missing/folder", "a/b/c"])
def test_what_is_no_folder_and_no_hub_name_is_said(name):
    with pytest.raises(InputError, match=f"--model {name}: no such folder, and not a hub name"):
        load_model(name)


def test_a_hub_name_that_cannot_be_fetched_is_one_line():
    with pytest.raises(InputError, match="--model nobody/nothing: ") as error:
        load_model("nobody/nothing")
    assert "\n" not in str(error.value)


def test_the_folder_of_a_run_is_not_its_model(finished):
    with pytest.raises(InputError, match=f"did you mean {finished / 'model'}?"):
        load_model(str(finished))


# ---- folders of adapters -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory) -> Path:
    """A run with an adapter that has learned something, merged too."""
    out = tmp_path_factory.mktemp("runs") / "adapter"
    train.train(small(steps=2, eval_every=0, lora_rank=4, merge=True, lr=1e-2), out)
    return out


def test_a_saved_adapter_is_loaded_as_the_policy_it_stands_for(with_adapter):
    model, _ = load_model(str(with_adapter / "model"))
    assert all(".lora_" not in name for name, _ in model.named_parameters())
    merged, _ = load_model(str(with_adapter / "merged"))
    torch.testing.assert_close(log_probs(model), log_probs(merged), atol=1e-4, rtol=0)
    assert not torch.allclose(log_probs(merged), log_probs(load_model("tiny_policy")[0]), atol=1e-3)
    assert trained_weights(model).keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_from_a_saved_adapter_leaves_the_policy_that_it_ends_with(
    with_adapter, rank, tmp_path
):
    """All weights of the merged model are trained, or a second adapter on top of it."""
    start = str(with_adapter / "model")
    run = Run(small(model=start, lora_rank=rank, lr=1e-3))
    folder = Folder(tmp_path / "further", run)
    folder.create()
    assert trained_weights(run.model)
    assert all((".lora_" in name) == (rank > 0) for name in trained_weights(run.model))
    before = log_probs(run.model).clone()
    for step in (1, 2, 3, 4):
        train.train_step(run, step)
    folder.save_models()
    after, loaded = log_probs(run.model), load_model(str(tmp_path / "further" / "model"))[0]
    torch.testing.assert_close(log_probs(loaded), after, atol=1e-4, rtol=0)
    assert not torch.allclose(before, after, atol=1e-3)
    assert not torch.allclose(log_probs(load_model("tiny_policy")[0]), after, atol=1e-2)


def test_an_adapter_of_a_local_model_is_loaded_from_anywhere(tmp_path, monkeypatch):
    shutil.copytree(tiny.TINY_POLICY, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    train.train(small(steps=1, model="base", lora_rank=2), Path("run"))
    monkeypatch.chdir("/")
    assert isinstance(load_model(str(tmp_path / "run" / "model"))[0], nn.Module)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(InputError, match=f"base model {tmp_path / 'base'} cannot be loaded"):
        load_model(str(tmp_path / "run" / "model"))
