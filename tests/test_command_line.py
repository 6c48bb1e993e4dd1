"""train.py as users meet it: one line for what they can mend, dry runs, evaluations, Ctrl-C."""

import json
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, flags, metrics, without_times

import train

# What the settings of a small run are in the order of --help.
WORDS = f"--n 8 --m 4 --prompts-per-step 2 --task {SMALL['task']}"


def said(capsys) -> list[str]:
    """The lines of standard error that are train.py's own."""
    return re.findall("^train.py: .*", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--m 65", ["--m 65", "--n 64"]),
        ("--n 2.5", ["2.5"]),
        ("--nonsense", ["--nonsense"]),
        ("--preset rare best", ["best", "gsm8k-qwen2.5-3b-l40s", "cppo"]),
        ("--reward missing.py:f=1", ["missing.py:f", "FileNotFoundError"]),
        ("--task nonsense", ["nonsense", "gsm8k"]),
        ("--task missing.jsonl", ["missing.jsonl"]),
        ("--task gsm8k --data missing", ["missing"]),
        ("--model ./missing", ["./missing", "no such folder"]),
        ("--max-new-tokens 500", ["--max-new-tokens 500", "32 positions"]),
        ("--max-prompt-tokens 3", ["3"]),
        ("--shard", ["--shard", "torchrun"]),
        ("--resume", ["--resume", "holds no run"]),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    task = [] if "--task" in arguments else ["--task", SMALL["task"]]
    task = [] if arguments == "--resume" else task
    try:
        code = train.main([*arguments.split(), *task, "--out", str(tmp_path / "run")])
    except SystemExit as exit:  # argparse leaves by itself
        code = exit.code
    assert code == 2
    (line,) = said(capsys)
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_the_settings_that_are_not_the_defaults_are_printed(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert train.main(flags(steps=1, out=out)) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"settings that differ from the defaults:\n  {WORDS} --steps 1")
    assert f"writing to {out}" in output and "held-out accuracy" in output
    assert train.main(["--resume", "--out", out, "--steps", "2"]) == 0
    assert f"\n  {WORDS} --steps 2" in capsys.readouterr().out
    assert train.main(["--dry-run"]) == 0
    assert "defaults:\n  none" in capsys.readouterr().out


def test_without_out_a_run_is_named_by_its_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(flags(steps=1)) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name) and (folder / "model").exists()


# ---- plans and evaluations -----------------------------------------------------------------------


def test_a_preset_is_planned_for_the_machine_that_it_was_made_for(capsys):
    given = ["--preset", "gsm8k-llama3.2-3b-l40s", "cppo", "--dry-run"]
    assert train.main([*given, "--m", "8", "--lr", "1e-6"]) == 0
    output = capsys.readouterr().out
    for part in ("--m 8", "--rule max_advantage", "--lr 1e-06", "--beta 0.04"):
        assert part in output
    assert "--model meta-llama/Llama-3.2-3B-Instruct" in output
    assert "1 x L40S" in output


def test_a_dry_run_leaves_nothing_and_says_what_it_cannot_know(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--dry-run"]) == 0
    assert "can be counted on" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert train.main(["--dry-run", "--model", "nobody/nothing"]) == 2
    assert "nobody/nothing" in capsys.readouterr().err


def test_eval_only_writes_the_numbers_as_json(finished, tmp_path, capsys):
    out = tmp_path / "evaluation"
    arguments = ["--eval-only", "--model", str(finished / "model"), "--task", SMALL["task"]]
    assert train.main([*arguments, "--eval-problems", "16", "--out", str(out)]) == 0
    written = json.loads((out / "eval.json").read_text())
    assert written == without_times(finished)[-1]["eval"]
    assert "accuracy_se" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"eval.json", "evaluation.jsonl"}
    # What the finished run wrote in its last evaluation is what its model writes.
    rows = metrics(finished, "evaluation.jsonl")
    assert [row.pop("step") for row in rows] == [6] * 16
    assert metrics(out, "evaluation.jsonl") == rows


def test_the_folder_of_a_run_is_not_its_model(finished, tmp_path, capsys):
    assert train.main(["--eval-only", "--model", str(finished), "--out", str(tmp_path)]) == 2
    (line,) = said(capsys)
    assert f"did you mean {finished / 'model'}?" in line


# ---- from its first moment on --------------------------------------------------------------------


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
