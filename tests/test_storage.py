"""A run's folder: files that are whole or not there, checkpoints, logs, models, one writer."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_equal, flags, log_probs, metrics, small, trained_weights, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from support import tiny
from support.errors import InputError
from support.run import Run
from support.storage import (
    Folder,
    Progress,
    append_rows,
    checkpoints,
    json_line,
    load_checkpoint,
    read_rows,
    save_checkpoint,
    save_model,
)

# ---- files ---------------------------------------------------------------------------------------


def test_checkpoints_are_ordered_by_number_and_two_are_kept(tmp_path):
    for step in (999_998, 999_999, 1_000_000):
        save_checkpoint({"step": step}, tmp_path / "checkpoint")
    assert load_checkpoint(tmp_path / "checkpoint") == {"step": 1_000_000}
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step_999999.pt", "step_1000000.pt"}


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(tmp_path, capsys):
    for step in (1, 2):
        save_checkpoint({"step": step, "model": {"w": torch.ones(5000)}}, tmp_path)
    newest = tmp_path / "step_000002.pt"
    for damaged in (newest.read_bytes()[:5000], b"", b"not a checkpoint"):
        newest.write_bytes(damaged)
        assert load_checkpoint(tmp_path)["step"] == 1
        assert "step_000002.pt is damaged" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (OSError(28, "No space left on device"), r"cannot write .*000001.pt: No space"),
        (KeyboardInterrupt(), None),  # Ctrl-C is no error of the disk
    ],
)
def test_what_ends_the_writing_of_a_checkpoint_leaves_no_half(tmp_path, monkeypatch, cause, words):
    def ended(state, file):
        file.write(b"half")
        try:
            raise cause
        except (OSError, KeyboardInterrupt):
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904, as torch's writer does

    monkeypatch.setattr(torch, "save", ended)
    with pytest.raises(type(cause), match=words):
        save_checkpoint({"step": 1}, tmp_path / "checkpoint")
    assert not list((tmp_path / "checkpoint").iterdir())


def test_a_model_is_replaced_by_a_whole_one_or_not_at_all(tmp_path, monkeypatch):
    model, tokenizer = tiny.make_model(0), tiny.make_tokenizer()
    save_model(model, tokenizer, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def full(self, folder, **_):
        Path(folder).mkdir()
        raise RuntimeError("I/O error: No space left on device")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(OSError, match=f"cannot write {tmp_path / 'model'}: .*No space left"):
        save_model(model, tokenizer, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_numbers_that_json_does_not_have_are_null():
    row = {"loss": math.nan, "seconds": {"update": math.inf}, "name": "NaN"}
    assert json_line(row) == '{"loss": null, "seconds": {"update": null}, "name": "NaN"}\n'


def test_the_last_line_of_a_log_may_be_half_but_no_other(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", ['{"step": 0}', '{"step": 1}']
    assert read_rows(path) == []
    for half in ('{"step": 2, "x', "", '{"step": 2, "\ufffd', "5", "{}"):
        path.write_text("\n".join([*whole, half]))
        assert read_rows(path) == [{"step": 0}, {"step": 1}]
        if half:
            path.write_text("\n".join([whole[0], half, whole[1]]) + "\n")
            with pytest.raises(InputError, match=r"metrics.jsonl, line 2 is damaged: mend"):
                read_rows(path)
    path.write_bytes("\n".join([*whole, '{"step": 2, "x']).encode() + b"\xe2")
    assert read_rows(path) == [{"step": 0}, {"step": 1}]


def test_a_full_disk_is_said_with_the_name_of_the_file():
    with pytest.raises(OSError, match=r"^cannot write /dev/full: No space left on device$"):
        append_rows(Path("/dev/full"), [{"step": 1}])


# ---- the folder ----------------------------------------------------------------------------------


def test_outputs_are_complete_and_readable(finished):
    rows = metrics(finished)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_accuracy" in row] == [0, 3, 6]
    for row in rows[1:]:
        assert set(row["seconds"]) == {"generate", "score", "select", "update", "sync"}
        for name in ("reward", "reward_kept", "reward_std", "loss", "grad_norm"):
            assert math.isfinite(row[name]), name
        assert row["groups"] == 2 and 0 <= row["groups_without_signal"] <= 2
        assert sum(row["pass_rates"]) / 2 == pytest.approx(row["accuracy"], abs=1e-6)
        assert 0 < row["completion_length"] <= 26 and 0 <= row["truncated"] <= 1
    assert rows[-1]["time"] == pytest.approx(sum(sum(r["seconds"].values()) for r in rows[1:]))
    assert json.loads((finished / "config.json").read_text())["n"] == 8
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    names = [path.name for path in checkpoints(finished / "checkpoint")]
    assert names == ["step_000004.pt", "step_000006.pt"]
    assert not list(finished.rglob("*.tmp"))


def test_a_checkpoint_holds_each_weight_of_the_saved_model_once_and_its_moments(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert tokenizer("12+34=").input_ids == tiny.make_tokenizer()("12+34=").input_ids
    state, saved = load_checkpoint(finished / "checkpoint"), weights_of(finished)
    shipped = AutoModelForCausalLM.from_pretrained(tiny.TINY_POLICY).state_dict()
    assert saved.keys() == shipped.keys()
    assert any((saved[name] != shipped[name]).any() for name in shipped)
    assert (state["step"], state["processes"]) == (6, 1)
    assert set(saved) - set(state["model"]) == {"lm_head.weight"}  # tied to the embeddings
    assert all(torch.equal(saved[name], weight) for name, weight in state["model"].items())
    assert set(state["optimizer"]["state"]) == set(state["model"])


def test_a_folder_that_holds_something_is_not_overwritten(finished, capsys):
    before = (finished / "metrics.jsonl").read_text()
    assert train.main(flags(out=finished)) == 2
    assert "is not empty: add --resume" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


# ---- going back ----------------------------------------------------------------------------------


def test_going_back_brings_weights_moments_and_logs_to_the_checkpoint(tmp_path):
    config = small(steps=3)
    train.train(config, tmp_path / "run")
    kept = metrics(tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "time": 9}\n{"step": 5, "tim')
    run = Run(config)
    folder = Folder(tmp_path / "run", run)
    progress = folder.go_back()
    assert progress == Progress(3, kept[-1]["time"], kept)
    assert metrics(tmp_path / "run") == kept
    state = load_checkpoint(tmp_path / "run" / "checkpoint")
    assert_equal(trained_weights(run.model), state["model"])
    moments = run.learner.optimizer.state
    for name, weight in run.model.named_parameters():
        for kind, moment in state["optimizer"]["state"][name].items():
            assert torch.equal(moments[weight][kind], moment), (name, kind)
    # The sampler acts on these weights too.
    torch.testing.assert_close(log_probs(run.sampler.model), log_probs(run.model), rtol=0, atol=0)


def test_a_checkpoint_before_the_first_update_has_no_moments(tmp_path):
    run = Run(small())
    folder = Folder(tmp_path / "run", run)
    folder.begin(folder.create())
    folder.save(Progress(2, 1.0))
    assert "optimizer" not in load_checkpoint(tmp_path / "run" / "checkpoint")
    assert not run.learner.optimizer.state
    folder.lock.close()
    again = Run(small())
    assert Folder(tmp_path / "run", again).go_back().step == 2
    assert not again.learner.optimizer.state


def test_a_checkpoint_with_an_adapter_holds_only_what_trains(tmp_path):
    train.train(small(steps=2, lora_rank=4, merge=True), tmp_path / "run")
    state = load_checkpoint(tmp_path / "run" / "checkpoint")
    assert state["model"] and all(".lora_" in name for name in state["model"])
    assert set(state["optimizer"]["state"]) == set(state["model"])
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert "adapter_config.json" in names and "model.safetensors" not in names
    adapter = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged")
    torch.testing.assert_close(log_probs(adapter), log_probs(merged), atol=1e-4, rtol=0)


def test_the_checkpoint_of_another_model_is_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(InputError, match="is of another model"):
        Folder(tmp_path / "run", Run(small(lora_rank=4))).go_back()


def test_what_cannot_be_resumed_says_so_and_loses_nothing(finished, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = (out / "metrics.jsonl").read_text()
    for path in checkpoints(out / "checkpoint"):
        path.write_bytes(b"damaged")

    def is_refused() -> None:
        assert train.main(["--resume", "--out", str(out), "--steps", "8"]) == 2
        assert "no checkpoint that can be read" in capsys.readouterr().err
        assert (out / "metrics.jsonl").read_text() == before
        assert json.loads((out / "config.json").read_text())["steps"] == 6

    is_refused()
    for removed in ("checkpoint", "model"):  # six steps are too many if every second one is saved
        shutil.rmtree(out / removed)
        is_refused()


def test_folders_that_cannot_be_written_are_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in ("/proc/run", tmp_path / "file" / "run", tmp_path / "file"):
        assert train.main(flags(out=out)) == 1
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "train.py: " in line]
        assert str(out) in line
