"""The two passes that are compared do the same work, and the bound is what tokens say."""

from dataclasses import replace

import pytest
from torch.nn.utils import parameters_to_vector

import logprobs
from benches.measure import in_processes
from benches.prompts import Pass, pass_memory, prepare, prompt_rows
from support.models import load_model


def test_both_ways_have_the_same_gradient_and_one_reads_each_prompt_once(monkeypatch):
    shapes, original = [], logprobs.read

    def watched(model, input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return original(model, input_ids, *args, **kwargs)

    monkeypatch.setattr(logprobs, "read", watched)
    model, _ = load_model("tiny_policy")
    gradients = {}
    for whole in (True, False):
        prepare(Pass("tiny_policy", P=2, m=3, L=5, T=4, whole=whole), model)()
        gradients[whole] = parameters_to_vector(p.grad for p in model.parameters())
    assert shapes == [(6, 8), (2, 5), (6, 3)]
    assert (gradients[True] - gradients[False]).norm() < 1e-5 * gradients[True].norm()


def test_a_row_has_both_ways_beside_the_bound():
    rows = prompt_rows("tiny_policy", P=1, sizes=[2, 8], T=4, rounds=2)
    assert [(row["L"], row["m"]) for row in rows] == [
        (L, m) for L in (1, 2, 4, 8, 16) for m in (2, 8)
    ]
    last = rows[-1]
    assert last["bound"] == pytest.approx(8 * (16 + 4) / (16 + 8 * 4))
    assert last["of it"] == pytest.approx(last["whole / once"][0] / last["bound"])


def test_a_prompt_read_once_needs_less_memory():
    """32 rollouts of a prompt of 200 tokens: 6,700 tokens are kept, or 500."""
    once = Pass("tiny_policy", P=1, m=32, L=200, T=10, whole=False)
    needed, whole = in_processes(1, pass_memory, [once, replace(once, whole=True)])
    assert 0 < needed < whole / 3
