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
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nMore."),
            ["Tried to allocate 20 GiB", "--micro-batch", "--m,", "--max-new-tokens"],
            1,
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 B"),
            ["you tried to allocate 9 B", "--micro-batch"],
            1,
        ),
        (
            RuntimeError("the model's logits are not finite: nothing can be sampled from it"),
            ["out of bounds", "lower --lr"],
            2,
        ),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Read error"),
            ["another process has ended"],
            1,
        ),
        (RuntimeError("Connection closed by peer [127.0.0.1]:99"), ["another process has"], 1),
        (torch.distributed.DistBackendError("NCCL error"), ["another process has ended"], 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_the_user_can_mend_is_one_line(error, words, code):
    line, found = explained(error)
    assert found == code
    assert all(word in line for word in words) and "\n" not in line


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("size mismatch, got input (2), mat (2x3)"),
        RuntimeError("the answer is known\nallocate memory"),  # only the first line says what it is
        ValueError("gloo"),
        KeyError("m"),
    ],
    ids=str,
)
def test_a_fault_of_ours_is_not_explained_away(error):
    assert explained(error) is None


def test_a_fault_of_ours_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "update", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError):
        train.main(flags(out=tmp_path / "run"))


@pytest.mark.parametrize("settings", [{"lr": 1e30}, {"lr": 1e20, "lora_rank": 4}])
def test_weights_out_of_bounds_are_one_line(settings, tmp_path, capsys):
    assert train.main(flags(**settings, steps=30, out=tmp_path / "run")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("train.py: ") and "lower --lr" in error
