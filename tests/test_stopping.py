"""Stopped or killed at any moment and gone on with, a run is to the bit the one that was not."""

import os
import random
import signal
import subprocess
import time

import pytest
import torch
from conftest import (
    assert_equal,
    assert_same_run,
    command,
    flags,
    has_logged,
    metrics,
    small,
    wait_for,
    weights_of,
    without_times,
)

import train
from support import evaluation
from support.files import checkpoints, load_checkpoint


def resume(out, *arguments: object) -> int:
    return train.main(["--resume", "--out", str(out), *map(str, arguments)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rule": "random"},
        {"epochs": 2, "beta": 0.1},
        {"lora_rank": 4, "beta": 0.05, "gradient_checkpointing": True, "lr": 1e-2},
    ],
    ids=["plain", "random", "kl", "adapter"],
)
def test_resume_continues_exactly(finished, tmp_path, changes):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    if changes:
        train.train(small(**changes), whole)
    train.train(small(**changes | {"steps": 3}), parts)
    assert resume(parts, "--steps", 6) == 0
    if "lora_rank" in changes:
        assert without_times(parts) == without_times(whole)
        states = [load_checkpoint(out / "checkpoint")["model"] for out in (parts, whole)]
        assert_equal(*states)
    else:
        assert_same_run(parts, whole if changes else finished)


def test_killed_run_loses_at_most_the_steps_since_the_checkpoint(tmp_path, in_background):
    """kill -9 in the middle, also of a line: the resumed run equals the uninterrupted one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.train(small(steps=40), whole)
    process = in_background(*flags(steps=40), "--out", killed)
    wait_for(lambda: len(checkpoints(killed / "checkpoint")) >= 2, process)
    process.kill()
    process.join()
    saved, done = load_checkpoint(killed / "checkpoint")["step"], metrics(killed)[-1]["step"]
    assert 4 <= saved <= done <= saved + 3 and done < 40
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 39, "tim')
    assert resume(killed) == 0
    assert_same_run(killed, whole)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path, in_background):
    """kill -9 while it starts, goes back, trains, evaluates or saves: the same run in the end."""
    settings = dict(steps=100, eval_every=10, save_every=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.train(small(**settings), whole)
    rng = random.Random(0)
    for kill in range(20):
        saved = checkpoints(killed / "checkpoint")
        begun = (killed / "config.json").exists()
        process = in_background(*(["--resume"] if begun else flags(**settings)), "--out", killed)
        if kill % 2:  # it has come at least to another checkpoint
            wait_for(lambda old=saved: checkpoints(killed / "checkpoint")[-1:] != old[-1:], process)
            time.sleep(rng.uniform(0, 0.1))
        else:  # wherever it is by now
            time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.join()
    assert resume(killed) == 0
    assert_same_run(killed, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_says_where_and_can_be_resumed(tmp_path, number):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.train(small(steps=60), whole)
    process = subprocess.Popen(
        command(*flags(steps=60), "--out", stopped), stdout=subprocess.PIPE, text=True
    )
    wait_for(has_logged(stopped, 4), process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f"go on with: python train.py --resume --out {stopped}" in output
    done = len(metrics(stopped)) - 1
    assert done < 60
    assert (stopped / "checkpoint" / f"step_{done:06}.pt").exists()
    assert (stopped / "model" / "model.safetensors").exists()
    assert resume(stopped) == 0
    assert_same_run(stopped, whole)


def test_second_ctrl_c_leaves_at_once(tmp_path):
    process = subprocess.Popen(
        command(*flags(steps=10**6, n=64, prompts_per_step=64), "--out", tmp_path / "run"),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(has_logged(tmp_path / "run", 2), process)
    process.send_signal(signal.SIGINT)
    while "once more to stop" not in (line := process.stderr.readline()):
        assert line or process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped at once" in error and "Traceback" not in error
    assert not (tmp_path / "run" / "model").exists()  # that would have been the slow way out


def test_stopped_in_the_first_evaluation_and_resumed_exactly(finished, tmp_path, monkeypatch):
    stopped, real = tmp_path / "stopped", evaluation.evaluate

    def interrupted(run, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(run, data)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(evaluation, "evaluate", interrupted)
        train.train(small(), stopped)
    assert [row["step"] for row in metrics(stopped)] == [0]
    assert resume(stopped) == 0
    assert_same_run(stopped, finished)


def test_sigterm_while_the_end_is_written_waits_for_it(tmp_path, monkeypatch, capsys):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(evaluation, "draw_curves", terminate)
    before = signal.getsignal(signal.SIGTERM)
    train.train(small(steps=1), tmp_path / "run")
    assert "saving" in capsys.readouterr().err
    assert (tmp_path / "run" / "model").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_damaged_checkpoint_is_said_and_the_one_before_it_used(finished, tmp_path, capsys):
    train.train(small(steps=4), tmp_path / "run")
    newest = checkpoints(tmp_path / "run" / "checkpoint")[-1]
    assert newest.name == "step_000004.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    assert resume(tmp_path / "run", "--steps", 6) == 0
    assert "step_000004.pt is damaged" in capsys.readouterr().err
    assert_same_run(tmp_path / "run", finished)


def test_checkpoints_before_the_first_update_change_nothing(tmp_path, monkeypatch):
    """Asked for its state too early, torch's optimizer would make a step, and count it."""
    real = train.update

    def dull(learner, kept, advantages, max_new_tokens):
        dull.step += 1
        return real(learner, kept, advantages * (dull.step > 2), max_new_tokens)

    monkeypatch.setattr(train, "update", dull)
    often, once = tmp_path / "often", tmp_path / "once"
    for out, save_every in ((once, 100), (often, 1)):
        dull.step = 0
        rows = train.train(small(save_every=save_every), out)
        assert [row["skipped"] for row in rows[1:]] == [1, 1, 0, 0, 0, 0]
    assert_equal(weights_of(often), weights_of(once))
    moments = load_checkpoint(often / "checkpoint")["optimizer"]["state"].values()
    assert {float(one["step"]) for one in moments} == {4.0}


def test_resumed_run_may_change_what_does_not_change_the_gradient(finished, tmp_path):
    train.train(small(steps=3), tmp_path / "run")
    assert resume(tmp_path / "run", "--steps", 6, "--micro-batch", 3, "--save-every", 1) == 0
    for name, weight in weights_of(finished).items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[name], weight, rtol=0, atol=1e-5)


def test_a_finished_run_has_nothing_left_to_do(tmp_path, capsys):
    train.train(small(steps=2), tmp_path / "run")
    before = metrics(tmp_path / "run")
    assert resume(tmp_path / "run") == 0
    assert "there is nothing left to do" in capsys.readouterr().out
    assert metrics(tmp_path / "run") == before
