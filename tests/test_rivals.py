"""Rivals and baselines as settings of the same loop: each against its formula, by hand."""

import statistics

import torch
from conftest import fixed_batch, small

import bench
import train
from support import run as train_run
from support.run import Run
from support.settings import Config

ACCURACY = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
TAGS = [0.0, 1.0, 0.5, 0.25, 0.75, 0.0, 0.25, 1.0]


def mixed_score(completions, answers, weights=None, opens_think=False):
    """A stand-in for `score` with two kinds of extremes; each group of 8 is the same."""
    times = len(completions) // 8
    total = [a + 2 * t for a, t in zip(ACCURACY, TAGS)]
    parts = {"accuracy": ACCURACY, "format": [0.0] * 8, "tag_count": TAGS, "total": total}
    return {name: values * times for name, values in parts.items()}


def step_with(monkeypatch, **settings) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """What one step kept of each group; what the update was given: advantages, and who ended."""
    seen = {}

    def update(learner, kept, advantages, max_new_tokens):
        seen["advantages"], seen["finished"] = advantages, kept.finished
        return {"loss": 0.0, "grad_norm": 0.0, "skipped": True, "logprob_gap": {}}

    def down_sample(rewards, m, rule, generator):
        seen["keep"] = train_down_sample(rewards, m, rule, generator)
        return seen["keep"]

    train_down_sample = train.down_sample
    with monkeypatch.context() as patch:
        patch.setattr(train_run, "score", mixed_score)
        patch.setattr(train, "down_sample", down_sample)
        patch.setattr(train, "update", update)
        train.train_step(Run(small(n=8, m=4, **settings)), 1)
    return seen["keep"].tolist(), seen["advantages"], seen["finished"]


def normalised(values: list[float], over: list[float], scaled: bool = True) -> list[float]:
    spread = statistics.stdev(over) + 1e-4 if scaled else 1.0
    return [(value - statistics.fmean(over)) / spread for value in values]


def test_the_rule_sees_the_reward_that_it_is_told_to(monkeypatch):
    """Extremes of the total are about tags here; of accuracy, the two right ones and two wrong."""
    assert step_with(monkeypatch)[0] == [[1, 5, 6, 7]] * 2  # totals 1 2 1 1.5 1.5 0 0.5 2
    assert step_with(monkeypatch, select_by="accuracy")[0] == [[0, 1, 2, 3]] * 2
    assert step_with(monkeypatch, select_by="tag_count")[0] == [[0, 1, 5, 7]] * 2


def test_advantages_are_those_of_the_total_over_the_kept_or_over_all(monkeypatch):
    everything = mixed_score("12345678", [])["total"]
    for select_by, scale in (("total", "std"), ("accuracy", "none")):
        how = {"select_by": select_by, "scale": scale}
        keep, advantages, _ = step_with(monkeypatch, **how)
        kept = [everything[i] for i in keep[0]]
        expected = [normalised(kept, kept, scale == "std")] * 2
        torch.testing.assert_close(advantages, torch.tensor(expected))
        again, advantages, _ = step_with(monkeypatch, advantages="all", **how)
        assert again == keep
        expected = [normalised(kept, everything, scale == "std")] * 2
        torch.testing.assert_close(advantages, torch.tensor(expected))


def test_what_was_cut_off_may_have_no_advantage(monkeypatch):
    short = dict(max_new_tokens=20)  # some sums need 19 tokens, most need more
    _, plain, _ = step_with(monkeypatch, **short)
    _, masked, ended = step_with(monkeypatch, mask_truncated=True, **short)
    assert ended.any() and not ended.all()
    assert torch.equal(masked[ended], plain[ended]) and not masked[~ended].any()


def test_leaving_out_groups_without_signal_divides_by_the_others_alone():
    """Two groups of which one says nothing: half the sequences, twice the gradient."""
    rewards, gradients = [[1.0, 0.0, 0.5, 0.0], [0.2, 0.2, 0.2, 0.2]], {}
    for over in ("all", "signal"):
        config = small(n=4, m=4, average_over=over, loss_type="grpo", max_grad_norm=1e9, lr=1e-9)
        run = Run(config)
        train.update(run.learner, *fixed_batch(run, rewards), run.max_new_tokens)
        gradients[over] = [weight.grad.clone() for weight in run.model.parameters()]
    for counted, alone in zip(gradients["all"], gradients["signal"], strict=True):
        torch.testing.assert_close(alone, 2 * counted)


def test_every_arm_of_the_race_is_a_setting_of_the_loop():
    for arm in bench.ARMS:
        config = bench.racer(arm, Config(n=32, m=8))
        trained = config.prompts_per_step * config.m
        assert trained == 4 * (32 if arm == "grpo-ga" else 8), arm
