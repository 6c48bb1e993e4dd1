"""A racer does exactly what train.py does, whoever it races with."""

from dataclasses import replace

import pytest

import train
from benches.heats import Racer, at_rates, heat, run_heats
from support.settings import Config

CONFIG = Config(n=8, m=4, prompts_per_step=2, eval_every=2, eval_problems=16, seed=3, steps=4)


def raced(steps: int, config: Config = CONFIG) -> Racer:
    """A racer that was stopped and evaluated after every step."""
    racer = Racer(config)
    for _ in range(steps):
        racer.advance(racer.time + 1e-9)
    return racer


def test_a_racer_does_what_train_does(tmp_path):
    rows = train.train(CONFIG, tmp_path / "train")
    racer = raced(4)
    for key in ("reward", "loss", "grad_norm", "groups_without_signal"):
        assert [row[key] for row in racer.rows] == [row[key] for row in rows[1:]]
    evaluated = [row["eval_accuracy"] for row in rows if "eval_accuracy" in row]
    assert racer.curve["accuracy"][::2] == [round(value, 4) for value in evaluated]


def test_the_clock_counts_training_and_nothing_else():
    racer = raced(3)
    seconds = [row["seconds"] for row in racer.rows]
    assert racer.curve["step"] == [0, 1, 2, 3] and racer.curve["time"][0] == 0
    total = sum(sum(one.values()) for one in seconds)
    assert racer.curve["time"][-1] == pytest.approx(total, abs=1e-4)
    generate = sum(one["generate"] for one in seconds)
    assert racer.curve["generate"][-1] == pytest.approx(generate, abs=1e-4)
    idle = sum(row["groups_without_signal"] for row in racer.rows)
    assert racer.curve["idle"][-1] == idle / CONFIG.prompts_per_step


def test_a_trace_is_the_mean_over_steps_and_marks():
    racer = raced(2)
    trace = racer.trace(until=1.5)
    assert trace.until == 1.5 and trace.curve == racer.curve
    assert trace.mean_accuracy == pytest.approx(sum(trace.curve["accuracy"][1:]) / 2)
    updates = [row["seconds"]["update"] for row in racer.rows]
    assert trace.seconds["update"] == pytest.approx(sum(updates) / 2)


def test_all_arms_of_a_heat_have_its_seed_and_its_marks():
    slow, fast = CONFIG, replace(CONFIG, lr=6e-4)
    traces = heat({"slow": slow, "fast": fast}, marks=[1e-9, 2e-9], seed=5)
    alone = raced(1, replace(CONFIG, seed=5))
    for trace in traces.values():
        assert trace.curve["step"] == [0, 1, 1]  # both marks are within the first step
        assert trace.curve["accuracy"][0] == alone.curve["accuracy"][0]
        assert trace.until == 2e-9
    assert traces["slow"].curve["accuracy"][1] == alone.curve["accuracy"][1]


@pytest.mark.parametrize("jobs", [1, 2])
def test_heats_are_sorted_into_arms_and_rates(jobs, capsys):
    little = replace(CONFIG, eval_problems=4)
    settings = {"pods": at_rates(little, [3e-4, 6e-4]), "grpo": {3e-4: replace(little, n=4)}}
    arms = run_heats(settings, seeds=2, marks=[1e-9], jobs=jobs)
    assert {name: list(arm.runs) for name, arm in arms.items()} == {
        "pods": [3e-4, 6e-4],
        "grpo": [3e-4],
    }
    starts = [run.curve["accuracy"][0] for run in arms["pods"].runs[3e-4]]
    assert starts == [raced(0, replace(little, seed=s)).curve["accuracy"][0] for s in (0, 1)]
    assert "seed 1 is through" in capsys.readouterr().out
