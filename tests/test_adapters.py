"""Adapters: what is trained, where it starts, and the plain model that it stands for."""

import peft
import pytest
import torch
from conftest import adapted, assert_equal, batch, log_probs, random_model, trained_weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from logprobs import Policy
from support import tiny
from support.adapters import add_lora, dithered, merged_weights
from support.errors import InputError
from support.models import is_adapter, load_model
from support.storage import save_model


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(kind):
    plain, model = random_model(kind), random_model(kind)
    state = torch.get_rng_state()
    wrapped = add_lora(model, 4, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"
    assert torch.equal(log_probs(plain), log_probs(wrapped))
    trained = {name for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in wrapped.named_parameters() if ".lora_" in name}
    assert len(trained) == 2 * 7 * 2  # A and B of seven projections in two layers
    log_probs(wrapped).sum().backward()
    assert all(weight.grad is not None for weight in wrapped.parameters() if weight.requires_grad)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_are_those_of_a_plain_model_with_the_same_policy(tied, tmp_path):
    plain, wrapped = adapted("qwen2", tie_word_embeddings=tied)
    base_before = {k: v.clone() for k, v in wrapped.state_dict().items()}
    merged = dict(merged_weights(wrapped))
    assert merged.keys() == plain.state_dict().keys()
    plain.load_state_dict(merged)
    torch.testing.assert_close(log_probs(plain), log_probs(wrapped), atol=1e-5, rtol=0)
    for name, weight in wrapped.state_dict().items():  # no drift, however often it is done
        assert torch.equal(weight, base_before[name]), name
    save_model(wrapped.get_base_model(), tiny.make_tokenizer(), tmp_path / "merged", merged)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(log_probs(loaded), log_probs(plain))


def in_bfloat16():
    """An adapter that has learned something, of a model that is stored in bfloat16."""
    _, wrapped = adapted("qwen2")
    for name, weight in wrapped.named_parameters():
        if ".lora_" not in name:
            weight.data = weight.data.bfloat16()
    return wrapped


def test_bfloat16_weights_are_merged_by_chance_so_that_on_average_nothing_is_lost():
    torch.manual_seed(0)
    weight = torch.randn(400, 400).bfloat16()
    assert torch.equal(dithered(weight.float(), 0), weight)  # nothing to round
    for size in (1e-5, 1e-3, 1e-1):
        exact = weight.float() + size * torch.randn(400, 400)
        rounded = dithered(exact, 1)
        assert torch.equal(rounded, dithered(exact, 1)) and rounded.dtype == torch.bfloat16
        step = exact.abs() * 2**-7
        assert ((rounded.float() - exact).abs() <= step).all()  # to one of the two neighbours
        moved, update = rounded.double() - weight.double(), (exact - weight.float()).double()
        share = (moved * update).sum() / (update * update).sum()
        assert share == pytest.approx(1.0, abs=0.1)
        nearest = ((exact.bfloat16().double() - weight.double()) * update).sum()
        assert size > 1e-4 or nearest < 0.3 * (update * update).sum()  # what it is about


def test_an_adapter_of_a_bfloat16_model_is_merged_like_that():
    wrapped = in_bfloat16()
    merged = dict(merged_weights(wrapped))
    assert all(weight.dtype == torch.bfloat16 for weight in merged.values())
    assert_equal(dict(merged_weights(wrapped)), merged)
    name = "model.layers.1.mlp.up_proj"
    layer, found = wrapped.get_base_model().get_submodule(name), merged[f"{name}.weight"]
    whole = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert ((found.float() - whole).abs() <= whole.abs() * 2**-7).all()
    assert not torch.equal(found, whole.bfloat16())  # by chance, not to the nearest


def test_merged_weights_of_a_plain_model_are_its_own():
    model = random_model("llama")
    merged = dict(merged_weights(model))
    assert all(merged[k].data_ptr() == v.data_ptr() for k, v in model.state_dict().items())


def test_without_pefts_own_casts_bits_are_the_same():
    """Under autocast they are a float32 copy of every input, kept, and cast back at once."""
    results = []
    for casting in (False, True):
        wrapped = in_bfloat16()
        layers = [m for m in wrapped.modules() if hasattr(m, "cast_input_dtype_enabled")]
        assert len(layers) == 2 * 7 and not any(m.cast_input_dtype_enabled for m in layers)
        for layer in layers:
            layer.cast_input_dtype_enabled = casting
        ids, attention, mask = batch()
        found = Policy(wrapped.train(), torch.bfloat16)(ids, attention, mask.shape[1])
        found[mask].sum().backward()
        gradients = [p.grad for p in wrapped.parameters() if p.requires_grad]
        results.append([found.detach()[mask], *gradients])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"target_modules": ["q_proj"]}, True),
        # What is merged into one of two tied layers must not be in the other.
        ({"target_modules": ["lm_head", "q_proj"]}, False),
        ({"target_modules": ["embed_tokens", "q_proj"]}, False),
        ({"target_modules": ["embed_tokens", "lm_head"]}, False),
        ({"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, True),
        # New tokens, with whole layers that were trained, or rows of them.
        ({"tokens": 2, "target_modules": ["q_proj"]}, True),
        ({"tokens": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"tokens": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"tokens": 2, "target_modules": ["q_proj"], "trainable_token_indices": [19, 20]}, True),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of peft's, about tied weights
def test_a_folder_gives_the_policy_that_was_saved_and_gives_it_again(tmp_path, options, tied):
    model, tokenizer = load_model("tiny_policy")
    options = dict(options)
    if tokens := options.pop("tokens", 0):
        tokenizer.add_tokens([f"<new{i}>" for i in range(tokens)])
        model.resize_token_embeddings(len(tokenizer))
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    for weight in trained_weights(wrapped).values():
        weight.add_(0.1 * torch.randn_like(weight))
    save_model(wrapped, tokenizer, tmp_path / "adapter")

    loaded, _ = load_model(str(tmp_path / "adapter"))
    save_model(loaded, tokenizer, tmp_path / "plain")
    assert is_adapter(tmp_path / "adapter") and not is_adapter(tmp_path / "plain")
    ids = tokenizer("34+57=", return_tensors="pt")["input_ids"]
    for plain in (loaded, load_model(str(tmp_path / "plain"))[0]):
        assert plain.config.tie_word_embeddings == tied
        torch.testing.assert_close(plain(ids).logits, wrapped(ids).logits, atol=1e-4, rtol=0)


def test_an_adapters_files_are_checked_like_a_models(tmp_path):
    model, tokenizer = load_model("tiny_policy")
    save_model(add_lora(model, rank=2), tokenizer, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "qproj"): w for name, w in load_file(file).items()}, file)
    with pytest.raises(InputError, match=r"missing.*q_proj.*unknown.*qproj"):
        load_model(str(tmp_path / "adapter"))


def test_projections_that_a_model_lacks_are_named(capsys):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = Phi3Config(vocab_size=19, num_attention_heads=4, pad_token_id=0, **sizes)
    add_lora(Phi3ForCausalLM(config), rank=4)
    said = capsys.readouterr().err
    assert "without q_proj, k_proj, v_proj, gate_proj, up_proj:" in said and "o_proj," not in said
    add_lora(random_model("llama"), rank=4)
    assert "without" not in capsys.readouterr().err
