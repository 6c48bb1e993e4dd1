"""Experiment trackers get the numbers of metrics.jsonl, or say in one line why they do not."""

import sys
import types

import pytest
from conftest import flags, metrics, small

import train
from support import trackers
from support.errors import InputError
from support.processes import Processes


def test_names_are_flat_and_what_is_no_number_is_left_out():
    row = {"step": 1, "seconds": {"update": 0.5}, "gap": {"max": None, "mean": 0.1}, "loss": None}
    row["pass_rates"] = [0.5, 1.0]  # not one number
    assert trackers.flat(row) == {"step": 1, "seconds/update": 0.5, "gap/mean": 0.1}


def test_metrics_go_to_tensorboard_too(tmp_path):
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    train.train(small(tracker="tensorboard"), tmp_path / "run")
    log = events.EventAccumulator(str(tmp_path / "run" / "pods")).Reload()
    assert [event.step for event in log.Scalars("reward")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in log.Scalars("eval_accuracy")] == [0, 3, 6]
    for name, value in trackers.flat(metrics(tmp_path / "run")[-1]).items():
        assert log.Scalars(name)[-1].value == pytest.approx(value, rel=1e-5), name
    settings = log.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "n: 8" in settings


@pytest.fixture
def service(monkeypatch):
    """A package with the calls of Weights & Biases, which writes down what it is asked."""
    package = types.ModuleType("wandb")
    package.__spec__ = types.SimpleNamespace()
    package.calls = []
    package.init = lambda project, config: package.calls.append(("init", project, config["n"]))
    package.log = lambda row, step: package.calls.append((step, row.get("reward")))
    package.finish = lambda: package.calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_a_service_gets_settings_rows_and_an_end(service, tmp_path):
    rows = train.train(small(steps=2, tracker="wandb"), tmp_path / "run")
    rewards = [(row["step"], row.get("reward")) for row in rows]
    assert service.calls == [("init", "pods", 8), *rewards, "finish"]


def test_a_service_that_refuses_is_one_line(service, tmp_path, capsys):
    def refuse(**_):
        raise ConnectionError("no account")

    service.init = refuse
    assert train.main(flags(tracker="wandb", out=tmp_path / "run")) == 2
    assert "train.py: --tracker wandb: no account\n" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.json").exists()  # the command can be given again


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert train.main(flags(tracker="trackio", out=tmp_path / "run")) == 2
    assert "pip install trackio" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    trackers.check("none")


def test_without_a_tracker_nothing_happens(tmp_path):
    tracker = trackers.start("none", Processes(), tmp_path, {})
    tracker.log({"reward": 1.0}, 1)
    tracker.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="--tracker nothing"):
        trackers.start("nothing", Processes(), tmp_path, {})
