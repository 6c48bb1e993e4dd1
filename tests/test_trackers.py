"""Experiment trackers get the numbers of metrics.jsonl, or say in one line why they do not."""

import sys
import types

import pytest
from conftest import flags, metrics, small

import train
from support import settings, trackers


def test_names_are_flat_and_what_is_no_number_is_left_out():
    row = {"step": 1, "seconds": {"update": 0.5}, "gap": {"max": None, "mean": 0.1}, "loss": None}
    row["pass_rates"] = [0.5, 1.0]  # not one number
    assert trackers.flat(row) == {"step": 1, "seconds/update": 0.5, "gap/mean": 0.1}


def test_tensorboard_shows_every_step_once_also_of_a_run_that_was_killed(tmp_path, monkeypatch):
    """Killed after step 5, with a checkpoint of step 4: step 5 is done and sent again."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    real = train.train_step

    def die(run, step: int):
        if step == 6:
            raise ZeroDivisionError
        return real(run, step)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(train, "train_step", die)
        train.train(small(tracker="tensorboard"), tmp_path / "run")
    assert train.main(["--resume", "--out", str(tmp_path / "run")]) == 0
    log = events.EventAccumulator(str(tmp_path / "run" / "pods")).Reload()
    assert [event.step for event in log.Scalars("reward")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in log.Scalars("eval_accuracy")] == [0, 3, 6]
    for name, value in trackers.flat(metrics(tmp_path / "run")[-1]).items():
        assert log.Scalars(name)[-1].value == pytest.approx(value, rel=1e-5), name
    text = log.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "n: 8" in text


@pytest.fixture
def service(monkeypatch):
    """A package with the calls of Weights & Biases, which writes down what it is asked."""

    def init(project, config, name, resume, id=None):
        assert resume == "allow"
        package.runs.append((project, config["n"], name, id))

    package = types.ModuleType("wandb")
    package.__spec__ = types.SimpleNamespace()
    package.runs, package.rows, package.ends = [], [], []
    package.init = init
    package.log = lambda row, step: package.rows.append((step, row.get("reward")))
    package.finish = lambda: package.ends.append(len(package.rows))
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, package)
    return package


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_service_gets_rows_and_an_end_and_a_resumed_run_is_one_run(service, tmp_path, tracker):
    for name in ("other", "run"):
        rows = train.train(small(steps=1, tracker=tracker), tmp_path / name)
    assert service.rows == 2 * [(row["step"], row.get("reward")) for row in rows]
    assert service.ends == [2, 4]
    assert train.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "2"]) == 0
    other, first, again = service.runs
    assert first == again != other and first[:2] == ("pods", 8)
    assert first[2].startswith("run-") and (first[3] is None) == (tracker == "trackio")


def test_a_service_that_refuses_is_one_line(service, tmp_path, capsys):
    def refuse(**_):
        raise ConnectionError("no account")

    service.init = refuse
    assert train.main(flags(tracker="wandb", out=tmp_path / "run")) == 2
    assert "train.py: --tracker wandb: no account\n" in capsys.readouterr().err
    # The command can be given again.
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_a_tracker_that_is_not_installed_is_said_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert train.main(flags(tracker="trackio")) == 2
    assert capsys.readouterr().err.endswith("not installed: pip install trackio\n")
