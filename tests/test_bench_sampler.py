"""What the samplers are compared by, and that they do the same work."""

import pytest
import torch

from benches.sampler import GenerateSampler, count_tokens, sampler_rows
from rollouts import TorchSampler
from support.models import load_model


def test_tokens_are_counted_up_to_the_first_end():
    completions = torch.tensor([[5, 6, 1, 1], [1, 1, 1, 1], [5, 6, 7, 8], [2, 5, 1, 0]])
    assert count_tokens(completions, eos_ids=[1, 2]) == 3 + 1 + 4 + 1


def test_both_samplers_draw_completions_of_like_length_and_tokens_are_counted_alike():
    model, tokenizer = load_model("tiny_policy")
    prompts = [tokenizer(text)["input_ids"] for text in ("47+85=", "19+23=")]
    samplers = {"generate": GenerateSampler, "torch": TorchSampler}
    means = {}
    for name, kind in samplers.items():
        one = kind(model, tokenizer)
        drawn = one.generate(prompts, 64, 26, 1.0, seed=0)
        means[name] = count_tokens(drawn, [tokenizer.eos_token_id]) / 128
    assert means["generate"] == pytest.approx(means["torch"], abs=0.6)
    assert 18 < means["torch"] < 24


class Fixed:
    """A sampler whose completions are all of three tokens."""

    eos_ids = (0,)

    def generate(self, prompts, n, max_new_tokens, temperature, seed) -> torch.Tensor:
        """[P*n, T]"""
        row = torch.tensor([5, 5, 0, 0, 0, 0])[:max_new_tokens]
        return row.repeat(len(prompts) * n, 1)


def test_a_row_compares_token_by_token():
    rows = sampler_rows({"generate": Fixed(), "torch": Fixed()}, [[1], [2]], 4, 6, 3, vocabulary=50)
    assert [row["sampler"] for row in rows] == ["generate", "torch"]
    assert [row["tokens"] for row in rows] == [24, 24]  # 2 prompts, 4 rollouts, 3 tokens
    assert rows[0]["draw share"] is None and rows[1]["draw share"][0] > 0
    assert rows[0]["speed / generate"] == [1.0, 1.0, 1.0] and rows[1]["tokens/s"] > 0
