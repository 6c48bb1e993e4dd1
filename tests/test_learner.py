"""What is trained: precision, adapter, reference, gradient checkpointing."""

import pytest
import torch
from conftest import (
    fixed_batch,
    learned_something,
    log_probs,
    random_model,
    small,
    trained_weights,
)
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

import train
from support.errors import InputError
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.run import Run
from support.tiny import TINY_POLICY


def learner(**settings) -> Learner:
    return Learner(load_model("tiny_policy")[0], small(**settings), Processes())


def test_the_optimizer_steps_what_is_trained_and_no_more():
    for settings in ({}, {"lora_rank": 4}):
        made = learner(**settings, weight_decay=0.25, adam_beta2=0.5)
        (group,) = made.optimizer.param_groups
        assert [id(w) for w in group["params"]] == [
            id(w) for w in made.model.parameters() if w.requires_grad
        ]
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.5), 0.25)
        assert made.trained().keys() == trained_weights(made.model).keys()
        assert all((".lora_" in name) == bool(settings) for name in made.trained())


def test_the_seed_decides_where_an_adapter_starts():
    first, again, other = (
        trained_weights(
            Learner(load_model("tiny_policy")[0], small(lora_rank=2), Processes(), seed).model
        )
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


# ---- the reference -------------------------------------------------------------------------------


def test_the_reference_is_a_copy_that_stays_as_it_was():
    made = learner(beta=0.1)
    before = log_probs(made.model).clone()
    with torch.no_grad():
        for weight in made.model.parameters():
            weight.mul_(1.1)
    with made.reference() as reference:
        assert torch.equal(log_probs(reference.model), before)
    assert not torch.allclose(log_probs(made.model), before)


def test_with_the_adapter_off_it_is_the_reference():
    made = learner(lora_rank=4, beta=0.1)
    plain = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    learned_something(made.model)
    with made.reference() as reference:
        assert reference is made.policy  # no second copy of the model
        assert torch.equal(log_probs(reference.model), log_probs(plain))
    assert not torch.allclose(log_probs(made.model), log_probs(plain))


# ---- precision and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_small_updates_survive_bfloat16(options):
    """A weight of 0.02 and an update of 5e-6: bfloat16 has no number in between."""
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    assert weight - 5e-6 == weight
    run = Run(small(dtype="bfloat16", lr=5e-6, warmup_steps=0, **options))
    trained = trained_weights(run.model)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    before = {name: weight.clone() for name, weight in trained.items()}
    train.train_step(run, 1)
    changed = [name for name, weight in trained.items() if (weight != before[name]).any()]
    # An adapter's A has no gradient as long as B is 0.
    assert changed == [name for name in trained if not options or "lora_B" in name]
    steps = torch.cat([(trained[n] - before[n]).abs().flatten() for n in changed])
    assert 0 < steps.max() < 1e-4


def test_frozen_weights_under_an_adapter_are_stored_in_bfloat16():
    run = Run(small(dtype="bfloat16", lora_rank=4))
    dtypes = {weight.dtype for weight in run.model.parameters() if not weight.requires_grad}
    assert dtypes == {torch.bfloat16}


def test_sampler_and_trainer_agree_in_bfloat16():
    row, _ = train.train_step(Run(small(dtype="bfloat16")), 1)
    assert 1e-6 < row["logprob_gap"]["mean"] < 0.02  # bfloat16 at work, on both sides


@pytest.mark.parametrize(
    ("options", "rounding"),
    # In bfloat16 it shows that a prompt is read once without checkpointing, and m times with it.
    [({}, 1e-5), ({"lora_rank": 4}, 1e-5), ({"dtype": "bfloat16"}, 0.03)],
)
def test_gradient_checkpointing_changes_the_memory_and_nothing_else(options, rounding):
    gradients, stored = [], []
    for on in (False, True):
        run = Run(small(gradient_checkpointing=on, **options))
        kept, _ = fixed_batch(run, [[0.0] * 4] * 2)
        sizes = []  # of what autograd keeps until the backward pass
        keep = lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2)
            train.update(run.learner, kept, advantages, run.max_new_tokens)
        trained = (weight for weight in run.model.parameters() if weight.requires_grad)
        gradients.append(torch.cat([weight.grad.flatten() for weight in trained]))
        stored.append(sum(sizes))
    assert (gradients[1] - gradients[0]).norm() < rounding * gradients[0].norm()
    assert stored[1] < stored[0] / 2


# ---- what cannot be trained ----------------------------------------------------------------------


def test_models_that_change_their_logits_are_refused_in_one_line():
    size = dict(vocab_size=19, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    size |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    model = Gemma2ForCausalLM(Gemma2Config(**size))
    with pytest.raises(InputError, match=r"--model gemma: .*final_logit_softcapping"):
        Learner(model, small(model="gemma"), Processes())


def test_an_adapter_that_a_model_has_no_place_for_is_refused_in_one_line():
    with pytest.raises(InputError, match="--lora-rank with --model gpt2: "):
        Learner(random_model("gpt2"), small(model="gpt2", lora_rank=4), Processes())
