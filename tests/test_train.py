"""The loop, its step and the update, against plain passes over all rows."""

import dataclasses
import math
import threading

import pytest
import torch
from conftest import assert_equal, fixed_batch, metrics, small, weights_of, without_times
from transformers import AutoModelForCausalLM

import support.run
import train
from grpo import LOSS_TYPES, grpo_loss
from logprobs import token_log_probs
from support import tiny
from support.errors import InputError
from support.run import Run
from support.settings import Config
from support.storage import checkpoints, load_checkpoint

# ---- the loop ------------------------------------------------------------------------------------


def test_learning_is_real(tmp_path):
    """24 steps lift held-out accuracy by far more than its standard error of 0.017."""
    rows = train.train(Config(steps=24, eval_every=0), tmp_path / "run")
    assert rows == metrics(tmp_path / "run")  # what is returned is what is logged
    assert [row["step"] for row in rows if "eval" in row] == [0, 24]
    assert rows[0]["eval_accuracy"] < 0.42
    assert rows[-1]["eval_accuracy"] > 0.55


def test_minutes_limit_ends_the_run(tmp_path):
    rows = train.train(small(steps=None, minutes=0.01), tmp_path / "run")
    assert rows[-1]["time"] >= 0.6
    assert rows[-2]["time"] < 0.6
    assert "eval_accuracy" in rows[-1]


def test_training_works_outside_the_main_thread(tmp_path):
    """Notebook servers and schedulers run code in threads, where signals cannot be handled."""
    thread = threading.Thread(target=train.train, args=(small(steps=1), tmp_path / "run"))
    thread.start()
    thread.join()
    assert (tmp_path / "run" / "model").exists()


# ---- a step --------------------------------------------------------------------------------------


def with_rewards(values):
    """A stand-in for `score`: these rewards, over and over."""

    def score(completions, answers, weights=None, opens_think=False):
        rewards = [float(values[i % len(values)]) for i in range(len(completions))]
        return dict.fromkeys(("accuracy", "format", "tag_count", "total"), rewards)

    return score


def test_logged_reward_is_of_all_rollouts_not_of_the_kept(monkeypatch):
    """Rewards 0 0 0 0 0 0 0 1, m = 4: the policy's mean is 1/8, the batch's 1/4."""
    monkeypatch.setattr(support.run, "score", with_rewards([0, 0, 0, 0, 0, 0, 0, 1]))
    row, logs = train.train_step(Run(small()), 1)
    assert (row["reward"], row["reward_kept"], row["accuracy"]) == (0.125, 0.25, 0.125)
    assert row["reward_std"] == pytest.approx(math.sqrt(7 / 64 * 8 / 7))
    assert row["pass_rates"] == [0.125, 0.125]  # of each prompt
    assert (row["groups"], row["groups_without_signal"]) == (2, 0)
    assert [group["kept"] for group in logs["groups"]] == [[0, 1, 2, 7]] * 2


def test_groups_without_signal_are_counted(monkeypatch):
    monkeypatch.setattr(support.run, "score", with_rewards([1.2]))
    row, _ = train.train_step(Run(small()), 1)
    assert (row["groups"], row["groups_without_signal"], row["skipped"]) == (2, 2, 1)


def test_learning_rate_warms_up_then_stays():
    run, rates = Run(small(lr=1e-3, warmup_steps=4)), []
    for step in range(1, 7):
        train.train_step(run, step)
        rates.append(run.learner.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


# ---- the update ----------------------------------------------------------------------------------

REWARDS = [[1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.2, 0.2, 0.2, 0.2]]


def updated(config: Config, rewards) -> tuple[Run, dict]:
    """A run after one update of full size, and what the update reported."""
    run = Run(config)
    return run, train.update(run.learner, *fixed_batch(run, rewards), run.max_new_tokens)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_is_that_of_all_kept_rollouts_whatever_the_micro_batch(loss_type, beta):
    """Against one plain pass over all rows, the group without signal computed and counted."""
    config = small(n=5, m=5, loss_type=loss_type, beta=beta, max_grad_norm=1e9)
    run = Run(config)
    kept, advantages = fixed_batch(run, REWARDS)
    ids, attention = kept.sequences()
    T = kept.mask.shape[-1]
    reference = token_log_probs(run.model, ids, attention, T).detach()
    with torch.no_grad():
        run.model.model.norm.weight.mul_(1.1)  # away from the reference
    current = token_log_probs(run.model, ids, attention, T)
    options = {"loss_type": loss_type, "max_completion_length": run.max_new_tokens, "beta": beta}
    inputs = current, current.detach(), advantages.flatten(), kept.mask.flatten(0, 1)
    loss = grpo_loss(*inputs, ref_log_probs=reference, **options)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    run.learner.optimizer.param_groups[0]["lr"] = 0.0  # the gradient only
    for micro_batch in (1, 2, 3, 64):
        run.learner.config = dataclasses.replace(config, micro_batch=micro_batch)
        stats = train.update(run.learner, kept, advantages, run.max_new_tokens)
        assert stats["loss"] == pytest.approx(loss.item(), abs=1e-5)
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_gradient_above_the_limit_is_scaled_down_to_it_and_said_as_it_was():
    norms = {}
    for limit in (0.01, 1e9):
        run, stats = updated(small(n=5, m=5, max_grad_norm=limit), REWARDS)
        gradients = [weight.grad for weight in run.model.parameters()]
        norms[limit] = torch.nn.utils.get_total_norm(gradients).item(), stats["grad_norm"]
    assert norms[0.01] == (pytest.approx(0.01, rel=1e-3), norms[1e9][1])
    assert norms[1e9][0] == pytest.approx(norms[1e9][1], rel=1e-5) and norms[1e9][1] > 0.1


@pytest.mark.parametrize("over", ["all", "signal"])
def test_no_signal_anywhere_makes_no_step(over):
    before = AutoModelForCausalLM.from_pretrained(tiny.TINY_POLICY).state_dict()
    run, stats = updated(small(n=4, m=4, average_over=over), [[0.0] * 4, [1.0] * 4])
    nothing = {"mean": None, "max": None}
    idle = {"loss": 0.0, "grad_norm": 0.0, "skipped": True, "entropy": None}
    assert stats == idle | {"logprob_gap": nothing}
    assert_equal(run.model.state_dict(), before)


def test_a_sampler_of_another_policy_is_measured_and_corrected():
    """Rollouts whose reported log-probs are 0.1 too low: every weight is exp(0.1)."""
    stats = {}
    for cap in (0.0, 2.0):
        run = Run(small(importance_cap=cap))
        rollouts, advantages = fixed_batch(run, [[1.0, 0.0, 0.5, 0.2]] * 2)
        rollouts.log_probs -= 0.1
        stats[cap] = train.update(run.learner, rollouts, advantages, run.max_new_tokens)
        assert stats[cap]["logprob_gap"]["mean"] == pytest.approx(0.1, abs=1e-4)
        assert stats[cap]["logprob_gap"]["max"] == pytest.approx(0.1, abs=1e-3)
    ratio = stats[2.0]["grad_norm"] / stats[0.0]["grad_norm"]
    assert ratio == pytest.approx(math.exp(0.1), rel=1e-3)


def test_old_log_probs_are_those_before_the_first_of_several_steps(monkeypatch):
    ratios = []

    def recording(current, old, *arguments, **options):
        ratios.append((current - old).detach().abs().max().item())
        return grpo_loss(current, old, *arguments, **options)

    monkeypatch.setattr(train, "grpo_loss", recording)
    config = small(n=5, m=5, epochs=2, micro_batch=2, lr=1e-2, warmup_steps=0)
    updated(config, [[1.0, 0.0, 0.5, 0.0, 1.2], [0.0, 1.0, 0.0, 0.0, 0.0]])
    half = len(ratios) // 2
    assert half > 1
    assert max(ratios[:half]) < 1e-6  # the first epoch: ratio 1 in every micro-batch
    assert min(ratios[half:]) > 1e-4


# ---- gradients that are not finite ---------------------------------------------------------------


@pytest.fixture
def broken_steps(monkeypatch) -> set[int]:
    """Steps whose gradients are not finite, to be filled in."""
    steps, now, real_step = set(), {}, train.train_step

    def counting(run, step: int):
        now["step"] = step
        return real_step(run, step)

    def broken(current, *arguments, **options):
        loss = grpo_loss(current, *arguments, **options)
        return loss * (math.nan if now["step"] in steps else 1.0)

    monkeypatch.setattr(train, "train_step", counting)
    monkeypatch.setattr(train, "grpo_loss", broken)
    return steps


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run(tmp_path, broken_steps, capsys):
    broken_steps |= {3, 4, 5}
    with pytest.raises(InputError, match=r"3 gradients in a row.* --model .*/run/model"):
        train.train(small(steps=20, save_every=2), tmp_path / "run")
    assert capsys.readouterr().err.count("the gradient is not finite") == 3
    rows = metrics(tmp_path / "run")
    assert [row["skipped"] for row in rows[3:]] == [1, 1, 1] and len(rows) == 6
    assert [row["grad_norm"] is None for row in rows[1:]] == [False, False, True, True, True]
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step_000002.pt"]
    # What is left to go on from is what the last good update left.
    good = load_checkpoint(tmp_path / "run" / "checkpoint")["model"]
    left = weights_of(tmp_path / "run")
    assert all(torch.equal(left[name], weight) for name, weight in good.items())


def test_single_gradients_that_are_not_finite_are_passed_over(tmp_path, broken_steps, capsys):
    """Not three in a row: the run goes on. They are counted, and a checkpoint may come late."""
    broken_steps |= {1, 2, 4, 6, 7}
    rows = train.train(small(steps=8, save_every=4), tmp_path / "run")
    assert [row["skipped"] for row in rows[1:]] == [1, 1, 0, 1, 0, 1, 1, 0]
    names = [path.name for path in checkpoints(tmp_path / "run" / "checkpoint")]
    assert names == ["step_000005.pt", "step_000008.pt"]
    printed = capsys.readouterr()
    assert "steps without an update, because the gradient was not finite: 5" in printed.out
    assert "step 4: the gradient is not finite" in printed.err


def test_a_kill_before_the_first_checkpoint_is_resumed(finished, tmp_path, monkeypatch):
    step_of = train.train_step

    def die(run, step):
        if step == 4:  # with three steps logged and nothing saved
            raise KeyboardInterrupt
        return step_of(run, step)

    out = tmp_path / "killed"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "train_step", die)
        train.train(small(save_every=100), out)
    assert not list((out / "checkpoint").glob("*")) and len(metrics(out)) == 4
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert without_times(out) == without_times(finished)
    assert_equal(weights_of(out), weights_of(finished))
