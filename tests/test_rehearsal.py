"""Saving, sampling and scoring are tried before step 0; another policy is found out."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import transformers
from conftest import SIZES_OF, small
from transformers import AutoModelForCausalLM

import train
from rollouts import TorchSampler
from support.errors import InputError
from support.rehearsal import Rehearsal
from support.run import Run
from support.tiny import make_tokenizer

SIZES = SIZES_OF["qwen2"] | dict(vocab_size=19, initializer_range=0.2, bos_token_id=None)
SIZES |= dict(eos_token_id=17, pad_token_id=17)
QWEN3_NEXT = dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2)
QWEN3_NEXT |= dict(linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
QWEN3_NEXT |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
RECURRENT = {
    "Mamba": {"state_size": 8},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": QWEN3_NEXT | dict(shared_expert_intermediate_size=16),
}


def folder_of(name: str, path: Path, **options) -> str:
    """The folder of a small random model, by the name of its classes, with sums' tokenizer."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    known = config().to_dict().keys() | set(config.attribute_map)
    sizes = {key: value for key, value in SIZES.items() if key in known}
    model = AutoModelForCausalLM.from_config(config(**sizes | options))
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def rehearsed_step(**changes) -> dict:
    """The numbers of a first step that was rehearsed, and looked at again afterwards."""
    run = Run(small(eval_every=0, **changes))
    rehearsal = Rehearsal(run)
    row, _ = train.train_step(run, 1)
    rehearsal.after(1, row)
    return row


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Qwen3", "Mistral", "Phi3", "GPTNeoX", "Bloom", "OPT", "StableLm", "Olmo2"]
)
def test_models_of_many_kinds_train_on_what_they_sample(tmp_path, name):
    row = rehearsed_step(model=folder_of(name, tmp_path), reward_weights=(1, 1, 1), rule="random")
    assert row["logprob_gap"]["max"] is None or row["logprob_gap"]["max"] < 1e-4


@pytest.mark.parametrize("train_too", [True, False])
@pytest.mark.parametrize("name", RECURRENT)
def test_layers_without_keys_and_values_are_refused(tmp_path, name, train_too):
    folder = folder_of(name, tmp_path, **RECURRENT[name])
    with pytest.raises(InputError, match=f"--model {folder} .*--sampler torch"):
        Rehearsal(Run(small(model=folder), train=train_too))


def test_longrope_is_trained_as_far_as_its_positions_stay_what_they_are(tmp_path):
    """From the 33rd token on, all positions are turned otherwise, those of cached keys too."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    long = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    folder = folder_of("Phi3", tmp_path, rope_parameters=rope, **long)
    row = rehearsed_step(model=folder, reward_weights=(1, 1, 1), rule="random")
    assert row["completion_length"] > 15 and row["logprob_gap"]["max"] < 1e-4
    with pytest.raises(InputError, match=r"--max-new-tokens 27 and a prompt .* 32 positions"):
        Run(small(model=folder, max_new_tokens=27))


# ---- samplers of another policy ------------------------------------------------------------------


class Off(TorchSampler):
    """Says log-probs that are off by `error`: before the first update, or only from then on."""

    error, from_sync, syncs = 0.5, 0, 0

    def sync(self, model) -> None:
        super().sync(model)
        self.syncs += 1

    def generate(self, *arguments, **options):
        rollouts = super().generate(*arguments, **options)
        rollouts.log_probs -= self.error * (self.syncs > self.from_sync)
        return rollouts


@pytest.mark.parametrize(("error", "from_sync"), [(0.5, 0), (0.5, 1), (math.nan, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sampler_of_another_policy_is_refused(monkeypatch, dtype, error, from_sync):
    when = ("before the first step", "after the first update")[from_sync]
    monkeypatch.setattr("support.run.TorchSampler", Off)
    monkeypatch.setattr(Off, "error", error)
    monkeypatch.setattr(Off, "from_sync", from_sync)
    with pytest.raises(InputError, match=rf"policies {when}: .* {error}.*, in {dtype} at most"):
        rehearsed_step(dtype=dtype, lora_rank=4)


def test_a_small_difference_is_said_once_and_trained(monkeypatch, capsys):
    monkeypatch.setattr("support.run.TorchSampler", Off)
    monkeypatch.setattr(Off, "error", 5e-4)
    run = Run(small())
    rehearsal = Rehearsal(run)
    for step in (1, 2):
        rehearsal.after(step, train.train_step(run, step)[0])
    assert capsys.readouterr().err.count("log-probs are 0.0005 from the trainer's") == 1


def test_a_model_that_cannot_be_saved_is_one_line(monkeypatch):
    monkeypatch.delattr("transformers.PreTrainedTokenizerBase.save_pretrained")
    with pytest.raises(OSError, match=r"cannot write .*/model: .*save_pretrained"):
        Rehearsal(Run(small()))


def test_the_rehearsal_changes_nothing():
    """Neither weights, gradients, modes nor random numbers."""
    run = Run(small(gradient_checkpointing=True))
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    modes = [module.training for module in run.model.modules()]
    state = torch.get_rng_state()
    Rehearsal(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in run.model.modules()] == modes
    assert all(torch.equal(weights[name], w) for name, w in run.model.state_dict().items())
    assert all(weight.grad is None for weight in run.model.parameters())


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Olmo2", "Qwen3"])
def test_with_vllm_a_model_trains_or_is_refused(tmp_path, name):
    """Its kernels for some architectures compute something else, or cannot be loaded twice."""
    folder = folder_of(name, tmp_path, **({"head_dim": 32} if name == "Qwen3" else {}))
    try:
        row = rehearsed_step(model=folder, sampler="vllm", reward_weights=(1, 1, 1), rule="random")
        assert row["logprob_gap"]["max"] < 1e-3
    except InputError as error:
        assert name == "Olmo2" and folder in str(error)
