"""Files that are whole or not there, whenever the program is killed.

write_atomically(path, text)
save_checkpoint(state, folder); state = load_checkpoint(folder)
save_model(model, tokenizer, folder)    # for from_pretrained
append_rows(path, rows)                 # of a JSONL file, which may come to end in half a line:
rows = read_rows(path)
"""

import itertools
import json
import os
import pickle
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from support.errors import InputError


def new_folder(parent: Path = Path("runs")) -> Path:
    """A folder of its own, named by the time; runs begun in one second are numbered."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


def shell(path: Path) -> str:
    """The path as one word of a command, whatever its name has in it."""
    return shlex.quote(str(path))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes `path`: an error says which file it is, which a full disk's does not."""
    try:
        yield
    # torch hides a full disk behind a RuntimeError, safetensors raises its own.
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # torch hides that, too
            raise error.__context__ from None
        cause = error if isinstance(error, OSError) else error.__context__ or error
        reason = getattr(cause, "strerror", None) or cause
        raise OSError(f"cannot write {path}: {reason}") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that no reader, and no crash, sees half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text)
        os.replace(temporary, path)


def save_checkpoint(state: dict, folder: Path) -> None:
    """Write the state under another name first: a kill at any moment leaves a whole file."""
    path = folder / f"step_{state['step']:06}.pt"
    temporary = path.with_suffix(".tmp")
    try:
        with writing(path):
            folder.mkdir(exist_ok=True)
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    for old in checkpoints(folder)[:-2]:  # the one before stays, as a reserve
        old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The files of checkpoints, oldest first."""
    return sorted(folder.glob("step_*.pt"), key=lambda path: int(path.stem.partition("_")[2]))


def load_checkpoint(folder: Path) -> dict | None:
    """The newest checkpoint that can be read, or None."""
    for path in reversed(checkpoints(folder)):
        try:
            return torch.load(path, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            print(f"{path} is damaged; trying the checkpoint before it", file=sys.stderr)
    return None


def save_model(model: nn.Module, tokenizer, folder: Path, weights: dict | None = None) -> None:
    """Write a folder that `from_pretrained` loads, complete or not at all.

    Args:
        weights: by name; default: the model's own.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        with writing(folder):
            model.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def json_line(row: dict) -> str:
    """A row as a line of JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None)) + "\n"


def append_rows(path: Path, rows: Iterable[dict]) -> None:
    """Add lines to a JSONL file."""
    with writing(path), open(path, "a") as file:
        file.writelines(map(json_line, rows))


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file that a killed run may have left in the middle of a line.

    Raises:
        InputError: a line that is not the last is no row, or has no step.
    """
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "step" in row:
                rows.append(row)
        if len(rows) < number < len(lines):
            raise InputError(f"{path}, line {number} is damaged: mend or remove it")
    return rows
