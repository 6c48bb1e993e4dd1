"""What is trained: adapter, reference, precision, gradient checkpointing."""

import pytest
import torch
from conftest import fixed_batch, learned_something, log_probs, random_model, small, trained_weights
from transformers import AutoModelForCausalLM

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
        wanted = [weight for weight in made.model.parameters() if weight.requires_grad]
        assert [*map(id, group["params"])] == [*map(id, wanted)]
        assert (group["betas"], group["weight_decay"]) == ((0.9, 0.5), 0.25)
        assert all((".lora_" in name) == bool(settings) for name in made.trained)


def test_the_seed_decides_where_an_adapter_starts():
    config = small(lora_rank=2)
    made = (Learner(random_model("qwen2"), config, Processes(), seed) for seed in (1, 1, 2))
    first, again, other = (next(iter(learner.trained.values())) for learner in made)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_with_the_adapter_off_it_is_the_reference():
    made = learner(lora_rank=4, beta=0.1)
    plain = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    learned_something(made.model)
    with made.reference() as reference:
        assert reference is made.policy  # no second copy of the model
        assert torch.equal(log_probs(reference.model), log_probs(plain))
    assert not torch.allclose(log_probs(made.model), log_probs(plain))


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_small_updates_survive_bfloat16(options):
    """A weight of 0.02 and an update of 5e-6: bfloat16 has no number in between."""
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


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4}])
def test_sampler_and_trainer_agree_in_bfloat16(options):
    """Both compute in it, and a weight that an adapter leaves alone is stored in it too."""
    run = Run(small(dtype="bfloat16", **options))
    frozen = {weight.dtype for weight in run.model.parameters() if not weight.requires_grad}
    assert frozen == ({torch.bfloat16} if options else set())
    computed = []
    run.model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, logits: computed.append(logits.dtype)
    )
    rollouts, advantages = fixed_batch(run, [[1.0, 0.0, 0.5, 0.2]] * 2)
    sampled = len(computed)
    stats = train.update(run.learner, rollouts, advantages, run.max_new_tokens)
    assert 0 < sampled < len(computed) and set(computed) == {torch.bfloat16}
    assert stats["logprob_gap"]["mean"] < 0.02


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


def test_what_cannot_be_trained_is_refused_in_one_line():
    model = random_model("gpt2")
    with pytest.raises(InputError, match="--lora-rank with --model gpt2: "):
        Learner(model, small(model="gpt2", lora_rank=4), Processes())
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(InputError, match=r"--model capped: .*final_logit_softcapping"):
        Learner(model, small(model="capped"), Processes())
