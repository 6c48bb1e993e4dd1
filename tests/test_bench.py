"""The bench: its measure, and every command once, with next to nothing to do.

Nothing here asserts a time: what a machine does in a second is for the bench to say.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import bench


def test_speedup_is_the_ratio_of_first_times_at_99_percent_of_the_baselines_best():
    baseline = [(1, 0.5), (2, 0.8), (3, 0.895), (4, 0.9), (5, 0.85)]  # best 0.9, so 0.891 counts
    pods = [(1, 0.7), (2, 0.9), (3, 0.6), (4, 0.95), (5, 0.95)]  # what comes later is no matter
    assert bench.speedup(baseline, pods) == 1.5
    assert bench.speedup(pods, baseline) is None  # 0.9405 is never reached
    assert bench.speedup(baseline, baseline) == 1.0
    assert bench.speedup(baseline, pods, fraction=0.7) == 2.0  # of 0.9: 0.63
    assert bench.speedup([(10, 1.0)], [(5, 0.5)], fraction=0.5) == 2.0  # exactly there


# ---- every command -------------------------------------------------------------------------------

LITTLE = ["--", "--eval-problems", "8", "--prompts-per-step", "1"]  # flags of train.py
COMMANDS = {
    "sampler": ["--rounds", "1", "--prompts", "2", "--n", "2", "4", "--", "--max-new-tokens", "8"],
    "update": ["--rounds", "1", "--prompts", "1", "--m", "2", "4", "--completion", "3"],
    "race": [
        *("--minutes", "0.005", "--every", "0.15", "--seeds", "2", "--jobs", "1"),
        *("--grid", "1e-4", "3e-4", "--tuned", "pods", "--arms", "grpo", "pods", "8x4", *LITTLE),
    ],
    "peers": ["--rounds", "1", "--", "--n", "4", "--m", "4"],
    "bands": ["--seeds", "2", "--steps", "2", "1", *LITTLE],
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Without the second in which other work is looked for, and without vLLM's start."""
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: None)
    monkeypatch.setitem(sys.modules, "vllm", None)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_write_json(name, tmp_path, capsys, monkeypatch):
    """And compute with as many threads as asked for."""
    if name == "peers" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    monkeypatch.setattr(torch, "set_num_threads", (threads := []).append)
    assert bench.main([name, "--out", str(tmp_path), *COMMANDS[name]]) == 0
    assert f"written to {tmp_path / name}.json" in capsys.readouterr().out
    assert set(threads) == {1}

    result = json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=pytest.fail)
    assert result["command"].startswith(f"python bench.py {name} ")
    assert {"cpu", "cores", "torch", "date"} <= set(result["machine"])
    if name == "race":
        assert (tmp_path / "race.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert result["tables"]["tuned"]["costs"][0]["arm"] == "pods"
    if name == "peers":
        assert result["rows"][0]["cosine of gradients"] > 0.999  # the same rollouts


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sampler", "--", "--model", "no/such/model"], "no/such/model"),
        (["gpu"], "gpu: torch finds no GPU here; the other benches need none"),
        (["peers"], "peers compares with TRL: pip install trl==1.16.0"),
        (["race", "--", "--m", "80"], "--m 80 is larger than --n 64"),
        (["race", "--seeds", "0"], "--seeds 0: must be a number above 0"),
        (["sampler", "--n", "16", "-1"], "--n [16, -1]: must be a number above 0"),
        (["race", "--minutes", "0.001"], "--minutes 0.001: give time for one evaluation"),
        (["race", "--arms", "grpo", "4x16"], "--arms 4x16: is none of grpo, grpo-ga, pods"),
        (["race", "--", "--out", "X"], "--out after --"),
        (["bands", "--", "--eval-only"], "--eval-only after --"),
        (["bands", "--n", "32", "--m", "8"], "bands has no --n 32 --m 8: say -- --n 32 --m 8 if"),
    ],
)
def test_what_the_user_can_mend_is_one_line(argv, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "trl", None)  # so importing it fails
    assert bench.main([argv[0], "--out", str(tmp_path), *argv[1:]]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("bench.py: ") and words in line
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    ("flags", "start"),
    [([], ("rare_policy", "carries")), (["--preset", "cpu"], ("tiny_policy", "arithmetic"))],
)
def test_flags_of_train_py_choose_the_start_of_all_arms(flags, start, monkeypatch, tmp_path):
    class Enough(Exception):
        pass

    def look(*race):
        raise Enough(*race)

    monkeypatch.setattr(bench, "run_heats", look)
    arms = ["--arms", "grpo", "pods", "128x8", "--tuned", "grpo", "--grid", "2e-4", "4.5e-4"]
    arguments = bench.parse(["race", "--seeds", "5", *arms, "--", *flags, "--seed", "3"])
    with pytest.raises(Enough) as found:
        arguments.function(arguments)
    racing, seeds, *_ = found.value.args
    assert list(seeds) == [3, 4, 5, 6, 7]
    sizes = {"grpo": (16, 16), "pods": (64, 16), "128x8": (128, 8)}
    for name, rates in racing.items():
        assert list(rates) == ([2e-4, 3e-4, 4.5e-4] if name == "grpo" else [3e-4])
        for lr, config in rates.items():
            assert (config.n, config.m, config.lr) == (*sizes[name], lr)
            assert (config.model, config.task) == start


def test_other_work_is_said(monkeypatch, capsys):
    monkeypatch.setattr(bench.OTHERS, "look", lambda: None)
    for load, words in {0.4: "", 1.44: "other work on this machine keeps 1.4 cores"}.items():
        monkeypatch.setattr(bench.OTHERS, "largest", load)
        bench.say_other_work()
        said = capsys.readouterr().out
        assert words in said and bool(words) == bool(said)


# ---- Ctrl-C --------------------------------------------------------------------------------------


def test_ctrl_c_reports_the_seeds_that_are_through(tmp_path):
    """As a terminal sends it: to the bench and to the processes that it started."""
    flags = ["--arms", "pods", "--tuned", "--minutes", "0.002", "--every", "0.06"]
    flags += ["--seeds", "99", "--jobs", "2", "--out", tmp_path, *LITTLE]
    command = [sys.executable, ROOT / "bench.py", "race", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    while "seed 1 is through" not in (line := process.stdout.readline()):
        assert line or process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    assert process.returncode == 0 and "stopped" in output
    runs = json.loads((tmp_path / "race.json").read_text())["runs"]
    assert 1 <= len(runs["pods"]["0.0003"]) < 99


def test_ctrl_c_before_the_first_seed_is_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.PARTS, "bands", (interrupted, lambda parser: None))
    interrupted.__doc__ = "Interrupted."
    assert bench.main(["bands", "--out", str(tmp_path)]) == 130
    assert "stopped before there was anything to report" in capsys.readouterr().err
