"""Signal and noise: the formula against every group that there can be, and what is measured."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import TASK, small, write_sums

import bench
from benches.signal import (
    COMPARED,
    draw_pool,
    formula,
    group_gradients,
    measured,
    moments,
    take_sketch,
)
from grpo import LOSS_TYPES, group_advantages, grpo_loss, loss_normalizer
from pods import down_sample
from support.run import Run

# A made-up pool: gradients of two right and three wrong rollouts.
GRADIENTS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([True, False, False, True, False])
N = len(RIGHT)


def subsets_kept(rewards: torch.Tensor, rule: str, m: int) -> list[tuple[int, ...]]:
    """What the rule may keep, equally likely: one subset, or any for the random rule."""
    if rule == "random":
        return list(itertools.combinations(range(len(rewards)), m))
    return [tuple(down_sample(rewards, m, rule).tolist())]


def estimate(drawn: tuple[int, ...]) -> torch.Tensor:
    """(1/m) sum A_i g_i of these rollouts of the pool, as it is written."""
    rewards = [float(RIGHT[i]) for i in drawn]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    total = torch.zeros(3, dtype=torch.float64)
    for i, r in zip(drawn, rewards):
        if deviation > 0:
            total += (r - mean) / deviation * GRADIENTS[i] / len(rewards)
    return total


def every_estimate(rule: str, n: int, m: int) -> torch.Tensor:
    """The estimates of all N^n groups, each as often as the rule may keep something else."""
    found = []
    for group in itertools.product(range(N), repeat=n):
        rewards = RIGHT[list(group)].double()
        for kept in subsets_kept(rewards, rule, m):
            found.append(estimate(tuple(group[i] for i in kept)))
    return torch.stack(found)


@pytest.mark.parametrize("rule", COMPARED)
@pytest.mark.parametrize(("n", "m"), [(4, 2), (3, 3)])
def test_the_formula_is_exact(rule, n, m):
    estimates = every_estimate(rule, n, m)
    signal = estimates.mean(0).square().sum().item()
    noise = estimates.var(0, correction=0).sum().item()
    expected = formula(moments(GRADIENTS, RIGHT), rule, n, m)
    assert (expected.signal, expected.noise) == pytest.approx((signal, noise), rel=1e-9)
    # The direction is that of the right ones' mean less the wrong ones', whatever is kept.
    goal = GRADIENTS[RIGHT].mean(0) - GRADIENTS[~RIGHT].mean(0)
    cosine = torch.cosine_similarity(estimates.mean(0), goal, dim=0).item()
    assert cosine == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("rule", COMPARED)
def test_groups_drawn_by_the_products_own_rules_and_advantages_measure_the_same(rule):
    """grpo.py's advantages have another length (m - 1, not m), and the same signal to noise."""
    rewards, draw = RIGHT.double(), torch.Generator().manual_seed(1)
    estimates = group_gradients(GRADIENTS, rewards, rewards, rule, 8, 4, 40_000, draw)
    expected = formula(moments(GRADIENTS, RIGHT), rule, 8, 4)
    assert measured(estimates).ratio == pytest.approx(expected.ratio, rel=0.05)
    longer = 4 / 3  # m / (m - 1), of squares
    assert longer * measured(estimates).noise == pytest.approx(expected.noise, rel=0.05)


def test_what_the_rule_sees_may_be_another_reward():
    """Selected by a number that the gradients know of, the direction is another one."""
    rewards, draw = RIGHT.double(), torch.Generator().manual_seed(1)
    goal = GRADIENTS[RIGHT].mean(0) - GRADIENTS[~RIGHT].mean(0)
    seen = rewards + 0.1 * torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
    means = [
        group_gradients(GRADIENTS, rewards, by, "max_variance", 16, 4, 20_000, draw).mean(0)
        for by in (rewards, seen)
    ]
    cosines = [torch.cosine_similarity(mean, goal, dim=0).item() for mean in means]
    assert cosines[0] > 0.999 and cosines[1] < 0.98


def test_the_mean_of_few_groups_is_not_taken_for_signal():
    """Of pure noise, |mean|^2 is the noise over G on average; what is reported is 0."""
    draw = torch.Generator().manual_seed(0)
    groups = torch.randn(1000, 20, 4, generator=draw)  # noise 4, so 0.2 uncorrected
    signals = [measured(estimates).signal for estimates in groups]
    assert sum(signals) / 1000 == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rollouts_gradients_add_up_to_that_of_the_updates_loss(loss_type):
    run = Run(small(loss_type=loss_type, temperature=1.5))
    data, longest = run.eval_data[TASK], run.max_new_tokens
    problem, ids = data.problems[0], data.prompt_ids[0]
    seed = next(s for s in range(9) if draw_pool(run, problem, ids, 8, s, 61))
    pool = draw_pool(run, problem, ids, 8, seed, 61)

    # All of the group in one pass, as train.py does it.
    rollouts = run.sampler.generate([ids], 8, longest, 1.5, seed)
    assert rollouts.texts[0] == pool.texts and len(set(pool.texts)) > 4
    advantages = group_advantages(torch.arange(8.0) ** 2)  # [8], no two alike
    mask = rollouts.mask[0]
    log_probs = run.learner.policy(*rollouts.sequences(), mask.shape[1], 1.5)
    options = {"loss_type": loss_type, "normalizer": loss_normalizer(mask, loss_type, longest)}
    grpo_loss(log_probs, log_probs.detach(), advantages, mask, **options).backward()
    whole = take_sketch(run.model.parameters(), 61)
    parts = -(advantages @ pool.gradients) / 8
    assert (parts - whole).norm() < 1e-4 * whole.norm()


def test_a_sketch_is_linear_and_keeps_inner_products_on_average():
    draw = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((30, 20), (7,), (40,))]
    weights[2].requires_grad = False  # stays without a gradient

    def sketched(vector: torch.Tensor, seed: int) -> torch.Tensor:
        weights[0].grad, weights[1].grad = vector[:600].view(30, 20).clone(), vector[600:].clone()
        return take_sketch(weights, 31, seed)

    a, b = torch.randn(2, 607, generator=draw)
    b = a + b  # 607 in common, of about 607 and 1,214
    products = []
    for seed in range(200):
        one, other = sketched(a, seed), sketched(b, seed)
        assert torch.allclose(sketched(a + b, seed), one + other, atol=1e-3)
        assert weights[0].grad is None
        products.append((one @ other).item())
    mean = sum(products) / len(products)
    assert mean == pytest.approx((a @ b).item(), rel=0.08)  # one of them is off by 25%


def test_measured_is_what_the_formula_says(tmp_path):
    flags = ["--prompts", "1", "--pool", "96", "--groups", "3000", "--ages", "2", "--every", "1"]
    flags += ["--sizes", "16x16", "32x8", "--out", str(tmp_path), "--", "--task", TASK]
    assert bench.main(["signal", *flags]) == 0
    pools = json.loads((tmp_path / "signal.json").read_text())["pools"]
    assert [pool["steps"] for pool in pools] == [0, 1]
    # What notebook 5 looks up: of all n, where the rules are one, it is random's.
    kept = [[(one["rule"], one["n"], one["m"]) for one in pool["cases"]] for pool in pools]
    assert all(rules.count(("random", 16, 16)) == 1 for rules in kept)
    assert not any((rule, 16, 16) in rules for rules in kept for rule in COMPARED[:2])
    checked = 0
    for case in (case for pool in pools for case in pool["cases"]):
        if (case["formula"] or 0) > 0.8:  # below that 3,000 groups measure it badly
            checked += 1
            assert case["measured"] == pytest.approx(case["formula"], rel=0.1), case
            assert case["cosine"] > 0.99, case
    assert checked >= 6


def test_where_nothing_is_ever_right_there_is_one_line(tmp_path, capsys):
    task = write_sums(tmp_path / "never.jsonl", [(f"{a}+11=", "0") for a in range(10, 60)])
    flags = ["--out", str(tmp_path), "--pool", "4", "--", "--task", task]
    assert bench.main(["signal", *flags]) == 2
    assert "--pool 4: none has right and wrong answers" in capsys.readouterr().err
    assert not Path(tmp_path, "signal.json").exists()
