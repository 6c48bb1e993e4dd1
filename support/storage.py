"""What a run leaves on disk, and how it goes on: logs, lock, checkpoints, models.

    folder = Folder(out, run)
    progress = folder.create()          # a new run; or
    progress = folder.go_back()         # an interrupted one, back at its newest checkpoint
    folder.begin(progress)              # the tracker, config.json
    folder.log(progress, row, **logs)   # metrics.jsonl, groups.jsonl, ..., the tracker
    folder.save(progress)               # checkpoint/step_000020.pt; the one before it stays
    folder.finish(progress)             # that, and model/ (and merged/) for from_pretrained

A process may be killed at any moment, a disk may be full, two commands may be given at once. So
files are renamed when they are whole (files.py), logs are cut back to the checkpoint where a run
goes on, and a lock keeps others out. Of several processes the first one writes.

Windows has no `fcntl`, and so no lock there; that is said. It was not tried itself, only a small
run on Linux with `fcntl` and `resource` hidden.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn

from support import files
from support.errors import InputError, say
from support.models import is_adapter
from support.page import write_page
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
    """The folder of one run.

    Args:
        path: --out.
        run: whose folder it is: processes, config, learner, tokenizer and sampler are used.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = Path(path), run
        self.processes, self.config = run.processes, run.config
        self._tracker = None

    # -- the beginning

    def create(self) -> Progress:
        """Make the folder of a new run; InputError if it is in use, or holds something already."""
        self.processes.on_first(self._create)
        return Progress()

    def _create(self) -> None:
        if self.path.exists() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(f"--out {self.path} is not empty: add --resume to go on with a run")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()

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
            self._tracker = self.processes.on_first(work, send=False)
        text = json.dumps(settings, indent=1)
        self.processes.on_first(partial(files.write_atomically, self.path / "config.json", text))

    def go_back(self) -> Progress:
        """Bring model, optimizer and logs to the newest checkpoint, or to the very beginning.

        Raises:
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
        """The newest checkpoint that can be read; empty if the run was killed before its first."""
        self._lock()
        state = files.load_checkpoint(self.path / "checkpoint")
        if state is None:
            if self._has_saved():
                raise InputError(
                    f"--resume: {self.path} holds no checkpoint that can be read: start a new run "
                    "in another --out"
                )
            return {}
        trained = {name: weight.shape for name, weight in self.run.learner.trained.items()}
        if {name: weight.shape for name, weight in state["model"].items()} != trained:
            raise InputError(f"--resume: the checkpoint in {self.path} is of another model")
        return state

    def _has_saved(self) -> bool:
        """Whether the run has had a checkpoint. Up to two steps that fail put off the first one."""
        settings = json.loads((self.path / "config.json").read_text())
        rows = files.read_rows(self.path / "metrics.jsonl")
        if rows and rows[-1]["step"] > settings["save_every"] + 2:
            return True
        return (self.path / "model").exists() or bool(files.checkpoints(self.path / "checkpoint"))

    def _cut_logs(self, state: dict) -> dict:
        """Drop what was logged after the checkpoint: those steps are done again.

        Returns:
            What every process must know of the checkpoint: whether it has `weights`; its `step`,
            `time`, number of `processes` and `data`; the `rows` up to it.
        """
        rows, last = {}, state.get("step", -1)
        for name in LOGS:
            path = self.path / f"{name}.jsonl"
            rows[name] = [row for row in files.read_rows(path) if row["step"] <= last]
            files.write_atomically(path, "".join(map(files.json_line, rows[name])))
        known = {"step": 0, "time": 0.0, "processes": self.processes.count, "data": {}}
        known |= {name: state[name] for name in known if name in state}
        return known | {"weights": bool(state), "rows": rows["metrics"]}

    # -- while it runs

    def log(self, progress: Progress, row: dict, **others: Sequence[dict]) -> None:
        """Append a row to metrics.jsonl, and send it to the tracker.

        Args:
            others: rows of other files, by their name in LOGS.
        """
        progress.rows.append(row)

        def write() -> None:
            for name, rows in {"metrics": [row], **others}.items():
                files.append_rows(self.path / f"{name}.jsonl", rows)
            if self._tracker:
                send, _ = self._tracker
                send(row)

        self.processes.on_first(write)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint, and the page so far; the checkpoint before stays, as a reserve."""
        state = {"step": progress.step, "time": progress.time, "processes": self.processes.count}
        state |= {"data": self.run.data_digests()} | self.run.learner.state()
        self.processes.on_first(partial(files.save_checkpoint, state, self.path / "checkpoint"))
        self.processes.on_first(partial(write_page, self.path))

    # -- the end

    def finish(self, progress: Progress) -> None:
        """Write a checkpoint and the models, send what the tracker has left, let others write."""
        self.save(progress)
        self.save_models()
        if self._tracker:
            _, close = self._tracker
            close()
        if self.processes.first:
            self.lock.close()

    def save_models(self) -> None:
        """model/, and merged/ if it is asked for. An adapter is written without its model."""
        learner, config = self.run.learner, self.config
        if config.lora_rank:
            from support.adapters import merged_weights  # most runs have none

            base = learner.model.get_base_model()
        if not config.lora_rank:
            self._save_model("model", learner.model, learner.model.state_dict().items())
        elif is_adapter(config.model):
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
        work = partial(files.save_model, model, self.run.tokenizer, self.path / name, whole_weights)
        self.processes.on_first(work)
