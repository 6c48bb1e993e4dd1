"""The bench: its measure against the paper's logs, its parts on known data, every command once.

Nothing here asserts a time: what a machine does in a second is for the bench to say.
"""

import importlib.util
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import random_model
from torch.utils.flop_counter import FlopCounterMode

import bench
import train
from pods import max_variance
from rollouts import TorchSampler

ROOT = Path(__file__).parents[1]
# The authors' logs, github.com/YixuanEvenXu/pods: the variable names a clone's results/ folder.
BESIDE = Path(__file__).parents[2] / "shared" / "paper" / "results"
PAPER = Path(os.environ.get("PODS_RESULTS", BESIDE))


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


@pytest.mark.skipif(not PAPER.is_dir(), reason="needs the authors' logs, see PODS_RESULTS above")
def test_speedup_of_the_authors_published_logs():
    found = {}
    for name, setting in bench.paper_curves(PAPER).items():
        curves = [bench.mean_curve(setting["times"], setting[arm]) for arm in ("baseline", "pods")]
        runs = len(setting["baseline"]), len(setting["pods"])
        found[name] = (round(bench.speedup(*curves), 2), setting["unit"], runs)
    assert found == {
        "GSM8K, Qwen2.5-3B, L40S": (2.0, "hours", (10, 10)),
        "MATH, Qwen2.5-3B, L40S": (2.0, "hours", (10, 10)),
        "GSM8K, Llama-3.2-3B, L40S": (3.0, "hours", (10, 10)),
        "GSM8K, Qwen2.5-3B, 8 x H100": (1.71, "minutes", (5, 5)),
        "GSM8K, Qwen2.5-7B, 8 x A100": (1.75, "minutes", (5, 5)),
    }


def test_bootstrap_of_a_mean_is_about_two_standard_errors_wide():
    rng = random.Random(0)
    values = [rng.gauss(5, 2) for _ in range(200)]
    low, high = bench.bootstrap(lambda chosen: statistics.fmean(values[i] for i in chosen), 200)
    mean, error = statistics.fmean(values), statistics.stdev(values) / 200**0.5
    assert low == pytest.approx(mean - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.3 * error)


def test_bootstrap_counts_a_curve_that_never_arrives_as_0():
    assert bench.bootstrap(lambda chosen: 3.0, 5) == [3.0, 3.0]
    low, high = bench.bootstrap(lambda chosen: None if 0 in chosen else 2.0, 5)
    assert (low, high) == (0.0, 2.0)


# ---- the race's parts ----------------------------------------------------------------------------


def made_up_run(rise: float) -> dict:
    """A run that gains `rise` accuracy a second, two steps a second, marked every second."""
    accuracy = [min(1.0, rise * t) for t in range(11)]
    curve = {"time": list(range(11)), "step": list(range(0, 22, 2)), "accuracy": accuracy}
    curve["generate"] = [0.5 * t for t in range(11)]
    return {"curve": curve, "mean_accuracy": statistics.fmean(accuracy[1:]), "until": 10}


def test_the_common_grid_lies_on_straight_lines_between_the_marks():
    late = made_up_run(0.1)
    late["curve"]["time"] = [1.1 * t for t in range(11)]
    times, accuracies = bench.common_grid([made_up_run(0.1), late], 0.5)
    assert times.tolist() == [0.5 * i for i in range(1, 21)]  # the shorter run's end, without 0
    assert accuracies[0] == pytest.approx(0.1 * times)
    assert accuracies[1] == pytest.approx(0.1 * times / 1.1)
    assert bench.common_grid([late], 0.5)[0][-1] == 10  # the last mark, though it went on to 11


def test_arms_are_compared_at_their_best_learning_rates():
    baseline = {1e-3: [made_up_run(0.05)] * 3, 2e-3: [made_up_run(0.1)] * 3}
    fast = {1e-3: [made_up_run(0.2)] * 3, 2e-3: [made_up_run(0.01)] * 3}
    assert bench.best_rate(baseline) == 2e-3 and bench.best_rate(fast) == 1e-3
    value, low, high = bench.compare(baseline, fast, "time", 0.05)
    assert value == low == high == pytest.approx(2.0, rel=0.02)  # 9.9 s and 4.95 s
    assert bench.compare(baseline, fast, "step", 0.05)[0] == pytest.approx(value)


def test_the_account_splits_time_into_steps_and_their_cost():
    """The product is the ratio in time, though the steps get cheaper and the curves are noisy."""
    rng, arms = random.Random(0), {}
    for arm, rise in {"grpo": 0.06, "grpo-ga": 0.03, "pods": 0.1}.items():
        runs = [made_up_run(rise) for _ in range(3)]
        for run in runs:
            times = range(11)
            run["curve"]["accuracy"] = [min(1.0, rise * t) + rng.uniform(0, 0.02) for t in times]
            run["curve"]["step"] = [rise * t**1.5 for t in times]
            run["curve"]["generate"] = [t * rng.uniform(0.2, 0.6) for t in times]
        arms[arm] = {1e-3: runs}
    account = bench.where_the_gain_comes_from(arms, 0.25)
    for baseline, one in account.items():
        in_time = bench.compare(arms[baseline], arms["pods"], "time", 0.25)[0]
        curves = [
            bench.mean_curve(*bench.common_grid(arms[arm][1e-3], 0.25))
            for arm in (baseline, "pods")
        ]
        assert in_time == bench.speedup(*curves) > 1
        assert one["steps ratio"] / one["step cost ratio"] == pytest.approx(in_time)
        assert one["steps ratio"] == bench.compare(arms[baseline], arms["pods"], "step", 0.25)[0]
        middle = min(one["curve"], key=lambda point: abs(math.log(point[0] / one["here"])))
        assert middle[1] == pytest.approx(in_time, rel=0.05)
    assert account["grpo"]["with the paper's step cost"] == account["grpo"]["steps ratio"] / 1.34


def test_the_account_over_the_cost_of_generation():
    """PODS: 2 s of generation and 1 s of update a step; the baseline: 0.5 s and 1 s."""
    arms = {}
    for arm, (generate, step) in {"grpo": (0.5, 1.5), "pods": (2.0, 3.0)}.items():
        run = made_up_run(0.1)
        run["curve"]["step"] = [t / step for t in range(11)]
        run["curve"]["generate"] = [t / step * generate for t in range(11)]
        arms[arm] = {1e-3: [run]}
    one = bench.where_the_gain_comes_from(arms, 0.5)["grpo"]
    assert (one["steps ratio"], one["step cost ratio"], one["here"]) == pytest.approx((2, 2, 2))
    for share, times_sooner in one["curve"]:
        assert times_sooner == pytest.approx(2 * (0.25 * share + 1) / (share + 1))


def test_a_rate_near_the_edge_and_a_loaded_machine_are_said(capsys):
    inside = {lr: [made_up_run(rise)] * 3 for lr, rise in ((1e-4, 0.1), (2e-4, 0.2), (4e-4, 0.1))}
    bench.warn_of_edges({"pods": inside})
    bench.warn_of_load({"pods": [{"seconds": {"update": 1.0 + 0.1 * i}} for i in range(3)]})
    assert not capsys.readouterr().out
    torn = dict(inside)
    torn[4e-4] = [made_up_run(rise) for rise in (0.3, 0.1, 0.1)]  # one seed of three is best there
    assert bench.best_rate(torn) == 2e-4
    bench.warn_of_edges({"pods": torn})
    bench.warn_of_load({"pods": [{"seconds": {"update": 1.0 + i}} for i in range(3)]})
    edge, load = capsys.readouterr().out.splitlines()
    assert "0.0002 to 0.0004" in edge and "1.0, 2.0, 3.0 times" in load


def test_a_racer_does_what_train_does(tmp_path):
    config = train.Config(n=8, m=4, steps=4, eval_every=2, eval_problems=16, seed=3)
    rows = train.train(config, tmp_path / "train")
    racer = bench.Racer(replace(config, steps=None), tmp_path / "race")
    while racer.step < 4:
        racer.advance(racer.time + 1e-9)  # one step, then an evaluation
    assert [row["reward"] for row in racer.rows] == [row["reward"] for row in rows[1:]]
    assert [row["loss"] for row in racer.rows] == [row["loss"] for row in rows[1:]]
    evaluated = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert racer.curve["accuracy"][::2] == [round(value, 4) for value in evaluated]
    idle = sum(row["groups_without_signal"] for row in rows[1:])
    assert racer.curve["idle"][-1] == idle / config.prompts_per_step
    seconds = sum(sum(row["seconds"].values()) for row in racer.rows)
    assert racer.curve["time"][-1] == pytest.approx(seconds, abs=1e-4)  # nothing else is counted


def test_carries_are_counted():
    found = {prompt: bench.carries(prompt) for prompt in ("12+34=", "47+35=", "81+41=", "47+85=")}
    assert list(found.values()) == [0, 1, 1, 2]
    assert bench.carries("19+81=") == 2  # the second column carries only because the first does


# ---- selection, sampling, memory, FLOPs ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "0/1", "few values", "outlier"])
def test_the_authors_way_and_brute_force_find_the_same_variance(kind):
    generator = torch.Generator().manual_seed(0)
    for n, m in itertools.product((2, 5, 9), (2, 3, 5)):
        if m > n:
            continue
        rewards = torch.randn(n, dtype=torch.float64, generator=generator)
        if kind == "0/1":
            rewards = (rewards > 0).double()
        elif kind == "few values":
            rewards = rewards.round()
        elif kind == "outlier":
            rewards[0] = 100.0
        variances = {
            function.__name__: rewards[function(rewards, m)].var(correction=0).item()
            for function in (max_variance, bench.authors_way, bench.brute_force)
        }
        assert max(variances.values()) == pytest.approx(min(variances.values()), abs=1e-12)
        groups = torch.stack([rewards, rewards.flip(0)])
        assert bench.each_group(bench.authors_way, groups, m).shape == (2, m)


def test_tokens_are_counted_up_to_the_first_end():
    completions = torch.tensor([[5, 6, 1, 1], [1, 1, 1, 1], [5, 6, 7, 8], [2, 5, 1, 0]])
    assert bench.count_tokens(completions, eos_ids=[1, 2]) == 3 + 1 + 4 + 1


def test_the_largest_tensor_of_forward_and_backward_is_seen():
    a = torch.randn(3, 5, requires_grad=True)
    with bench.LargestTensor() as largest:
        (a.sum() ** 2).backward()
    assert largest.elements == 15  # only the gradient is that large
    with bench.LargestTensor() as largest:
        torch.zeros(100, dtype=torch.int64)
        a[:, None] * a
    assert largest.elements == 45  # integers do not count


def test_flops_are_those_that_torch_counts():
    for kind in ("llama", "qwen2"):
        model = random_model(kind, vocab_size=50, attn_implementation="eager")
        ids = torch.randint(50, (3, 7))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=ids)
        # Eager attention computes all 7 x 7 scores and masks half of them. Biases and norms have
        # weights, but torch counts only matrix products.
        counted = counter.get_total_flops()
        assert bench.forward_flops(model, 21, 7) == pytest.approx(counted, rel=0.05)


def test_tables_show_numbers_and_spreads():
    rows = [{"a": 1.23456, "b": [2.0, 1.0, 3.0]}, {"a": None, "b": 1_000_000}]
    lines = bench.table("title", rows).splitlines()
    assert lines[1:] == ["title", "   a          b", "1.23    2 (1-3)", "   -  1,000,000"]


# ---- every command, with next to nothing to do ---------------------------------------------------

COMMANDS = {
    "select": ["--rounds", "1", "--sizes", "1x16", "1x32", "4x32", "2x16", "--patience", "0.5"],
    "sampler": ["--rounds", "1", "--prompts", "2", "--n", "2", "4", "--max-new-tokens", "8"],
    "update": ["--rounds", "1", "--prompts", "1", "--m", "2", "4", "--vocabulary", "500"],
    "race": [
        *("--minutes", "0.005", "--every", "0.15", "--seeds", "2", "--jobs", "1"),
        *("--grid", "1e-4", "3e-4", "--tuned", "grpo", "pods", "--arms", "grpo", "pods", "random"),
        *("--", "--eval-problems", "8", "--prompts-per-step", "1"),
    ],
    "race_m": [
        *("--sweep", "m", "--minutes", "0.002", "--every", "0.06", "--seeds", "2", "--jobs", "2"),
        *("--", "--eval-problems", "8", "--prompts-per-step", "1"),
    ],
    "race_difficulty": [
        *("--sweep", "difficulty", "--minutes", "0.002", "--every", "0.06", "--seeds", "1"),
        *("--jobs", "1", "--forget", "0.9", "--warm-start", "5", "--grid", "3e-4"),
        *("--", "--eval-problems", "8", "--prompts-per-step", "1"),
    ],
    "peers": ["--rounds", "1", "--n", "4"],
    "profile": ["--rounds", "1", "--", "--n", "8", "--m", "4"],
}
PICTURES = {
    "race": ["race.png", "race_account.png"],
    "peers": [],
    "profile": [],
}


@pytest.mark.parametrize("sizes", [["1x16"], ["4x16"]])
def test_sizes_of_one_kind_are_drawn_too(sizes, tmp_path):
    flags = ["--rounds", "1", "--patience", "0.1", "--out", str(tmp_path), "--sizes", *sizes]
    assert bench.main(["select", *flags]) == 0
    assert (tmp_path / "select.json").exists() and (tmp_path / "select.png").exists()


@pytest.mark.parametrize("name", ["sampler", "update", "profile", "race", "peers"])
def test_threads_are_those_asked_for(name, tmp_path, monkeypatch):
    if name == "peers" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    seen, generate, update = set(), TorchSampler.generate, train.update

    def watched(function):
        return lambda *some, **named: seen.add(torch.get_num_threads()) or function(*some, **named)

    monkeypatch.setattr(TorchSampler, "generate", watched(generate))
    monkeypatch.setattr(train, "update", watched(update))
    flags = [*COMMANDS[name], "--threads", "2"]
    if "--" in flags:  # what follows is for train.py
        flags = ["--threads", "2", *COMMANDS[name]]
    try:
        assert bench.main([name, "--out", str(tmp_path), *flags]) == 0
    finally:
        torch.set_num_threads(1)
    assert seen == {2}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_write_json_and_a_picture(name, tmp_path, capsys):
    if name == "peers" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    command = name.partition("_")[0]
    argv = [command, "--out", str(tmp_path), *COMMANDS[name]]
    assert bench.main(argv) == 0
    assert "written to" in capsys.readouterr().out

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=refuse)
    assert result["command"].startswith(f"python bench.py {command} ")
    assert {"cpu", "cores", "torch", "date"} <= set(result["machine"])
    for picture in PICTURES.get(name, [f"{name}.png"]):
        assert (tmp_path / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    if name == "peers":
        assert result["cosine"] > 0.999  # the same rollouts, the same direction


def test_ctrl_c_keeps_the_seeds_that_are_through(tmp_path):
    flags = ["--sweep", "m", "--minutes", "0.002", "--every", "0.06", "--seeds", "99"]
    flags += [
        "--jobs",
        "2",
        "--out",
        str(tmp_path),
        "--",
        "--eval-problems",
        "8",
        "--prompts-per-step",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, ROOT / "bench.py", "race", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while "seed 1 is through" not in (line := process.stdout.readline()):
        assert line or process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all processes
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopped" in output and "Traceback" not in errors, errors
    runs = json.loads((tmp_path / "race_m.json").read_text())["runs"]
    (whole,) = {len(rates["0.0003"]) for rates in runs.values()}
    assert 2 <= whole < 99


def test_ctrl_c_before_the_first_seed_is_one_line(tmp_path):
    process = subprocess.Popen(
        [sys.executable, ROOT / "bench.py", "race", "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert "seeds" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped before" in errors and "Traceback" not in errors


def test_bad_input_gets_one_line(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert bench.main(["sampler", *out, "--model", "no/such/model"]) == 2
    assert bench.main(["race", *out, "--", "--m", "80"]) == 2
    assert bench.main(["race", *out, "--seeds", "0"]) == 2
    assert bench.main(["sampler", *out, "--n", "16", "-1"]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 4 and all(line.startswith("bench.py: ") for line in errors)
