"""A rollout's gradient is what the update adds up, and measured is what the formula says."""

import json
from pathlib import Path

import pytest
import torch
from conftest import TASK, small, write_sums

import bench
from benches.gradients import Sketch, rollout_gradients
from grpo import LOSS_TYPES, group_advantages, grpo_loss, loss_normalizer
from support.run import Run


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rollouts_gradients_add_up_to_that_of_the_updates_loss(loss_type):
    run = Run(small(loss_type=loss_type, temperature=1.5))
    _, prompt_ids = run.prompts(1)
    rollouts = run.sampler.generate(prompt_ids[:1], 8, run.max_new_tokens, 1.5, seed=0)
    sketch = Sketch(run.model.parameters(), 61)
    gradients = rollout_gradients(run, rollouts, sketch)  # [8, 61]

    # All of the group in one pass, as train.py does it.
    advantages = group_advantages(torch.arange(8.0) ** 2)  # [8], no two alike
    (ids, attention), mask = rollouts.sequences(), rollouts.mask[0]
    log_probs = run.learner.policy(ids, attention, mask.shape[1], 1.5)
    normalizer = loss_normalizer(mask, loss_type, run.max_new_tokens)
    options = {"loss_type": loss_type, "normalizer": normalizer}
    grpo_loss(log_probs, log_probs.detach(), advantages, mask, **options).backward()
    whole = sketch.take()

    assert len(gradients.unique(dim=0)) > 4
    parts = -(advantages @ gradients) / 8
    assert (parts - whole).norm() < 1e-4 * whole.norm()


def test_a_sketch_is_linear_and_keeps_inner_products_on_average():
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((30, 20), (7,), (40,))]
    weights[2].requires_grad = False  # stays without a gradient

    def sketched(sketch: Sketch, vector: torch.Tensor) -> torch.Tensor:
        weights[0].grad, weights[1].grad = vector[:600].view(30, 20).clone(), vector[600:].clone()
        return sketch.take()

    a, b = torch.randn(2, 607, generator=draw)
    b = a + b  # 607 in common, of about 607 and 1,214
    products = []
    for seed in range(200):
        sketch = Sketch(weights, 31, seed)
        one, other = sketched(sketch, a), sketched(sketch, b)
        both = sketched(sketch, a + b)
        assert torch.allclose(both, one + other, atol=1e-3) and weights[0].grad is None
        products.append((one @ other).item())
    mean = sum(products) / len(products)
    assert mean == pytest.approx((a @ b).item(), rel=0.08)  # one of them is off by 25%


def test_measured_is_what_the_formula_says(tmp_path, capsys):
    flags = ["--prompts", "1", "--pool", "96", "--groups", "3000", "--ages", "2", "--every", "1"]
    flags += ["--sizes", "16x16", "32x8", "--out", str(tmp_path), "--", "--task", TASK]
    assert bench.main(["signal", *flags]) == 0
    assert "measured against formula" in capsys.readouterr().out
    pools = json.loads((tmp_path / "signal.json").read_text())["pools"]
    assert [pool["steps"] for pool in pools] == [0, 1]
    checked = 0
    for pool in pools:
        for case in pool["cases"]:
            if case.get("formula", 0) > 0.8:  # below that 3,000 groups measure it badly
                checked += 1
                assert case["measured"] == pytest.approx(case["formula"], rel=0.1), case
                assert case["cosine"] > 0.99, case
    assert checked >= 6


def test_what_cannot_be_measured_is_one_line(tmp_path, capsys):
    sums = [(f"{a}+11=", "0") for a in range(10, 60)]  # never right
    task = write_sums(tmp_path / "never.jsonl", sums)
    out = ["--out", str(tmp_path)]
    assert bench.main(["signal", *out, "--", "--task", task]) == 2
    assert bench.main(["signal", *out, "--sizes", "4x16"]) == 2
    one = ["--pool", "1", "--prompts", "1", "--ages", "1", "--", "--task", TASK]
    assert bench.main(["signal", *out, *one]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    first, second, third = (line for line in lines if line.startswith("bench.py: "))
    assert "have both right and wrong answers" in first and "2 <= m <= n" in second
    assert "--pool 1" in third
    assert not Path(tmp_path, "signal.json").exists()
