"""Models from folders: ordinary ones, adapters; broken ones are refused, strange ones are said."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import edit, log_probs, random_model, small, text_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import train
from support import tiny
from support.errors import InputError
from support.models import EMBEDDED, check_stops, load_model
from support.run import Run
from support.storage import Folder, save_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EMBEDDED)
def test_the_embedded_policies_are_found_from_anywhere(name, dtype, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(name, dtype)
    assert tokenizer.decode(tokenizer("12+34=")["input_ids"]) == "12+34="
    assert model.num_parameters() == 281_600
    assert {weight.dtype for weight in model.parameters()} == {dtype}


SIZE = dict(num_hidden_layers=2, num_attention_heads=2, vocab_size=19, hidden_size=32)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {}),  # as modules
        ("llama", {"attention_dropout": 0.5}),  # as a number that attention reads
        ("opt", {"dropout": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 32}),  # as one of a layer
    ],
)
def test_dropout_is_off_while_training(kind, options, tmp_path):
    """Otherwise the ratio is not 1 at the first step, and the KL not 0."""
    config, ids = AutoConfig.for_model(kind, **SIZE, **options), torch.tensor([[1, 2, 3, 4]])
    model = AutoModelForCausalLM.from_config(config).train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path)
    tiny.make_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))[0].train()
    assert torch.equal(loaded(ids).logits, loaded(ids).logits)


@pytest.fixture
def broken(tmp_path) -> Path:
    """A copy of the tiny policy's folder, to spoil."""
    return Path(shutil.copytree(tiny.TINY_POLICY, tmp_path / "broken"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", ["{}", "x"])
def test_broken_model_folders_are_one_line(broken, file, content):
    (broken / file).write_text(content)
    with pytest.raises(InputError, match=f"^--model {broken}: ") as error:
        load_model(str(broken))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["./missing", "missing", "/missing", "a/b/c", "nobody/nothing"])
def test_what_cannot_be_found_is_one_line(name):
    may_be_of_the_hub = name == "nobody/nothing"
    said = "OSError: " if may_be_of_the_hub else "no such folder, and not a hub name"
    with pytest.raises(InputError, match=f"--model {name}: {said}") as error:
        load_model(name)
    assert "\n" not in str(error.value)


def test_the_folder_of_a_run_is_not_its_model(finished):
    with pytest.raises(InputError, match=f"did you mean {finished / 'model'}?"):
        load_model(str(finished))


# ---- weights -------------------------------------------------------------------------------------

NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: {k: w[k] for k in w if ".layers.1." not in k}, "9 missing, such as .*layers.1"),
        (lambda w: w | {"model.layers.0.extra": torch.ones(2)}, "1 unknown.*0.extra"),
        (lambda w: w | {NORM: torch.ones(64)}, "1 of another shape.*model.norm"),
        (lambda w: w | {NORM: torch.full((128,), torch.nan)}, "1 not finite"),
        (lambda w: w | {NORM: torch.full((128,), torch.inf)}, "1 not finite"),
        # A wrapper's prefix is seen in the names, and the remedy is said.
        (lambda w: {f"module.{k}": w[k] for k in w}, "21 missing.*20 unknown.*module.*wrapper"),
    ],
    ids=["a missing layer", "an unknown tensor", "another shape", "NaN", "infinity", "wrapped"],
)
def test_weights_that_are_not_the_models_are_refused(broken, change, said):
    file = broken / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"--model {broken}: .*{said}"):
        load_model(str(broken))


def test_tied_weights_that_are_not_declared_are_refused(broken):
    edit(broken / "config.json", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"1 missing, such as lm_head\.weight"):
        load_model(str(broken))


# ---- saving and tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, "temperature"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"do_sample": True, "temperature": 0.6}, ""),
    ],
)
def test_what_loads_can_be_saved(broken, tmp_path, capsys, changes, said):
    edit(broken / "generation_config.json", **changes)
    model, tokenizer = load_model(str(broken))
    error = capsys.readouterr().err
    assert ("generation_config.json" in error) == bool(said) and said in error
    save_model(model, tokenizer, tmp_path / "saved")
    saved = load_model(str(tmp_path / "saved"))[0].generation_config
    assert saved.eos_token_id == 17 and saved.temperature == (None if said else 0.6)


@pytest.mark.parametrize(("eos", "said"), [(None, "is given"), (40, "40.*beyond the vocabulary")])
def test_a_model_that_cannot_end_is_refused(broken, eos, said):
    edit(broken / "tokenizer_config.json", eos_token=None)
    for file in ("config.json", "generation_config.json"):
        edit(broken / file, eos_token_id=eos)
    with pytest.raises(ValueError, match=f"no end-of-sequence token.*{said}"):
        check_stops(*load_model(str(broken)))


CHAT = "{% for m in messages %}{{ m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(("eos", "hinted"), [("<|end|>", True), ("<|im_end|>", False)])
def test_a_turn_end_that_ends_nothing_is_hinted_at(capsys, eos, hinted):
    check_stops(random_model("llama", 300), text_tokenizer(CHAT, eos_token=eos))
    assert ("<|im_end|>, which is no stop token" in capsys.readouterr().err) == hinted


# ---- folders of adapters -------------------------------------------------------------------------


def test_a_run_from_a_saved_adapter_leaves_the_policy_that_it_ends_with(tmp_path):
    """All weights of the merged model are trained, or a second adapter on top of it."""
    first = small(steps=2, eval_every=0, lora_rank=4, lr=1e-2)  # so that it has learned something
    train.train(first, tmp_path / "first")
    for rank in (0, 2):
        run = Run(small(model=str(tmp_path / "first" / "model"), lora_rank=rank, lr=1e-3))
        folder = Folder(tmp_path / f"further_{rank}", run)
        folder.create()
        assert {".lora_" in name for name in run.learner.trained} == {rank > 0}
        before = log_probs(run.model).clone()
        for step in (1, 2, 3, 4):
            train.train_step(run, step)
        folder.save_models()
        after, loaded = log_probs(run.model), load_model(str(folder.path / "model"))[0]
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
