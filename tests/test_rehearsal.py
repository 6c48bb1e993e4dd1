"""Saving, sampling and scoring are tried before step 0; another policy is found out."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from conftest import small
from transformers import AutoModelForCausalLM

import train
from rollouts import TorchSampler
from support.errors import InputError
from support.rehearsal import FAR, Rehearsal
from support.run import Run
from support.settings import Config
from support.tiny import make_tokenizer

SHORT = ["--n", "4", "--m", "2", "--prompts-per-step", "2", "--steps", "2", "--eval-problems", "8"]
SMALL = {
    "vocab_size": 19,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 17,
    "pad_token_id": 17,
    "bos_token_id": None,
}
RECURRENT = {
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "Rwkv": {"context_length": 64, "attention_hidden_size": 32},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}


def folder_of(model, path: Path) -> Path:
    """A model folder with the tiny policy's tokenizer."""
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def of_kind(name: str, **options):
    """A small random model of an architecture, by the name of its classes."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")
    known = config().to_dict().keys() | set(config.attribute_map)
    sizes = {key: value for key, value in SMALL.items() if key in known}
    return AutoModelForCausalLM.from_config(config(**sizes | options))


def train_on(folder: Path, out: Path, *more: str) -> int:
    sums = out.with_suffix(".jsonl")
    rows = [{"question": f"{a}+11=", "answer": f"{a + 11}"} for a in range(10, 40)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", str(folder), "--task", str(sums), "--out", str(out)]
    return train.main([*flags, *SHORT, *more])


def largest_gap(out: Path) -> float:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["logprob_gap"]["max"] for row in rows if "logprob_gap" in row]
    return max(gap for gap in gaps if gap is not None)


def refusal(capsys) -> str:
    """What was said instead of training: one line."""
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("train.py: ")]
    assert len(lines) == 1
    return lines[0]


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Qwen3", "Mistral", "Phi3", "GPTNeoX", "Bloom", "OPT", "StableLm", "Olmo2"]
)
def test_models_of_many_kinds_train_on_what_they_sample(tmp_path, name):
    assert train_on(folder_of(of_kind(name), tmp_path / name), tmp_path / "out") == 0
    assert largest_gap(tmp_path / "out") < 1e-4


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_without_keys_and_values_are_refused(tmp_path, capsys, name):
    folder = folder_of(of_kind(name, **RECURRENT[name]), tmp_path / name)
    assert train_on(folder, tmp_path / "out") == 2
    assert f"{name}ForCausalLM" in refusal(capsys)
    assert not (tmp_path / "out").exists()
    flags = ["--eval-only", "--model", str(folder), "--out", str(tmp_path / "eval")]
    assert train.main([*flags, "--eval-problems", "8"]) == 2


@pytest.mark.parametrize("name", ["OPT", "GPT2", "BioGpt"])
def test_no_dropout_is_left_under_gradient_checkpointing(tmp_path, name):
    """Checkpointing needs train mode, in which dropout would make two policies of one."""
    options = {"resid_pdrop": 0.5, "attn_pdrop": 0.5} if name == "GPT2" else {"dropout": 0.5}
    folder = folder_of(of_kind(name, **options), tmp_path / name)
    assert train_on(folder, tmp_path / "out", "--gradient-checkpointing") == 0
    assert largest_gap(tmp_path / "out") < 1e-4


# ---- samplers of another policy ------------------------------------------------------------------


class Off(TorchSampler):
    """Says log-probs that are off by `error`: before the first update, or only from then on."""

    error, from_sync = 0.5, 0

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.syncs = 0

    def sync(self, model) -> None:
        super().sync(model)
        self.syncs += 1

    def generate(self, *arguments, **options):
        rollouts = super().generate(*arguments, **options)
        rollouts.log_probs -= self.error * (self.syncs > self.from_sync)
        return rollouts


@pytest.mark.parametrize(("from_sync", "when"), [(0, "before the first step"), (1, "after")])
def test_a_sampler_of_another_policy_is_refused(tmp_path, monkeypatch, capsys, from_sync, when):
    monkeypatch.setattr("support.run.TorchSampler", Off)
    monkeypatch.setattr(Off, "from_sync", from_sync)
    folder = folder_of(of_kind("Llama"), tmp_path / "model")
    assert train_on(folder, tmp_path / "out") == 2
    said = refusal(capsys)
    assert when in said and "two policies" in said and "look at --sampler torch, 0.5" in said


def test_a_trainer_of_another_policy_is_named(tmp_path, monkeypatch, capsys):
    forward = train.Learner.__init__

    def deaf(self, *arguments) -> None:
        forward(self, *arguments)
        score = self.policy.forward
        self.policy.forward = lambda *inputs: score(*inputs) + 1.5

    monkeypatch.setattr("support.learner.Learner.__init__", deaf)
    folder = folder_of(of_kind("Llama"), tmp_path / "model")
    assert train_on(folder, tmp_path / "out") == 2
    assert "look at the trainer, 1.5" in refusal(capsys)


def test_a_bfloat16_model_under_a_float32_adapter_is_tried_as_it_is_trained(monkeypatch):
    """A plain forward pass, without autocast, would refuse to multiply the two."""
    run = Run(small(lora_rank=4, dtype="bfloat16"))
    Rehearsal(run)
    monkeypatch.setitem(FAR, "bfloat16", -1.0)
    with pytest.raises(InputError, match="from a plain forward pass"):
        Rehearsal(run)


def test_a_small_difference_is_said_once_and_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("support.run.TorchSampler", Off)
    monkeypatch.setattr(Off, "error", 5e-4)
    folder = folder_of(of_kind("Llama"), tmp_path / "model")
    assert train_on(folder, tmp_path / "out", "--steps", "3") == 0
    assert capsys.readouterr().err.count("log-probs are 0.0005 from the trainer's") == 1


def test_a_model_without_probabilities_is_not_blamed_on_the_learning_rate(tmp_path, capsys):
    model = of_kind("Llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(1e30)  # finite, but not what they make together
        model.model.norm.weight.mul_(1e30)
    assert train_on(folder_of(model, tmp_path / "model"), tmp_path / "out") == 2
    said = refusal(capsys)
    assert "no probabilities" in said and "--lr" not in said


def test_a_model_that_cannot_be_saved_is_refused(tmp_path, monkeypatch, capsys):
    def full(self, *_, **__):
        raise RuntimeError("no way to write this")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    assert train.main([*SHORT, "--out", str(tmp_path / "out")]) == 2
    assert re.search("cannot be saved.*no way to write this", refusal(capsys))


def test_the_rehearsal_changes_nothing(tmp_path):
    """Neither weights, gradients, modes nor random numbers."""
    run = Run(Config(n=4, m=2, eval_problems=8, gradient_checkpointing=True))
    weights = {name: weight.clone() for name, weight in run.model.state_dict().items()}
    modes = [module.training for module in run.model.modules()]
    state = torch.get_rng_state()
    Rehearsal(run)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in run.model.modules()] == modes
    assert all(torch.equal(weights[name], w) for name, w in run.model.state_dict().items())
    assert all(weight.grad is None for weight in run.model.parameters())


# ---- vLLM ----------------------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")


@needs_vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Olmo2", "Qwen3Moe", "Qwen3"])
def test_with_vllm_a_model_trains_or_is_refused(tmp_path, capsys, name):
    """Its kernels for some architectures compute something else, or cannot be loaded twice."""
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    options = {"head_dim": 32} | (moe if name.endswith("Moe") else {})
    folder = folder_of(of_kind(name, **(options if "Qwen" in name else {})), tmp_path / name)
    code = train_on(folder, tmp_path / "out", "--sampler", "vllm")
    if name == "Qwen3":
        assert code == 0
    if code == 0:
        assert largest_gap(tmp_path / "out") < 1e-3
    else:
        assert code == 2 and f"{name}ForCausalLM" in refusal(capsys)


@pytest.mark.parametrize(("temperature", "refused"), [("0.005", True), ("0.01", False)])
def test_a_temperature_that_vllm_does_not_sample_at_is_refused(capsys, temperature, refused):
    flags = ["--sampler", "vllm", "--temperature", temperature, "--dry-run"]
    assert train.main(flags) == (2 if refused else 0)
    assert ("--sampler torch below that" in capsys.readouterr().err) == refused
    assert train.main(["--temperature", temperature, "--dry-run"]) == 0
