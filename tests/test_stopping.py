"""Stopped or killed at any moment and gone on with, a run is to the bit the one that was not."""

import os
import random
import signal
import sys
import time

import pytest
import torch
from conftest import (
    assert_equal,
    assert_same_run,
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
from support.processes import SIGNALS, Processes, StopSignal
from support.storage import checkpoints, load_checkpoint


def resume(out, *arguments: object) -> int:
    return train.main(["--resume", "--out", str(out), *map(str, arguments)])


# ---- gone on with --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "random"},
        {"epochs": 2, "beta": 0.1},
        {"lora_rank": 4, "beta": 0.05, "gradient_checkpointing": True, "lr": 1e-2},
    ],
    ids=["random", "kl", "adapter"],
)
def test_resume_continues_exactly(tmp_path, changes):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(small(**changes), whole)
    train.train(small(**changes | {"steps": 3}), parts)
    assert resume(parts, "--steps", 6) == 0
    assert without_times(parts) == without_times(whole)
    assert_equal(*(load_checkpoint(out / "checkpoint")["model"] for out in (parts, whole)))


def test_ten_kills_at_random_moments_change_nothing(tmp_path, in_background):
    """kill -9 while it starts, goes back, trains, evaluates or saves: the same run in the end."""
    settings = dict(steps=60, eval_every=10, save_every=2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.train(small(**settings), whole)
    rng = random.Random(0)
    for kill in range(10):
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


def test_a_resumed_run_may_change_what_does_not_change_the_gradient(finished, tmp_path, capsys):
    train.train(small(steps=3), tmp_path / "run")
    before = metrics(tmp_path / "run")
    assert resume(tmp_path / "run") == 0  # the run is over
    assert "there is nothing left to do" in capsys.readouterr().out
    assert metrics(tmp_path / "run") == before
    assert resume(tmp_path / "run", "--steps", 6, "--micro-batch", 3, "--save-every", 1) == 0
    left, expected = weights_of(tmp_path / "run"), weights_of(finished)
    torch.testing.assert_close(left, expected, rtol=0, atol=1e-5)


# ---- stopped by a signal -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_run_can_be_resumed(tmp_path, number, in_background):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.train(small(steps=30), whole)
    process = in_background(*flags(steps=30), "--out", stopped)
    wait_for(has_logged(stopped, 4), process)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    done = len(metrics(stopped)) - 1
    assert done < 30 and load_checkpoint(stopped / "checkpoint")["step"] == done
    assert (stopped / "model" / "model.safetensors").exists()
    assert resume(stopped) == 0
    assert_same_run(stopped, whole)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_signal_asks_and_only_a_second_ctrl_c_leaves_at_once(number, capsys):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignal(Processes()) as stop:
        assert not stop.asked() and not stop.stopped
        os.kill(os.getpid(), number)
        assert stop.asked() and stop.stopped
        assert stop.exit_code == 128 + number
        assert "finishing this step" in capsys.readouterr().err
        for other in SIGNALS[1:]:  # a closed terminal sends SIGHUP twice
            os.kill(os.getpid(), other)
        assert stop.exit_code == 128 + number
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before


def test_signals_that_are_ignored_stay_so():
    """As `nohup` ignores SIGHUP, so that a closed terminal does not even stop the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal(Processes()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_ctrl_c_leaves_at_once(tmp_path, monkeypatch):
    def twice(run, step: int):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "train_step", twice)
    assert train.main(flags(out=tmp_path / "run")) == 130
    assert not (tmp_path / "run" / "model").exists()  # that would have been the slow way out


def test_stopped_in_the_first_evaluation_and_resumed_exactly(finished, tmp_path, monkeypatch):
    stopped, real = tmp_path / "stopped", evaluation.evaluate

    def interrupted(run):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(evaluation, "evaluate", interrupted)
        train.train(small(), stopped)
    assert [row["step"] for row in metrics(stopped)] == [0]
    assert len(metrics(stopped, "evaluation.jsonl")) == 16
    assert resume(stopped) == 0
    assert_same_run(stopped, finished)


def test_sigterm_while_the_end_is_written_waits_for_it(tmp_path, monkeypatch, capsys):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(evaluation, "draw_curves", terminate)
    train.train(small(steps=1), tmp_path / "run")
    assert "saving" in capsys.readouterr().err
    assert (tmp_path / "run" / "model").exists()


def test_a_run_goes_on_when_nobody_reads_its_output(finished, tmp_path, monkeypatch):
    """As in `train.py | head`, when head has gone."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread)
        patch.setattr(sys, "stderr", unread)
        assert train.main(flags(out=tmp_path / "run")) == 0
        assert sys.stdout is unread
        unread.flush()  # this, too, is no error any more
    assert_same_run(tmp_path / "run", finished)
