"""The smaller benches: they measure train.py's own work, and the same work on both sides."""

import sys

import pytest
import torch
from conftest import metrics, small
from torch.nn.utils import parameters_to_vector

import logprobs
from benches.bands import summary
from benches.sampler import count_tokens, samplers
from benches.update import full_rollouts, full_update, one_pass
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.run import Run


def test_tokens_are_counted_up_to_the_first_end():
    completions = torch.tensor([[5, 6, 1, 1], [1, 1, 1, 1], [5, 6, 7, 8], [2, 5, 1, 0]])
    assert count_tokens(completions, eos_ids=[1, 2]) == 3 + 1 + 4 + 1


def test_samplers_draw_completions_of_like_length_and_tokens_are_counted_alike(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # so importing it fails
    run = Run(small(), train=False)
    prompts, means = [run.tokenizer(text)["input_ids"] for text in ("47+85=", "19+23=")], {}
    for name, generate in samplers(run).items():
        drawn = generate(prompts, 64, 26, 1.0, 0)
        means[name] = count_tokens(drawn, run.sampler.eos_ids) / 128
    assert means.keys() == {"generate", "torch"}
    assert means["generate"] == pytest.approx(means["torch"], abs=0.6)
    assert 18 < means["torch"] < 24


def test_the_update_computes_every_rollout_and_hardly_moves_the_weights():
    model, _ = load_model("tiny_policy")
    learner = Learner(model, small(micro_batch=3, lr=1e-6), Processes())
    update = full_update(learner, P=2, m=4, L=6, T=5)
    _, kept, advantages, _ = update.args
    assert kept.mask.shape == (2, 4, 5) and kept.mask.all() and (advantages != 0).all()
    before = [weight.detach().clone() for weight in model.parameters()]
    stats = update()
    assert not stats["skipped"] and stats["grad_norm"] > 0
    moved = [(a - b).abs().max() for a, b in zip(before, model.parameters())]
    assert 0 < max(moved) < 1e-4  # the same policy is measured again and again


def test_both_ways_have_the_same_gradient_and_one_reads_each_prompt_once(monkeypatch):
    shapes, original = [], logprobs.read

    def watched(model, input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return original(model, input_ids, *args, **kwargs)

    monkeypatch.setattr(logprobs, "read", watched)
    model, _ = load_model("tiny_policy")
    gradients, kept = [], full_rollouts(model, P=2, m=3, L=5, T=4)
    for way in (logprobs.whole_rows, logprobs.shared_prompts):
        one_pass(model, kept, way)
        gradients.append(parameters_to_vector(p.grad for p in model.parameters()))
    assert shapes == [(6, 8), (2, 5), (6, 3)]
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_a_summary_is_of_the_rows_that_a_run_logs(finished):
    rows = metrics(finished)[1:]
    found = summary(rows)
    for name in ("reward", "reward_kept", "grad_norm", "truncated"):
        assert found[name] == pytest.approx(sum(row[name] for row in rows) / len(rows))
    idle = sum(row["groups_without_signal"] for row in rows)
    assert found["groups without signal"] == pytest.approx(idle / (2 * len(rows)))
    assert found["logprob_gap"] == max(row["logprob_gap"]["max"] or 0 for row in rows) < 1e-4
