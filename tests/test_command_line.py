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
        ("--nonsense", ["--nonsense"]),
        ("--reward missing.py:f=1", ["missing.py:f", "FileNotFoundError"]),
        ("--task nonsense", ["nonsense", "gsm8k"]),
        ("--model ./missing", ["./missing", "no such folder"]),
        ("--shard", ["--shard", "torchrun"]),
        ("--resume", ["--resume", "holds no run"]),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(arguments, words, tmp_path, capsys):
    task = [] if "--task" in arguments or "--resume" in arguments else ["--task", SMALL["task"]]
    try:
        code = train.main([*arguments.split(), *task, "--out", str(tmp_path / "run")])
    except SystemExit as exit:  # argparse leaves by itself
        code = exit.code
    assert code == 2
    (line,) = said(capsys)
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_a_run_says_what_is_not_the_default_and_is_named_by_its_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(flags(steps=1)) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name) and (folder / "model").exists()
    output = capsys.readouterr().out
    assert output.startswith(f"settings that differ from the defaults:\n  {WORDS} --steps 1")
    assert f"writing to runs/{folder.name}" in output and "held-out accuracy" in output


# ---- plans and evaluations -----------------------------------------------------------------------


def test_a_dry_run_leaves_nothing_and_says_what_it_cannot_know(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main(["--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "defaults:\n  none" in output and "can be counted on" in output
    assert not list(tmp_path.iterdir())
    assert train.main(["--dry-run", "--model", "nobody/nothing"]) == 2
    assert "nobody/nothing" in said(capsys)[0]
    assert train.main(["--dry-run", "--max-new-tokens", "30000"]) == 2
    (line,) = said(capsys)
    assert "--max-new-tokens 30000" in line and "32 positions" in line


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


@pytest.mark.parametrize("script", ["train.py", "bench.py"])
def test_ctrl_c_during_the_imports_is_quiet(script):
    trace = [sys.executable, "-X", "importtime", ROOT / script, "--help"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(trace, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    for line in process.stderr:
        if "torch" in line:
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert not output and "Traceback" not in errors
