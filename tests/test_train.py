"""The loop as users meet it: command line, outputs, stopping and going on, the update."""

import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import wait_for, without_times
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import train
from grpo import group_advantages, grpo_loss, token_log_probs
from rollouts import Rollouts
from support import tiny
from train import Config, InputError, Run

ROOT = Path(__file__).parents[1]
SMALL = dict(n=8, m=4, prompts_per_step=2, steps=6, eval_problems=16, eval_every=3, save_every=2)


def small(**changes) -> Config:
    """A run of a second or two."""
    return Config(**SMALL | changes)


def flags(**changes) -> list[str]:
    """The same settings as command line flags."""
    return [part for k, v in (SMALL | changes).items() for part in (train.flag(k), str(v))]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-u", str(ROOT / "train.py"), *map(str, arguments)]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "model").state_dict()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """One uninterrupted small run that several tests look at."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train.train(small(), out)
    return out


# ---- what a run writes ---------------------------------------------------------------------------


def test_outputs_are_complete_and_readable(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 3, 6]
    for row in rows[1:]:
        assert set(row["seconds"]) == {"generate", "score", "select", "update", "sync"}
        for name in (
            "time",
            "reward",
            "reward_kept",
            "reward_std",
            "accuracy",
            "loss",
            "grad_norm",
        ):
            assert math.isfinite(row[name]), name
        assert 0 <= row["groups_without_signal"] <= 2
        assert 0 < row["completion_length"] <= 26
    assert rows[-1]["time"] == pytest.approx(sum(sum(r["seconds"].values()) for r in rows[1:]))
    assert json.loads((finished / "config.json").read_text())["n"] == 8
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_rollouts_file_shows_kept_and_dropped_with_reward_parts(finished):
    rows = [json.loads(line) for line in (finished / "rollouts.jsonl").read_text().splitlines()]
    assert {row["kept"] for row in rows} == {True, False}
    for row in rows:
        total = row["accuracy"] + 0.1 * row["format"] + 0.1 * row["tag_count"]
        assert row["total"] == pytest.approx(total)
        assert "<eos>" not in row["completion"]
        assert row["prompt"].endswith("=")


def test_saved_model_is_an_ordinary_folder(finished):
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    inputs = tokenizer("12+34=", return_tensors="pt")
    assert model(**inputs).logits.shape == (1, 6, 19)
    shipped = AutoModelForCausalLM.from_pretrained(tiny.TINY_POLICY).state_dict()
    trained = model.state_dict()
    assert any((trained[name] != shipped[name]).any() for name in shipped)


def test_learning_is_real(tmp_path):
    """Thirty steps lift held-out accuracy by far more than its standard error of 0.017."""
    rows = train.train(Config(steps=30, eval_every=0), tmp_path / "run")
    before, after = rows[0]["eval_accuracy"], rows[-1]["eval_accuracy"]
    assert before < 0.42
    assert after > 0.6


def test_logged_reward_is_of_all_rollouts_not_of_the_kept(tmp_path, monkeypatch):
    """Rewards 0 0 0 0 0 0 0 1, m = 4: the policy's mean is 1/8, the batch's 1/4."""

    def one_in_eight(completions, answers, weights=None, opens_think=False):
        values = [float(i % 8 == 7) for i in range(len(completions))]
        return dict.fromkeys(("accuracy", "format", "tag_count", "total"), values)

    monkeypatch.setattr(train, "score", one_in_eight)
    row = train.train(small(steps=1), tmp_path / "run")[1]
    assert row["reward"] == 0.125
    assert row["reward_kept"] == 0.25
    assert row["groups_without_signal"] == 0


# ---- reproducible, interruptible -----------------------------------------------------------------


def test_same_seed_same_run_other_seed_other_run(finished, tmp_path):
    train.train(small(), tmp_path / "again")
    assert without_times(tmp_path / "again") == without_times(finished)
    train.train(small(seed=1), tmp_path / "other")
    assert without_times(tmp_path / "other") != without_times(finished)


@pytest.mark.parametrize(
    "changes", [{}, {"rule": "random"}, {"epochs": 2, "beta": 0.1}], ids=["plain", "random", "kl"]
)
def test_resume_continues_exactly(tmp_path, changes):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(small(**changes), whole)
    train.train(small(**changes | {"steps": 3}), parts)
    assert train.main(["--resume", "--out", str(parts), "--steps", "6"]) == 0
    assert without_times(parts) == without_times(whole)
    assert (parts / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(parts)[name], weight), name


def test_killed_run_loses_at_most_the_steps_since_the_checkpoint(tmp_path):
    """kill -9 in the middle, also of a line: the resumed run equals the uninterrupted one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.train(small(steps=40), whole)
    process = subprocess.Popen(command(*flags(steps=40), "--out", killed))
    wait_for(lambda: len(list((killed / "checkpoint").glob("step_*.pt"))) >= 2, process)
    process.kill()
    process.wait()
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 39, "tim')
    assert train.main(["--resume", "--out", str(killed)]) == 0
    assert without_times(killed) == without_times(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_says_where_and_can_be_resumed(tmp_path, number):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.train(small(steps=40), whole)
    process = subprocess.Popen(
        command(*flags(steps=40), "--out", stopped), stdout=subprocess.PIPE, text=True
    )
    metrics = stopped / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"--resume --out {stopped}" in output
    done = len(without_times(stopped)) - 1
    assert done < 40
    assert (stopped / "checkpoint" / f"step_{done:06}.pt").exists()
    assert (stopped / "model" / "model.safetensors").exists()
    assert train.main(["--resume", "--out", str(stopped)]) == 0
    assert without_times(stopped) == without_times(whole)


def test_twenty_kills_at_random_moments_change_nothing(tmp_path):
    """kill -9 while it starts, trains, evaluates, saves or finishes: the same run in the end."""
    settings = dict(steps=300, eval_every=20, save_every=3)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train.train(small(**settings), whole)
    rng = random.Random(0)
    start = [*flags(**settings), "--out", killed]
    for _ in range(20):
        begun = (killed / "metrics.jsonl").exists()
        process = subprocess.Popen(
            command(*(["--resume", "--out", killed] if begun else start)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # From the moment on at which it has read what is there, or made the folder.
        for line in process.stdout:
            if line.startswith(("resuming", "writing to")):
                break
        else:
            pytest.fail("it did not start")
        time.sleep(rng.uniform(0, 0.7))
        process.kill()
        process.communicate()
    assert list((killed / "checkpoint").glob("step_*.pt"))  # else nothing was gone on with
    assert train.main(["--resume", "--out", str(killed)]) == 0
    assert without_times(killed) == without_times(whole)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(killed)[name], weight), name


def test_second_ctrl_c_leaves_at_once(tmp_path):
    process = subprocess.Popen(
        command(*flags(steps=10**6, n=64, prompts_per_step=64), "--out", tmp_path / "run"),
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
    process.send_signal(signal.SIGINT)
    while "once more to stop" not in (line := process.stderr.readline()):
        assert line or process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped at once" in error and "Traceback" not in error
    assert not (tmp_path / "run" / "model").exists()  # that would have been the slow way out


def test_damaged_checkpoint_is_said_and_the_one_before_it_used(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(small(), whole)
    train.train(small(steps=4), parts)
    newest = sorted((parts / "checkpoint").iterdir())[-1]
    assert newest.name == "step_000004.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    assert train.main(["--resume", "--out", str(parts), "--steps", "6"]) == 0
    assert "step_000004.pt is damaged" in capsys.readouterr().err
    assert without_times(parts) == without_times(whole)


def test_resume_refuses_other_settings(finished, capsys):
    assert train.main(["--resume", "--out", str(finished), "--lr", "0.1"]) == 2
    assert "--lr 0.1 differs" in capsys.readouterr().err


def test_resumed_run_may_change_what_does_not_change_the_gradient(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(small(), whole)
    train.train(small(steps=3), parts)
    smaller = ["--steps", "6", "--micro-batch", "3", "--save-every", "1"]
    assert train.main(["--resume", "--out", str(parts), *smaller]) == 0
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weights_of(parts)[name], weight, rtol=0, atol=1e-5)


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


def test_end_of_a_run_leaves_a_process_group_that_it_did_not_make(tmp_path):
    """vLLM makes one even for a single process, and its engine lives on."""
    # A process of its own: this one may already hold such a group, from an engine's tests.
    code = (
        "import torch.distributed, train\n"
        f"store = 'file://{tmp_path / 'store'}'\n"
        "torch.distributed.init_process_group('gloo', init_method=store, rank=0, world_size=1)\n"
        f"train.train(train.Config(**{SMALL | {'steps': 1}}), '{tmp_path / 'run'}')\n"
        "assert torch.distributed.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "model").exists()


def test_metrics_go_to_a_tracker_too(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    rows = train.train(small(tracker="tensorboard"), tmp_path / "run")
    log = events.EventAccumulator(str(tmp_path / "run" / "pods")).Reload()
    assert [event.step for event in log.Scalars("reward")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in log.Scalars("eval_accuracy")] == [0, 3, 6]
    for name, value in train.flat(rows[-1]).items():
        assert log.Scalars(name)[-1].value == pytest.approx(value, rel=1e-5), name


def test_tracker_that_is_not_installed_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert train.main(flags(tracker="wandb", out=tmp_path / "run")) == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--m 65", ["--m 65", "--n 64"]),
        ("--m 1", ["--m 1"]),
        ("--n 0", ["--m 16", "--n 0"]),
        ("--n 2.5", ["2.5"]),
        ("--rule best", ["best", "max_variance"]),
        ("--task nonsense", ["nonsense", "gsm8k"]),
        ("--task missing.jsonl", ["missing.jsonl"]),
        ("--model ./missing", ["./missing", "no such folder"]),
        ("--model missing", ["missing", "no such folder"]),
        ("--task gsm8k --data missing", ["missing"]),
        ("--steps 0", ["--steps 0"]),
        ("--steps -3", ["--steps -3"]),
        ("--minutes 0", ["--minutes 0"]),
        ("--lr nan", ["--lr nan"]),
        ("--lr inf", ["--lr inf"]),
        ("--temperature 0", ["--temperature 0"]),
        ("--beta -1", ["--beta -1"]),
        ("--beta inf", ["--beta inf"]),
        ("--weight-decay inf", ["--weight-decay inf"]),
        ("--micro-batch 0", ["--micro-batch 0"]),
        ("--max-new-tokens 500", ["--max-new-tokens 500", "32 positions"]),
        ("--max-prompt-tokens 3", ["3"]),
        ("--eval-task gsm8k=A gsm8k=B", ["gsm8k=A gsm8k=B", "twice"]),
        ("--reward-weights 1 2", ["--reward-weights"]),
        ("--reward-weights 0 0 0", ["--reward-weights"]),
        ("--loss-type ppo", ["ppo", "dapo"]),
        ("--sampler none", ["none"]),
        ("--nonsense", ["--nonsense"]),
        ("--resume", ["--resume", "--out"]),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    where = [] if arguments == "--resume" else ["--out", str(tmp_path / "run")]
    try:
        code = train.main(arguments.split() + where)
    except SystemExit as exit:  # argparse leaves by itself
        code = exit.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_file_that_is_not_jsonl_names_the_line(tmp_path, capsys):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "12+34=", "answer": "46"}\nnot json\n')
    assert train.main(["--task", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "2" in capsys.readouterr().err


def test_folder_of_another_run_is_not_overwritten(finished, capsys):
    before = (finished / "metrics.jsonl").read_text()
    assert train.main(flags(out=finished)) == 2
    assert "--resume" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


def test_what_cannot_be_resumed_says_so_and_loses_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    train.train(small(steps=4), out)
    metrics, settings = (out / "metrics.jsonl").read_text(), (out / "config.json").read_text()
    assert train.main(["--resume", "--eval-only", "--out", str(out)]) == 2
    assert "not --resume" in capsys.readouterr().err
    for broken, words in (
        ("[]", "no settings"),
        ('{"n"', "no run"),
        ('{"n": "8"}', "--n '8': must be int"),
        ('{"n": 8.0}', "--n 8.0: must be int"),
        ('{"dtype": null}', "--dtype None: must be str"),
        ('{"merge": 1}', "--merge 1: must be bool"),
        ('{"reward_weights": [1, "a", 0]}', "must be float"),
    ):
        (out / "config.json").write_text(broken)
        assert train.main(["--resume", "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    (out / "config.json").write_text(settings)
    for path in (out / "checkpoint").iterdir():
        path.unlink()
    for more in ((), ("--save-every", "1000")):
        assert train.main(["--resume", "--out", str(out), "--steps", "6", *more]) == 2
        assert "no checkpoint that can be read" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_text() == metrics
    assert json.loads((out / "config.json").read_text())["steps"] == 4  # as before


def test_a_damaged_line_in_the_log_loses_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    train.train(small(steps=4), out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    for damage in ('{"broken', "5", "{}"):
        damaged = "\n".join([*lines[:2], damage, *lines[3:]]) + "\n"
        (out / "metrics.jsonl").write_text(damaged)
        assert train.main(["--resume", "--out", str(out), "--steps", "6"]) == 2
        assert "metrics.jsonl, line 3 is damaged" in capsys.readouterr().err
        assert (out / "metrics.jsonl").read_text() == damaged
    (out / "metrics.jsonl").write_bytes("\n".join([*lines, '{"step": 5, "x']).encode() + b"\xe2")
    assert train.main(["--resume", "--out", str(out), "--steps", "6"]) == 0
    assert [row["step"] for row in without_times(out)] == [0, 1, 2, 3, 4, 5, 6]


def test_a_folder_has_one_writer(tmp_path, capsys):
    """The second one is refused for as long as the first one lives, and not a moment longer."""
    out = tmp_path / "run"
    process = subprocess.Popen(command(*flags(steps=10**6), "--out", out))
    wait_for(lambda: list(out.glob("checkpoint/*.pt")), process)
    before = (out / "config.json").read_text()
    for arguments in (["--resume", "--out", str(out)], flags(out=out)):
        assert train.main(arguments) == 2
        assert str(out) in capsys.readouterr().err
    assert (out / "config.json").read_text() == before
    process.kill()
    process.wait()
    done = len(without_times(out))
    assert train.main(["--resume", "--out", str(out), "--steps", str(done + 2)]) == 0


def test_a_disk_that_is_full_when_the_model_is_written_is_one_line(tmp_path, monkeypatch, capsys):
    def full(self, folder, **_):
        Path(folder).mkdir()
        raise RuntimeError("I/O error: No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    assert train.main(flags(out=tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert "cannot write" in error and "No space left" in error
    assert not (tmp_path / "run" / "model.tmp").exists()
    assert list((tmp_path / "run" / "checkpoint").iterdir())


def test_broken_model_folders_are_one_line(tmp_path, capsys):
    for name, content in (
        ("config.json", "{}"),
        ("model.safetensors", "x"),
        ("tokenizer.json", "{}"),
    ):
        folder = tmp_path / name
        shutil.copytree(tiny.TINY_POLICY, folder)
        (folder / name).write_text(content)
        assert train.main(["--model", str(folder), "--out", str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_choices_are_checked_from_python_too():
    with pytest.raises(InputError, match="--rule best"):
        Config(rule="best")
    assert Config(eval_task="arithmetic").eval_task == ("arithmetic",)


def test_a_disk_that_is_full_is_one_line_and_leaves_no_half_checkpoint(
    tmp_path, monkeypatch, capsys
):
    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert train.main(flags(out=tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert "cannot write" in error and "No space left" in error
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


def test_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    for out in ("/proc/run", tmp_path / "file" / "run"):
        (tmp_path / "file").touch()
        assert train.main(flags(out=out)) in (1, 2)
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(out) in error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_names_the_flags_that_help(tmp_path, monkeypatch, capsys, error):
    def full(*_):
        raise error

    monkeypatch.setattr(train, "update", full)
    assert train.main(flags(out=tmp_path / "run")) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "allocate" in message and "--micro-batch" in message and "--m," in message
    monkeypatch.setattr(train, "update", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):  # another error is not called out of memory
        train.main(flags(out=tmp_path / "other"))


def test_resume_of_nothing_is_an_error(tmp_path, capsys):
    assert train.main(["--resume", "--out", str(tmp_path / "none")]) == 2
    assert "no run" in capsys.readouterr().err


def test_prompts_the_tokenizer_cannot_read_are_an_error(tmp_path, capsys):
    """The tiny policy knows no letters; training on <unknown> would only waste the night."""
    path = tmp_path / "words.jsonl"
    rows = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(["--task", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_every_setting_is_a_flag_with_a_meaning(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert train.flag(field.name) in text
        assert field.metadata["help"]


def test_printed_settings_are_flags_that_give_the_same_settings():
    for given in ([], ["--merge", "--lora-rank", "4"], ["--eval-task", "math500", "gsm8k=dir"]):
        config, _ = train.parse(given)
        printed = train.as_flags(config)
        assert max(map(len, printed.splitlines())) <= 102
        again, _ = train.parse(printed.split())
        assert again == config


def test_presets_are_printed_in_full_and_overridden_flag_by_flag(capsys):
    given = ["--preset", "gsm8k-llama3.2-3b-l40s", "--dry-run"]
    assert train.main([*given, "--m", "8", "--lr", "1e-6"]) == 0
    output = capsys.readouterr().out
    settings, _, plan = output.partition("plan for")
    assert "from --preset gsm8k-llama3.2-3b-l40s" in settings
    for part in (
        "--n 64",
        "--m 8",
        "--lr 1e-06",
        "--beta 0.04",
        "meta-llama/Llama-3.2-3B-Instruct",
    ):
        assert part in settings
    assert "L40S" in plan and "n = m = 64" in plan
    defaults, _ = train.parse([])
    assert train.parse(["--preset", "cpu"])[0] == defaults == Config()


def test_a_dry_run_leaves_nothing_and_says_what_it_cannot_know(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--dry-run"]) == 0
    assert "281,600 parameters" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert train.main(["--dry-run", "--max-new-tokens", "30000"]) == 2
    assert "--max-new-tokens 30000" in capsys.readouterr().err
    assert train.main(["--dry-run", "--model", "nobody/nothing"]) == 2
    assert "nobody/nothing" in capsys.readouterr().err


def test_a_resumed_run_compares_the_preset_with_its_own_settings(finished, capsys):
    assert train.main(["--resume", "--out", str(finished), "--preset", "math-qwen2.5-3b-l40s"]) == 2
    assert "differs from the run's" in capsys.readouterr().err


def test_flags_reach_the_configuration():
    line = "--n 8 --m 4 --minutes 2 --reward-weights 1 1 1 --eval-task a b --lr 1e-6"
    config, _ = train.parse(line.split())
    assert (config.n, config.m, config.minutes, config.steps) == (8, 4, 2.0, None)
    assert config.reward_weights == (1.0, 1.0, 1.0)
    assert config.eval_task == ("a", "b")
    assert config.lr == 1e-6


# ---- data order ----------------------------------------------------------------------------------


def test_every_problem_once_in_each_pass_and_passes_differ(tmp_path):
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{i}+11=", "answer": str(i + 11)} for i in range(10, 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(small(task=str(path), prompts_per_step=3), tmp_path / "run")
    count = len(run.train_data.problems)
    steps = itertools.count(1)
    order = [p.prompt for _ in range(count) for p in run.prompts(next(steps))[0]]  # three passes
    passes = [order[i * count : (i + 1) * count] for i in range(3)]
    assert len(set(passes[0])) == count
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]
    assert run.prompts(7) == run.prompts(7)


# ---- the update ----------------------------------------------------------------------------------


def fixed_batch(run: Run, rewards: list[list[float]]) -> tuple[Rollouts, torch.Tensor]:
    """Rollouts of two prompts with rewards we choose, and their advantages."""
    _, prompt_ids = run.prompts(1)
    m = len(rewards[0])
    rollouts = run.sampler.generate(prompt_ids, m, run.max_new_tokens, 1.0, seed=0)
    return rollouts, group_advantages(torch.tensor(rewards))


def step_and_read(config: Config, out: Path, rewards: list[list[float]]) -> tuple[dict, dict]:
    """Weights after one update, and what it reported."""
    run = Run(config, out)
    stats = train.update(run, *fixed_batch(run, rewards))
    return {k: v.clone() for k, v in run.model.state_dict().items()}, stats


REWARDS = [[1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.2, 0.2, 0.2, 0.2]]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gradient_is_that_of_all_kept_rollouts_whatever_the_micro_batch(tmp_path, loss_type):
    """Against one plain pass over all rows, the group without signal computed and counted."""
    config = small(n=5, m=5, loss_type=loss_type, max_grad_norm=1e9)
    run = Run(config, tmp_path / "plain")
    kept, advantages = fixed_batch(run, REWARDS)
    ids, attention = kept.sequences()
    current = token_log_probs(run.model, ids, attention, kept.mask.shape[-1], 1.0)
    grpo_loss(
        current,
        current.detach(),
        advantages.flatten(),
        kept.mask.flatten(0, 1),
        loss_type=loss_type,
        max_completion_length=run.max_new_tokens,
    ).backward()
    expected = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    for micro_batch in (1, 2, 3, 64):
        run.config = dataclasses.replace(config, micro_batch=micro_batch)
        run.optimizer.step = lambda: None  # look at the gradient only
        train.update(run, kept, advantages)
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_no_signal_anywhere_makes_no_step_and_the_run_goes_on(tmp_path, monkeypatch):
    before = AutoModelForCausalLM.from_pretrained(tiny.TINY_POLICY).state_dict()
    weights, stats = step_and_read(small(n=4, m=4), tmp_path / "a", [[0.0] * 4, [1.0] * 4])
    nothing = {"mean": None, "max": None}
    assert stats == {"loss": 0.0, "grad_norm": 0.0, "skipped": 1, "logprob_gap": nothing}
    assert all(torch.equal(weights[name], before[name]) for name in before)

    def all_equal(completions, answers, weights=None, opens_think=False):
        values = [1.2] * len(completions)
        return dict.fromkeys(("accuracy", "format", "tag_count", "total"), values)

    monkeypatch.setattr(train, "score", all_equal)
    rows = train.train(small(steps=3), tmp_path / "b")
    assert [row["groups_without_signal"] for row in rows[1:]] == [2, 2, 2]


def test_kl_is_computed_for_groups_without_signal_too(tmp_path):
    """Their advantage is 0, but the pull towards the reference is not."""
    run = Run(small(n=4, m=4, beta=0.5), tmp_path / "run")
    with torch.no_grad():
        run.model.model.norm.weight.mul_(1.1)  # away from the reference
    stats = train.update(run, *fixed_batch(run, [[0.0] * 4, [1.0] * 4]))
    assert stats["loss"] > 0
    assert stats["grad_norm"] > 0


def test_old_log_probs_are_those_before_the_first_of_several_steps(tmp_path, monkeypatch):
    ratios = []

    def recording(current, old, *arguments, **options):
        ratios.append((current - old).detach().abs().max().item())
        return grpo_loss(current, old, *arguments, **options)

    monkeypatch.setattr(train, "grpo_loss", recording)
    config = small(n=5, m=5, epochs=2, micro_batch=2, lr=1e-2, warmup_steps=0)
    step_and_read(config, tmp_path / "run", [[1.0, 0.0, 0.5, 0.0, 1.2], [0.0, 1.0, 0.0, 0.0, 0.0]])
    half = len(ratios) // 2
    assert max(ratios[:half]) < 1e-6  # the first epoch: ratio 1 in every micro-batch
    assert min(ratios[half:]) > 1e-4


def test_learning_rate_warms_up_then_stays(tmp_path):
    run = Run(small(lr=1e-3, warmup_steps=4, steps=6), tmp_path / "run")
    rates = []
    for step in run.steps():
        train.train_step(run, step)
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def break_gradients(monkeypatch, steps: set[int]) -> None:
    """From here on the gradients of these steps are not finite."""
    step, real_step = {}, train.train_step

    def counting(run, number: int) -> None:
        step["now"] = number
        real_step(run, number)

    def broken(current, *arguments, **options):
        loss = grpo_loss(current, *arguments, **options)
        return loss * (math.nan if step["now"] in steps else 1.0)

    monkeypatch.setattr(train, "train_step", counting)
    monkeypatch.setattr(train, "grpo_loss", broken)


def strict_rows(out: Path) -> list[dict]:
    """metrics.jsonl as a reader sees it that knows JSON and nothing else."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_three_gradients_in_a_row_that_are_not_finite_end_the_run(tmp_path, monkeypatch, capsys):
    break_gradients(monkeypatch, {3, 4, 5})
    with pytest.raises(InputError, match=r"3 gradients in a row.* --model .*/run/model"):
        train.train(small(steps=20, save_every=2), tmp_path / "run")
    assert capsys.readouterr().err.count("not finite") == 3
    rows = strict_rows(tmp_path / "run")
    assert [row["skipped"] for row in rows[3:]] == [1, 1, 1] and len(rows) == 6
    assert [row["grad_norm"] is None for row in rows[1:]] == [False, False, True, True, True]
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step_000002.pt"]
    # What is left to go on from is what the last good update left.
    good = train.load_checkpoint(tmp_path / "run" / "checkpoint")["model"]
    for name, weight in weights_of(tmp_path / "run").items():
        assert name not in good or torch.equal(weight, good[name]), name


def test_single_gradients_that_are_not_finite_are_passed_over(tmp_path, monkeypatch, capsys):
    """Not three in a row: the run goes on. They are counted, and a checkpoint may come late."""
    break_gradients(monkeypatch, {1, 2, 4, 6, 7})
    saved = []
    save = train.save_checkpoint

    def remember(state: dict, folder: Path) -> None:
        saved.append(state["step"])
        save(state, folder)

    monkeypatch.setattr(train, "save_checkpoint", remember)
    rows = train.train(small(steps=8, save_every=4), tmp_path / "run")
    assert [row["skipped"] for row in rows[1:]] == [1, 1, 0, 1, 0, 1, 1, 0]
    assert saved == [5, 8]
    printed = capsys.readouterr()
    assert "steps without an update, because the gradient was not finite: 5" in printed.out
    assert "step 4: the gradient is not finite" in printed.err


def test_kill_after_a_checkpoint_that_failed_steps_put_off_is_resumed(tmp_path, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    break_gradients(monkeypatch, {2, 3})
    train.train(small(save_every=2), whole)
    with pytest.raises(KeyboardInterrupt):  # in step 4, with three steps logged and nothing saved
        real = train.Run.record

        def die(self, *arguments):
            if self.step == 4:
                raise KeyboardInterrupt
            real(self, *arguments)

        monkeypatch.setattr(train.Run, "record", die)
        train.train(small(save_every=2), killed)
    monkeypatch.setattr(train.Run, "record", real)
    assert not list((killed / "checkpoint").glob("*")) and len(strict_rows(killed)) == 4
    assert train.main(["--resume", "--out", str(killed)]) == 0
    assert strict_rows(killed)[-1]["eval"] == strict_rows(whole)[-1]["eval"]
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(killed)[name], weight), name


def test_sigterm_while_the_end_is_written_waits_for_it(tmp_path, monkeypatch, capsys):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train, "draw_curves", terminate)
    before = signal.getsignal(signal.SIGTERM)
    train.train(small(steps=1), tmp_path / "run")
    assert "saving" in capsys.readouterr().err
    assert (tmp_path / "run" / "model").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_rows_of_several_processes_are_one_row():
    """Counts add up, flags and maxima are the largest, the rest is averaged, None is no number."""
    rows = [
        {"groups": 4, "groups_without_signal": 1, "grader_failures": 0, "skipped": 0}
        | {"reward": 1.0, "logprob_gap": {"mean": 1e-6, "max": 3e-6}, "seconds": {"update": 2.0}},
        {"groups": 4, "groups_without_signal": 3, "grader_failures": 2, "skipped": 1}
        | {"reward": 0.5, "logprob_gap": {"mean": None, "max": None}, "seconds": {"update": 4.0}},
    ]
    assert train.combined(rows) == {
        **{"groups": 8, "groups_without_signal": 4, "grader_failures": 2, "skipped": 1},
        **{"reward": 0.75, "logprob_gap": {"mean": 1e-6, "max": 3e-6}, "seconds": {"update": 3.0}},
    }
    nothing = [row["logprob_gap"] for row in rows[1:]]
    assert train.combined(nothing) == {"mean": None, "max": None}


def test_a_checkpoint_before_the_first_update_changes_nothing(tmp_path, monkeypatch):
    """Asked for its state too early, torch's optimizer would make a step, and count it."""
    real = train.update
    dull = lambda run, kept, advantages: real(run, kept, advantages * (run.step > 2))  # noqa: E731
    monkeypatch.setattr(train, "update", dull)
    often, once = tmp_path / "often", tmp_path / "once"
    rows = train.train(small(save_every=100), once)
    assert [row["skipped"] for row in rows[1:]] == [1, 1, 0, 0, 0, 0]
    train.train(small(save_every=1), often)
    for name, weight in weights_of(once).items():
        assert torch.equal(weights_of(often)[name], weight), name
    moments = train.load_checkpoint(often / "checkpoint")["optimizer"]["state"].values()
    assert {float(one["step"]) for one in moments} == {4.0}


def test_stopped_in_the_first_evaluation_and_resumed_exactly(tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train.train(small(), whole)
    real = train.evaluate

    def interrupted(run, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(run, data)

    monkeypatch.setattr(train, "evaluate", interrupted)
    with pytest.raises(SystemExit):
        train.train(small(), stopped)
    monkeypatch.setattr(train, "evaluate", real)
    assert [row["step"] for row in without_times(stopped)] == [0]
    assert train.main(["--resume", "--out", str(stopped)]) == 0
    assert without_times(stopped) == without_times(whole)
    for name, weight in weights_of(whole).items():
        assert torch.equal(weights_of(stopped)[name], weight), name


def test_second_ctrl_c_while_a_checkpoint_is_written_is_no_disk_error(tmp_path, monkeypatch):
    def interrupted(state, file):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904, as torch's writer does

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.save_checkpoint({"step": 1}, tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").iterdir())


@pytest.mark.parametrize("settings", [{"lr": 1e30}, {"lr": 1e20, "lora_rank": 4}])
def test_weights_out_of_bounds_are_one_line(settings, tmp_path, capsys):
    assert train.main(flags(**settings, steps=30, out=tmp_path / "run")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train.py: ") and "lower --lr" in error


def test_a_task_file_may_have_an_equals_sign_in_its_name(tmp_path):
    path = tmp_path / "x=1.jsonl"
    rows = [{"question": f"{i}+11=", "answer": str(i + 11)} for i in range(10, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train.train(small(steps=1, task=str(path)), tmp_path / "run")
    assert without_times(tmp_path / "run")[0]["eval"].keys() == {str(path)}


def test_the_folder_of_a_run_is_not_its_model(finished, tmp_path, capsys):
    assert train.main(["--eval-only", "--model", str(finished), "--out", str(tmp_path)]) == 2
    assert f"did you mean {finished / 'model'}?" in capsys.readouterr().err


def test_checkpoints_are_ordered_by_number(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        train.save_checkpoint({"step": step}, tmp_path / "checkpoint")
    assert train.load_checkpoint(tmp_path / "checkpoint") == {"step": 1_000_000}
    assert len(list((tmp_path / "checkpoint").iterdir())) == 2


def test_a_run_of_a_version_with_fewer_settings_is_resumed(tmp_path):
    train.train(small(steps=2), tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    for name in ("save_every", "tracker", "clip"):
        del settings[name]
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    assert train.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert len(strict_rows(tmp_path / "run")) == 4


def test_dropout_is_off_while_training(tmp_path):
    """Otherwise the ratio is not 1 at the first step, and the KL not 0."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=19, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    )
    assert model.config.attn_pdrop == 0.1
    model.save_pretrained(tmp_path / "gpt2")
    tiny.make_tokenizer().save_pretrained(tmp_path / "gpt2")
    model, _ = train.load_model(str(tmp_path / "gpt2"))
    model.train()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(ids).logits, model(ids).logits)


# ---- evaluation ----------------------------------------------------------------------------------


def test_pass_at_k_equals_all_draws():
    for samples, correct in [(4, 0), (4, 1), (5, 2), (6, 6), (8, 3)]:
        results = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(results, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert train.pass_at_k(samples, correct, k) == pytest.approx(share)


def test_evaluation_numbers_are_those_of_a_loop_over_completions(tmp_path):
    run = Run(small(eval_problems=16, eval_samples=8), tmp_path / "run")
    result = train.evaluate(run, run.eval_data["arithmetic"])
    data = run.eval_data["arithmetic"]
    seed = train.derived_seed(0, "evaluation", 0)
    rollouts = run.sampler.generate(data.prompt_ids, 8, run.max_new_tokens, 1.0, seed)
    right = [
        [text.endswith(f"<answer>{problem.answer}</answer>") for text in texts]
        for problem, texts in zip(data.problems, rollouts.texts)
    ]
    means = [sum(row) / 8 for row in right]
    mean = sum(means) / 16
    spread = math.sqrt(sum((value - mean) ** 2 for value in means) / 15 / 16)
    assert result["accuracy"] == result["pass@1"] == pytest.approx(mean, abs=0.03)
    assert result["accuracy_se"] == pytest.approx(spread, rel=0.2)
    assert result["pass@8"] == pytest.approx(sum(map(any, right)) / 16, abs=0.06)
    assert result["pass@1"] <= result["pass@4"] <= result["pass@8"]
    lengths = rollouts.mask.sum(-1).double()
    assert result["completion_length"] == pytest.approx(lengths.mean().item())
    assert (result["problems"], result["samples"]) == (16, 8)


def test_eval_only_writes_the_numbers_as_json(finished, tmp_path, capsys):
    out = tmp_path / "evaluation"
    arguments = ["--eval-only", "--model", str(finished / "model"), "--task", "arithmetic"]
    arguments += ["--eval-problems", "16", "--out", str(out)]
    assert train.main(arguments) == 0
    written = json.loads((out / "eval.json").read_text())["arithmetic"]
    assert written == without_times(finished)[-1]["eval"]["arithmetic"]
    assert "accuracy_se" in capsys.readouterr().out


def test_train_on_one_task_evaluate_on_others(tmp_path):
    for name, first in (("a", 20), ("b", 30)):
        (tmp_path / name).mkdir()
        rows = [{"question": f"{i}+11=", "answer": str(i + 11)} for i in range(first, first + 10)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    tasks = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    rows = train.train(small(steps=1, eval_task=tasks), tmp_path / "run")
    assert set(rows[0]["eval"]) == set(tasks)
    assert rows[0]["eval_accuracy"] == rows[0]["eval"][tasks[0]]["accuracy"]


@pytest.mark.parametrize("script", ["train.py", "bench.py"])
def test_ctrl_c_during_the_imports_is_quiet(script):
    trace = [sys.executable, "-X", "importtime", ROOT / script, "--help"]
    process = subprocess.Popen(
        trace, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    for line in process.stderr:
        if "torch" in line:
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert not output and "Traceback" not in errors


def test_importing_train_reads_no_command_line_and_writes_nothing(tmp_path):
    code = "import sys; sys.argv.append('--nonsense'); import train; print(len(train.PHASES))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "5", result.stderr
    assert not list(tmp_path.iterdir())
