"""The starts that make right answers rare, and what is varied."""

import json

import pytest

import bench
from benches.sweeps import SWEEPS, rare_start
from support.settings import Config
from support.tasks import load_task


def test_a_sweep_varies_one_number_and_its_settings_can_run():
    for name, arms in SWEEPS.items():
        settings = [Config(**arm) for arm in arms.values()]
        assert len({getattr(one, name) for one in settings}) == len(arms) > 1
        (fixed,) = {"n", "m"} - {name}
        assert len({getattr(one, fixed) for one in settings}) == 1


def test_flags_of_train_py_choose_the_start_of_all_arms(monkeypatch):
    class Enough(Exception):
        pass

    def look(settings, *_):
        raise Enough({name: list(rates.values()) for name, rates in settings.items()})

    monkeypatch.setattr(bench, "run_heats", look)
    arms = ["--arms", "grpo", "pods", "--tuned", "grpo", "pods", "--grid", "2e-4", "4.5e-4"]
    arguments = bench.parse(["race", *arms, "--", "--preset", "rare"])
    with pytest.raises(Enough) as found:
        arguments.function(arguments)
    (settings,) = found.value.args
    assert list(settings) == ["grpo", "pods"]
    for name, configs in settings.items():
        assert [config.lr for config in configs] == [2e-4, 3e-4, 4.5e-4]
        for config in configs:
            assert config.n == (64 if name == "pods" else 16) and config.m == 16
            assert (config.model, config.task) == ("rare_policy", "carries")


def test_a_rare_start_is_a_model_and_a_task_that_are_made_once(tmp_path):
    start = rare_start(tmp_path, steps=2, forget=0.9)
    assert Config(**start).model == str(tmp_path / "forget_0.9_2")
    assert load_task(start["task"], "test")
    weights = tmp_path / "forget_0.9_2" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert json.loads((tmp_path / "forget_0.9_2" / "config.json").read_text())
    assert rare_start(tmp_path, steps=2, forget=0.9) == start
    assert weights.stat().st_mtime_ns == before
