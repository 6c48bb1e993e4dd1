"""The bench: its measure, its account, and every command once, with next to nothing to do.

Nothing here asserts a time: what a machine does in a second is for the bench to say.
"""

import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import made_up
import pytest
import torch

import bench
import train
from benches.standings import Arm, compare
from rollouts import TorchSampler

ROOT = Path(__file__).parents[1]


# ---- the measure ---------------------------------------------------------------------------------


def test_speedup_is_the_ratio_of_first_times_at_99_percent_of_the_baselines_best():
    baseline = [(1, 0.5), (2, 0.8), (3, 0.895), (4, 0.9), (5, 0.85)]  # best 0.9, so 0.891 counts
    pods = [(1, 0.7), (2, 0.9), (3, 0.6), (4, 0.95), (5, 0.95)]  # what comes later is no matter
    assert bench.speedup(baseline, pods) == 1.5
    assert bench.speedup(pods, baseline) is None  # 0.9405 is never reached
    assert bench.speedup(baseline, baseline) == 1.0
    assert bench.speedup(baseline, pods, fraction=0.7) == 2.0  # of 0.9: 0.63


def test_speedup_counts_exactly_reaching_the_target():
    assert bench.speedup([(10, 1.0)], [(5, 0.5)], fraction=0.5) == 2.0


# ---- the account ---------------------------------------------------------------------------------


def test_the_account_splits_time_into_steps_and_their_cost():
    """The product is the ratio in time, though the steps get cheaper and the curves are noisy."""
    rng, arms = random.Random(0), {}
    for arm, rise in {"grpo": 0.06, "grpo-ga": 0.03, "pods": 0.1}.items():
        runs = [
            made_up.trace(
                rise,
                accuracy=[min(1.0, rise * t) + rng.uniform(0, 0.02) for t in range(11)],
                step=[rise * t**1.5 for t in range(11)],
                generate=[t * rng.uniform(0.2, 0.6) for t in range(11)],
            )
            for _ in range(3)
        ]
        arms[arm] = Arm({1e-3: runs})
    account = bench.where_the_gain_comes_from(arms, 0.25)
    assert account.keys() == {"grpo", "grpo-ga"}
    for baseline, one in account.items():
        in_time = bench.speedup(arms[baseline].curve(0.25), arms["pods"].curve(0.25))
        assert in_time == compare(arms[baseline], arms["pods"], "time", 0.25)[0] > 1
        assert one["steps ratio"] / one["step cost ratio"] == pytest.approx(in_time)
        assert one["steps ratio"] == compare(arms[baseline], arms["pods"], "step", 0.25)[0]
        middle = min(one["curve"], key=lambda point: abs(math.log(point[0] / one["here"])))
        assert middle[1] == pytest.approx(in_time, rel=0.05)
    assert account["grpo"]["with the paper's step cost"] == account["grpo"]["steps ratio"] / 1.34


def test_the_account_over_the_cost_of_generation():
    """PODS: 2 s of generation and 1 s of update a step; the baseline: 0.5 s and 1 s."""
    arms = {}
    for arm, (generate, seconds) in {"grpo": (0.5, 1.5), "pods": (2.0, 3.0)}.items():
        steps = [t / seconds for t in range(11)]
        run = made_up.trace(0.1, step=steps, generate=[generate * step for step in steps])
        arms[arm] = Arm({1e-3: [run]})
    one = bench.where_the_gain_comes_from(arms, 0.5)["grpo"]
    assert (one["steps ratio"], one["step cost ratio"], one["here"]) == pytest.approx((2, 2, 2))
    for share, times_sooner in one["curve"]:
        assert times_sooner == pytest.approx(2 * (0.25 * share + 1) / (share + 1))


def test_an_arm_that_never_arrives_has_an_empty_account():
    arms = {"grpo": made_up.arm(0.1), "pods": made_up.arm(0.01)}
    account = bench.where_the_gain_comes_from(arms, 0.5)
    assert account == {"grpo": {"steps ratio": None, "step cost ratio": None}}


# ---- every command -------------------------------------------------------------------------------

LITTLE = ["--", "--eval-problems", "8", "--prompts-per-step", "1"]  # flags of train.py
COMMANDS = {
    "select": ["--rounds", "1", "--sizes", "1x16", "1x32", "4x32", "2x16", "--patience", "0.5"],
    "sampler": ["--rounds", "1", "--prompts", "2", "--n", "2", "4", "--max-new-tokens", "8"],
    "update": [
        *("--rounds", "1", "--prompts", "1", "--m", "2", "4", "--vocabulary", "500"),
        *("--completion", "3"),
    ],
    "race": [
        *("--minutes", "0.005", "--every", "0.15", "--seeds", "2", "--jobs", "1"),
        *("--grid", "1e-4", "3e-4", "--tuned", "grpo", "pods", "--arms", "grpo", "pods", "random"),
        *LITTLE,
    ],
    "race_m": [
        *("--sweep", "m", "--minutes", "0.002", "--every", "0.06", "--seeds", "2", "--jobs", "2"),
        *LITTLE,
    ],
    "race_difficulty": [
        *("--sweep", "difficulty", "--minutes", "0.002", "--every", "0.06", "--seeds", "1"),
        *("--jobs", "1", "--forget", "0.9", "--warm-start", "5", "--grid", "1e-4", *LITTLE),
    ],
    "signal": [
        *("--prompts", "1", "--pool", "32", "--groups", "50", "--ages", "1", "--sizes", "4x4"),
        *LITTLE,
    ],
    "peers": ["--rounds", "1", "--n", "4"],
    "bands": ["--seeds", "2", "--steps", "2", "1", "--jobs", "1", *LITTLE],
}
PICTURES = {"race": ["race.png", "race_account.png"], "peers": [], "bands": []}
# The keys that notebooks/3_speedup.ipynb and notebooks/results/ have.
KEYS = {
    "race": {"config", "seconds", "tables", "account", "runs"},
    "race_m": {"config", "seconds", "costs", "gains", "runs"},
    "race_difficulty": {"config", "seconds", "starts"},
    "select": {"rows"},
    "sampler": {"model", "prompts", "rows"},
    "update": {"tables", "prompts"},
    "signal": {"config", "pools"},
    "peers": {"trl", "model", "cosine", "rows", "groups_without_signal"},
    "bands": {"config", "rows", "runs"},
}


# Two threads wait for each other wherever another process has a core: as little as can be.
SHORTEST = COMMANDS | {
    "race": [
        *("--minutes", "0.001", "--every", "0.06", "--seeds", "1", "--jobs", "1"),
        *("--arms", "pods", "--tuned", *LITTLE),
    ],
}


def run(name: str, out: Path, flags: list[str]) -> int:
    """A command with what is little enough; skips it where TRL is missing."""
    if name == "peers" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    return bench.main([name.partition("_")[0], "--out", str(out), *flags])


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_write_json_and_a_picture(name, tmp_path, capsys):
    assert run(name, tmp_path, COMMANDS[name]) == 0
    assert f"written to {tmp_path / name}.json" in capsys.readouterr().out

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=refuse)
    assert result.keys() == {"bench", "command", "machine"} | KEYS[name]
    assert result["command"].startswith(f"python bench.py {name.partition('_')[0]} ")
    assert {"cpu", "cores", "torch", "date"} <= set(result["machine"])
    for picture in PICTURES.get(name, [f"{name}.png"]):
        assert (tmp_path / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    if name == "peers":
        assert result["cosine"] > 0.999  # the same rollouts, the same direction


@pytest.mark.parametrize("name", ["sampler", "update", "race", "peers"])
def test_threads_are_those_asked_for(name, tmp_path, monkeypatch):
    seen = set()

    def watched(function):
        return lambda *some, **named: seen.add(torch.get_num_threads()) or function(*some, **named)

    monkeypatch.setattr(TorchSampler, "generate", watched(TorchSampler.generate))
    monkeypatch.setattr(train, "update", watched(train.update))
    try:
        assert run(name, tmp_path, ["--threads", "2", *SHORTEST[name]]) == 0
    finally:
        torch.set_num_threads(1)
    assert seen == {2}


def test_bad_input_gets_one_line(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert bench.main(["sampler", *out, "--model", "no/such/model"]) == 2
    assert bench.main(["race", *out, "--", "--m", "80"]) == 2
    assert bench.main(["race", *out, "--seeds", "0"]) == 2
    assert bench.main(["sampler", *out, "--n", "16", "-1"]) == 2
    (tmp_path / "file").touch()
    assert bench.main(["select", "--out", str(tmp_path / "file"), "--sizes", "1x16"]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 5 and all(line.startswith("bench.py: ") for line in errors)
    assert not list(tmp_path.glob("*.json"))


# ---- Ctrl-C --------------------------------------------------------------------------------------


def started(*flags: str | Path) -> subprocess.Popen:
    """`bench.py race` in a session of its own."""
    return subprocess.Popen(
        [sys.executable, ROOT / "bench.py", "race", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def interrupted_after(words: str, process: subprocess.Popen) -> tuple[str, str]:
    """What it prints if Ctrl-C comes after these words: as a terminal sends it, to all of it."""
    while words not in (line := process.stdout.readline()):
        assert line or process.poll() is None, process.communicate()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert "Traceback" not in errors, errors
    return output, errors


def test_ctrl_c_keeps_the_seeds_that_are_through(tmp_path):
    flags = ["--sweep", "m", "--minutes", "0.002", "--every", "0.06", "--seeds", "99"]
    process = started(*flags, "--jobs", "2", "--out", tmp_path, *LITTLE)
    output, _ = interrupted_after("seed 1 is through", process)
    assert process.returncode == 0 and "stopped" in output
    runs = json.loads((tmp_path / "race_m.json").read_text())["runs"]
    (through,) = {len(rates["0.0003"]) for rates in runs.values()}
    assert 2 <= through < 99


def test_ctrl_c_before_the_first_seed_is_one_line(tmp_path):
    process = started("--out", tmp_path)
    _, errors = interrupted_after("seeds", process)
    assert process.returncode == 130 and "stopped before" in errors
