"""What a run leaves on disk, and how it goes on: logs, lock, checkpoints, models.

    folder = Folder(out, run)
    progress = folder.create()          # a new run; or
    progress = folder.go_back()         # an interrupted one, back at its newest checkpoint
    folder.begin(progress)              # the tracker, config.json
    folder.log(progress, row, **logs)   # metrics.jsonl, groups.jsonl, ..., the tracker
    folder.save(progress)               # checkpoint/step_000020.pt; the one before it stays
    folder.finish(progress)             # that, and model/ (and merged/) for from_pretrained

A process may be killed at any moment, a disk may be full, two commands may be given at once. So
files are renamed when they are whole, logs are cut back to the checkpoint where a run goes on, and
a lock keeps others out (not on Windows, which has no `fcntl`). The first process alone writes.
"""

import dataclasses
import itertools
import json
import os
import pickle
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from support.errors import InputError, say
from support.models import is_adapter
from support.page import page_of
from support.run import Run
from support.settings import Config

try:
    import fcntl
except ImportError:
    fcntl = None

LOGS = ("metrics", "groups", "rollouts")  # NAME.jsonl: rows that have a step


@dataclass
class Progress:
    """How far a run has come."""

    step: int = 0
    time: float = 0.0  # training seconds since the start, evaluation excluded
    rows: list[dict] = field(default_factory=list)  # of metrics.jsonl

    def is_over(self, config: Config) -> bool:
        """Whether --steps or --minutes are over."""
        by_steps = config.steps is not None and self.step >= config.steps
        return by_steps or (config.minutes is not None and self.time >= 60 * config.minutes)


class Folder:
    """The folder (`path`: --out) of one run, of which it uses nearly everything."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = Path(path), run
        self.processes, self.config = run.processes, run.config
        self._send, self._close = lambda row: None, lambda: None  # no tracker

    def create(self) -> Progress:
        """Make the folder of a new run; InputError if it is in use, or holds something already."""

        def make() -> None:
            out = self.path
            if out.exists() and any(path.name != "lock" for path in out.iterdir()):
                raise InputError(f"--out {out} is not empty: add --resume to go on with a run")
            out.mkdir(parents=True, exist_ok=True)
            self._lock()

        self.processes.on_first(make)
        return Progress()

    def _lock(self) -> None:
        """Keep others from writing here: the same command given twice, a killed launcher's orphans.

        The system takes the lock back when this process ends, however it ends.
        """
        self.lock = open(self.path / "lock", "a")  # noqa: SIM115, it is held as long as the run is
        reason = "the system has none"
        try:
            if fcntl:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        except BlockingIOError as error:
            message = f"--out {self.path}: another process is still writing there"
            raise InputError(message) from error
        except OSError as error:  # NFS, Lustre
            reason = error.strerror
        say(f"--out {self.path}: no lock ({reason}), run one command at a time there")

    def begin(self, progress: Progress) -> None:
        """Start the tracker, write config.json: last, so that what failed can be given again."""
        settings = dataclasses.asdict(self.config)
        if self.config.tracker != "none":
            from support.trackers import connect  # most runs have none

            next_step = progress.step + 1 if progress.rows else 0
            work = partial(connect, self.config.tracker, self.path, settings, next_step)
            if tracker := self.processes.on_first(work, send=False):
                self._send, self._close = tracker
        text = json.dumps(settings, indent=1)
        self.processes.on_first(partial(write_atomically, self.path / "config.json", text))

    def go_back(self) -> Progress:
        """Bring model, optimizer and logs to the newest checkpoint, or to the very beginning.

        InputError: what is there is damaged, of another model, or being written by another.
        """
        # Weights are too large to be sent as an object: they stay with the first process.
        state = self.processes.on_first(self._newest_checkpoint, send=False) or {}
        found = self.processes.on_first(partial(self._cut_logs, state))
        before, now = found["processes"], self.processes.count
        if before != now:
            changed = f"the run had {before} process(es) and goes on with {now}"
            print(f"{changed}: it sees other prompts and rollouts than it would have seen")
        for name, digest in self.run.data_digests().items():
            if found["data"].get(name, digest) != digest:
                say(f"--resume: prompts, answers or code ({name}) have changed since the run began")
        self.run.sampler.sleep()  # its memory is the checkpoint's until the sync
        if found["weights"]:
            self.run.learner.set_state(state)
        self.run.sampler.sync(self.run.model)
        return Progress(found["step"], found["time"], found["rows"])

    def _newest_checkpoint(self) -> dict:
        """The newest checkpoint that can be read; without weights if there has not been one yet."""
        self._lock()
        state = load_checkpoint(self.path / "checkpoint")
        if state is None:
            save_every = json.loads((self.path / "config.json").read_text())["save_every"]
            rows = read_rows(self.path / "metrics.jsonl")
            # Up to two steps that fail put off the first checkpoint.
            late = bool(rows) and rows[-1]["step"] > save_every + 2
            if late or (self.path / "model").exists() or checkpoints(self.path / "checkpoint"):
                raise InputError(
                    f"--resume: {self.path} holds no checkpoint that can be read: start a new run "
                    "in another --out"
                )
            return {"step": 0, "time": 0.0, "processes": self.processes.count, "data": {}}
        trained = {name: weight.shape for name, weight in self.run.learner.trained.items()}
        if {name: weight.shape for name, weight in state["model"].items()} != trained:
            raise InputError(f"--resume: the checkpoint in {self.path} is of another model")
        return state

    def _cut_logs(self, state: dict) -> dict:
        """Drop what was logged after the checkpoint: those steps are done again.

        Returns what every process must know of it; `rows` are those of metrics.jsonl.
        """
        rows, last = {}, state["step"] if "model" in state else -1
        for name in LOGS:
            path = self.path / f"{name}.jsonl"
            rows[name] = [row for row in read_rows(path) if row["step"] <= last]
            write_atomically(path, "".join(map(json_line, rows[name])))
        known = {name: state[name] for name in ("step", "time", "processes", "data")}
        return known | {"weights": "model" in state, "rows": rows["metrics"]}

    def log(self, progress: Progress, row: dict, **others: Sequence[dict]) -> None:
        """Append a row to metrics.jsonl and `others` to files of LOGS; send it to the tracker."""
        progress.rows.append(row)

        def write() -> None:
            for name, rows in {"metrics": [row], **others}.items():
                append_rows(self.path / f"{name}.jsonl", rows)
            self._send(row)

        self.processes.on_first(write)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and the page so far; the checkpoint before stays, as a reserve."""
        state = {"step": progress.step, "time": progress.time, "processes": self.processes.count}
        state |= {"data": self.run.data_digests()} | self.run.learner.state()

        def write() -> None:
            save_checkpoint(state, self.path / "checkpoint")
            write_atomically(self.path / "view.html", page_of(self.path))

        self.processes.on_first(write)

    def finish(self, progress: Progress) -> None:
        """Write a checkpoint and the models, send what the tracker has left, let others write."""
        self.save(progress)
        self.save_models()
        self._close()
        if self.processes.first:
            self.lock.close()

    def save_models(self) -> None:
        """model/, and merged/ if it is asked for. An adapter is written without its model."""
        learner, config = self.run.learner, self.config
        if not config.lora_rank:
            self._save_model("model", learner.model, learner.model.state_dict().items())
            return
        from support.adapters import merged_weights  # most runs have none

        base = learner.model.get_base_model()
        if is_adapter(config.model):
            # An adapter on top of an adapter is no folder that anyone could load.
            self._save_model("model", base, merged_weights(learner.model))
        else:
            self._save_model("model", learner.model, learner.trained.items())
        if config.merge:
            self._save_model("merged", base, merged_weights(learner.model))

    def _save_model(self, name: str, model: nn.Module, weights: Iterable) -> None:
        """Write a model to a folder of the run. `weights` may be in parts on several processes."""
        names = {name for name, _ in model.named_parameters()}
        # Tied weights are written once.
        twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        whole_weights = self.processes.gathered(pair for pair in weights if pair[0] not in twice)
        to = self.path / name
        self.processes.on_first(partial(save_model, model, self.run.tokenizer, to, whole_weights))


# ---- files that are whole or not there -----------------------------------------------------------


def new_folder(parent: Path = Path("runs")) -> Path:
    """A folder of its own, named by the time; runs begun in one second are numbered."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes `path`: errors name the file, which a full disk's does not."""
    try:
        yield
    # torch hides a full disk behind a RuntimeError, safetensors raises its own.
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # torch hides that, too
            raise error.__context__ from None
        cause = error if isinstance(error, OSError) else error.__context__ or error
        reason = getattr(cause, "strerror", None) or cause
        raise OSError(f"cannot write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name to write under: what is there becomes `path` when all of it is written."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            yield temporary
            if path.is_dir():
                shutil.rmtree(path)
            os.replace(temporary, path)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that no reader, and no crash, sees half of it."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def save_checkpoint(state: dict, folder: Path) -> None:
    """Write a checkpoint; of those before it the newest stays, as a reserve."""
    with replacing(folder / f"step_{state['step']:06}.pt") as temporary:
        folder.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    for old in checkpoints(folder)[:-2]:
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
    """Write a folder that `from_pretrained` loads, with the model's own `weights` or others."""
    with replacing(folder) as temporary:
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)


def json_line(row: dict) -> str:
    """A row as a line of JSON, which has no NaN and no infinity: null stands for them."""
    return json.dumps(json.loads(json.dumps(row), parse_constant=lambda name: None)) + "\n"


def append_rows(path: Path, rows: Iterable[dict]) -> None:
    """Add lines to a JSONL file, which a kill may leave with half a line at its end."""
    with writing(path), open(path, "a") as file:
        file.writelines(map(json_line, rows))


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL file, without half a line at its end; none if it is missing.

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
