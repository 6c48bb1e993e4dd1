"""What the user can mend is one line; what only a traceback explains keeps it."""

import pytest
import torch
from conftest import flags

import train
from support.errors import InputError, explained


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (InputError("--m 80 is larger than --n 64"), ["--m 80 is larger than --n 64"], 2),
        (OSError(28, "No space left on device", "model"), ["No space left", "model"], 1),
        (torch.OutOfMemoryError("20 GiB are wanted.\nMore."), ["20 GiB", "--micro-batch"], 1),
        (RuntimeError("can't allocate memory: 9 B"), ["(can't allocate memory: 9 B)", "--m,"], 1),
        (RuntimeError("the model's logits are not finite"), ["out of bounds", "lower --lr"], 2),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Read error"), ["another process"], 1),
        (RuntimeError("Connection closed by peer [127.0.0.1]:99"), ["another process"], 1),
        (torch.distributed.DistBackendError("NCCL error"), ["another process has ended"], 1),
    ],
)
def test_what_the_user_can_mend_is_one_line(error, words, code):
    line, found = explained(error)
    assert found == code
    assert all(word in line for word in words) and "\n" not in line


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    in_its_second_line = RuntimeError("the answer is known\nallocate memory")
    assert explained(in_its_second_line) is explained(ValueError("gloo")) is None
    monkeypatch.setattr(train, "update", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        train.main(flags(out=tmp_path / "run"))


@pytest.mark.parametrize("settings", [{"lr": 1e30}, {"lr": 1e20, "lora_rank": 4}])
def test_weights_out_of_bounds_are_one_line(settings, tmp_path, capsys):
    assert train.main(flags(**settings, steps=30, out=tmp_path / "run")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train.py: ") and "lower --lr" in error
