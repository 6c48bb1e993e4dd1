"""A racer does exactly what train.py does, whoever it races with, and a race can be interrupted."""

import json
from dataclasses import replace

import pytest

import train
from benches import heats
from benches.heats import Racer, heat, run_heats
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
    evaluated = [next(iter(row["eval"].values())) for row in rows if "eval" in row]
    for key in ("accuracy", "truncated", "completion_length"):
        assert racer.curve[key][::2] == [round(numbers[key], 4) for numbers in evaluated]


def test_the_clock_counts_training_and_nothing_else():
    racer = raced(3)
    curve, seconds = racer.curve, [row["seconds"] for row in racer.rows]
    assert curve["step"] == [0, 1, 2, 3] and curve["time"][0] == 0
    total = sum(sum(one.values()) for one in seconds)
    assert curve["time"][-1] == pytest.approx(total, abs=1e-4)
    generate = sum(one["generate"] for one in seconds)
    assert curve["generate"][-1] == pytest.approx(generate, abs=1e-4)
    idle = sum(row["groups_without_signal"] for row in racer.rows)
    assert curve["idle"][-1] == idle / CONFIG.prompts_per_step
    trace = racer.trace(until=1.5)
    assert trace.until == 1.5 and trace.curve == curve
    assert trace.mean_accuracy == pytest.approx(sum(curve["accuracy"][1:]) / 3)
    assert trace.seconds["update"] == pytest.approx(sum(one["update"] for one in seconds) / 3)


def test_a_mark_has_the_mean_entropy_of_the_steps_since_the_last_one():
    racer = raced(0)
    racer.mark([{"entropy": 0.25}, {"entropy": 0.75}, {"entropy": None}])
    assert racer.curve["entropy"] == [None, 0.5]


def test_all_arms_of_a_heat_have_its_seed_and_its_marks():
    racing = {"slow": {3e-4: CONFIG}, "fast": {6e-4: replace(CONFIG, lr=6e-4)}}
    arms = heat(racing, marks=[1e-9, 2e-9], seed=5)
    alone = raced(1, replace(CONFIG, seed=5))
    (slow,), (fast,) = arms["slow"].best, arms["fast"].best
    for trace in (slow, fast):
        assert trace.curve["step"] == [0, 1, 1]  # both marks are within the first step
        assert trace.curve["accuracy"][0] == alone.curve["accuracy"][0]
        assert trace.until == 2e-9
    assert slow.curve["accuracy"][1] == alone.curve["accuracy"][1]


RACING = {"pods": {lr: replace(CONFIG, lr=lr, eval_problems=4) for lr in (3e-4, 6e-4)}}
RACING["grpo"] = {3e-4: replace(CONFIG, n=4, eval_problems=4)}


def test_heats_are_sorted_into_arms_and_rates(tmp_path, capsys):
    arms, _ = run_heats(RACING, range(2), marks=[1e-9], jobs=1, out=tmp_path)
    rates = {name: list(arm.runs) for name, arm in arms.items()}
    assert rates == {"pods": [3e-4, 6e-4], "grpo": [3e-4]}
    starts = [run.curve["accuracy"][0] for run in arms["pods"].runs[3e-4]]
    alone = [Racer(replace(RACING["pods"][3e-4], seed=seed)) for seed in (0, 1)]
    assert starts == [racer.curve["accuracy"][0] for racer in alone]
    assert "seed 1 is through" in capsys.readouterr().out
    for path, load in zip(sorted(tmp_path.glob("race_heats/*/*.json")), (0.1, 0.7)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"other_work": load}))
    assert run_heats(RACING, range(2), [1e-9], 1, tmp_path)[1] == 0.7  # the largest load


def test_an_interrupted_race_goes_on_with_the_seeds_that_are_missing(tmp_path, monkeypatch, capsys):
    done, original = [], heats.heat

    def interrupted(racing, marks, seed, line):
        if len(done) == stop_after:
            raise KeyboardInterrupt
        done.append(seed)
        return original(racing, marks, seed, line)

    monkeypatch.setattr(heats, "heat", interrupted)
    race = (RACING, range(3, 6), [1e-9], 1, tmp_path)
    stop_after = 0
    with pytest.raises(KeyboardInterrupt):  # there is nothing to report
        run_heats(*race)
    stop_after = 2
    arms, _ = run_heats(*race)
    assert arms["grpo"].seeds == 2 and "2 of 3 seeds" in capsys.readouterr().out
    stop_after = 9
    whole, _ = run_heats(*race)
    assert done == [3, 4, 5] and whole["grpo"].seeds == 3
    assert whole["pods"].drawn([0, 1]) == arms["pods"]
    assert "2 of the seeds were raced before" in capsys.readouterr().out
    changed = RACING | {"grpo": {3e-4: replace(RACING["grpo"][3e-4], n=5)}}
    renamed = {"pods": RACING["pods"], "4x4": RACING["grpo"]}
    for other in (changed, renamed):  # another race takes none of these
        run_heats(other, [3], [1e-9], 1, tmp_path)
    assert done == [3, 4, 5, 3, 3]
