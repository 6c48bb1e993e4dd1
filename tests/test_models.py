"""Models from folders: ordinary ones, adapters; broken ones are refused, strange ones are said."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import edit, log_probs, random_model, small, text_tokenizer, trained_weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig

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
    "config",
    [
        GPT2Config(vocab_size=19, n_embd=32, n_layer=2, n_head=2),  # as modules
        LlamaConfig(**SIZE, attention_dropout=0.5),  # as a number that attention reads
        OPTConfig(**SIZE, ffn_dim=32, word_embed_proj_dim=32, dropout=0.5),  # as one of a layer
    ],
    ids=lambda config: config.model_type,
)
def test_dropout_is_off_while_training(config, tmp_path):
    """Otherwise the ratio is not 1 at the first step, and the KL not 0."""
    model, ids = AutoModelForCausalLM.from_config(config).train(), torch.tensor([[1, 2, 3, 4]])
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


NOWHERE = "no such folder, and not a hub name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./missing", NOWHERE),
        ("missing", NOWHERE),
        ("/missing/folder", NOWHERE),
        ("a/b/c", NOWHERE),
        ("nobody/nothing", "OSError: "),  # a hub name that cannot be fetched
    ],
)
def test_what_cannot_be_found_is_one_line(name, said):
    with pytest.raises(InputError, match=f"--model {name}: {said}") as error:
        load_model(name)
    assert "\n" not in str(error.value)


def test_the_folder_of_a_run_is_not_its_model(finished):
    with pytest.raises(InputError, match=f"did you mean {finished / 'model'}?"):
        load_model(str(finished))


# ---- weights -------------------------------------------------------------------------------------


def without_a_layer(weights):
    return {name: w for name, w in weights.items() if ".layers.1." not in name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_layer, r"9 missing, such as model\.layers\.1\."),
        (lambda w: w | {"model.layers.0.extra": torch.ones(2)}, "1 unknown.*0.extra"),
        (lambda w: w | {"model.norm.weight": torch.ones(64)}, "1 of another shape.*model.norm"),
        (lambda w: w | {"model.norm.weight": torch.full((128,), torch.nan)}, "1 not finite"),
        (lambda w: w | {"model.norm.weight": torch.full((128,), torch.inf)}, "1 not finite"),
        # A wrapper's prefix is seen in the names, and the remedy is said.
        (
            lambda w: {f"module.{name}": weight for name, weight in w.items()},
            "21 missing.*20 unknown.*module.model.*wrapper",
        ),
    ],
    ids=["a missing layer", "an unknown tensor", "another shape", "NaN", "infinity", "wrapped"],
)
def test_weights_that_are_not_the_models_are_refused(broken, change, said):
    file = broken / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=said) as refused:
        load_model(str(broken))
    assert str(broken) in str(refused.value) and "--lr" not in str(refused.value)


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
