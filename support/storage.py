"""What a run leaves on disk, and how it goes on: logs, lock, checkpoints, models.

    folder = Folder(out, run)
    folder.create()                     # a new run; or
    progress = folder.go_back()         # an interrupted one, back at its newest checkpoint
    folder.log(row, rollouts)           # metrics.jsonl, rollouts.jsonl
    folder.save(progress)               # checkpoint/step_000020.pt; the one before it stays
    folder.save_models()                # model/ (and merged/), for from_pretrained

A process may be killed at any moment, a disk be full, two commands be given at once. So everything
is written under another name first and then renamed, logs are cut back to the checkpoint where a
run goes on, and a lock keeps others out. Of several processes the first one writes.
"""

import dataclasses
import fcntl
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from logprobs import whole
from support.adapters import is_adapter, merged_weights
from support.errors import InputError, say
from support.files import (
    json_line,
    load_checkpoint,
    read_rows,
    save_checkpoint,
    save_model,
    write_atomically,
)
from support.run import Run
from support.settings import Config


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
        run: what it is the folder of: processes, config, learner, tokenizer and sampler are used.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = Path(path), run
        self.processes, self.config = run.processes, run.config

    # -- the beginning

    def create(self) -> Progress:
        """Make the folder of a new run; InputError if it is in use, or holds something already."""
        self.processes.on_first(self._create)
        return Progress()

    def _create(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is a file: name a folder")
        if self.path.exists() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(f"--out {self.path} is not empty: add --resume to go on with a run")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock()

    def _lock(self) -> None:
        """Keep others from writing here: the same command given twice, a killed launcher's orphans.

        The system takes the lock back when this process ends, however it ends.
        """
        self.lock = open(self.path / "lock", "a")  # noqa: SIM115, it is held as long as the run is
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"--out {self.path}: another process is still writing there"
            ) from error
        except OSError as error:  # NFS, Lustre
            say(f"--out {self.path}: no lock ({error.strerror}), run one command at a time there")

    def write_settings(self) -> None:
        """config.json. After all that can fail, so that the command can be given again."""
        text = json.dumps(dataclasses.asdict(self.config), indent=1)
        self.processes.on_first(partial(write_atomically, self.path / "config.json", text))

    def go_back(self) -> Progress:
        """Bring model, optimizer and logs to the newest checkpoint, or to the very beginning.

        Raises:
            InputError: what is there is damaged, of another model, or being written by another.
        """
        # Weights are too large to be sent as an object: they stay with the first process.
        state = self.processes.on_first(self._newest_checkpoint, send=False)
        found = self.processes.on_first(partial(self._cut_logs, state))
        before, now = found["processes"] or self.processes.count, self.processes.count
        if before != now:
            print(f"the run had {before} process(es) and goes on with {now}: from here on it sees")
            print("other prompts and rollouts than it would have seen")
        for name, digest in self.run.data_digests().items():
            if (found["data"] or {}).get(name, digest) != digest:  # older checkpoints have none
                say(f"--resume: prompts, answers or code ({name}) have changed since the run began")
        if found["weights"]:
            self._set_state(state or {}, found["moments"])
        self.run.sampler.sync(self.run.model)
        return Progress(found["step"], found["time"], found["rows"])

    def _newest_checkpoint(self) -> dict:
        """The newest checkpoint that can be read; empty if there is none."""
        self._lock()
        state = load_checkpoint(self.path / "checkpoint") or {}
        shapes = {name: tuple(weight.shape) for name, weight in state.get("model", {}).items()}
        if state and shapes != self.run.learner.trained():
            raise InputError(f"--resume: the checkpoint in {self.path} is of another model")
        return state

    def _cut_logs(self, state: dict) -> dict:
        """Drop what was logged after the checkpoint: those steps are done again.

        Returns:
            What every process must know of the checkpoint: whether it has `weights` and AdamW's
            `moments`; its `step`, `time`, number of `processes` and `data`; the `rows` up to it.
        """
        last = state.get("step", -1)
        lost = [row["step"] for row in read_rows(self.path / "metrics.jsonl") if row["step"] > last]
        finished = (self.path / "model").exists()
        settings = json.loads((self.path / "config.json").read_text())  # so far
        save_every = settings.get("save_every", Config.save_every)
        # Steps that fail put off the first checkpoint, but three in a row end the run.
        if not state and lost and (finished or max(lost) > save_every + 2):
            raise InputError(
                f"--resume: {self.path} holds {max(lost)} steps and no checkpoint that can be "
                "read: start a new run in another --out"
            )
        left = {}
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            left[name] = [row for row in read_rows(self.path / name) if row["step"] <= last]
            write_atomically(self.path / name, "".join(map(json_line, left[name])))
        return {
            "weights": bool(state),
            "moments": "optimizer" in state,
            "step": state.get("step", 0),
            "time": state.get("time", 0.0),
            "processes": state.get("processes"),
            "data": state.get("data"),
            "rows": left["metrics.jsonl"],
        }

    # -- while it runs

    def log(self, row: dict, rollouts: Sequence[dict] = ()) -> None:
        """Append a row to metrics.jsonl, and some to rollouts.jsonl."""

        def write() -> None:
            for name, new in (("metrics.jsonl", [row]), ("rollouts.jsonl", rollouts)):
                with open(self.path / name, "a") as file:
                    file.writelines(json_line(line) for line in new)

        self.processes.on_first(write)

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; the one before it stays, as a reserve."""
        state = {"step": progress.step, "time": progress.time, "processes": self.processes.count}
        state |= {"data": self.run.data_digests()} | self._state()
        self.processes.on_first(partial(save_checkpoint, state, self.path / "checkpoint"))

    def _state(self) -> dict:
        """Trained weights and optimizer, whole, on the first process; empty on the others."""
        model, optimizer = self.run.learner.model, self.run.learner.optimizer
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        # Tied weights come under both names; the one that is no parameter's has no need to be kept.
        trained = self.run.learner.trained()
        weights = get_model_state_dict(model, options=options)
        state = {"model": {name: weights[name] for name in weights if name in trained}}
        # Before its first step an optimizer has no moments: asking would make a step, and count it.
        if optimizer.state:
            state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
        return state

    def _set_state(self, state: dict, moments: bool) -> None:
        """The reverse of `_state`: the first process has it, and sends the others their part."""
        model, optimizer = self.run.learner.model, self.run.learner.optimizer
        options = StateDictOptions(
            full_state_dict=True,
            broadcast_from_rank0=self.processes.count > 1,
            strict=False,  # frozen weights are not in it
        )
        set_model_state_dict(model, state.get("model", {}), options=options)
        if moments:
            set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)

    # -- the models

    def save_models(self) -> None:
        """model/, and merged/ if it is asked for."""
        model, config = self.run.learner.model, self.config
        base = model.get_base_model() if config.lora_rank else None
        if base is not None and is_adapter(config.model):
            # An adapter on top of an adapter is no folder that anyone could load.
            self._save_model("model", base, merged_weights(model))
        else:
            self._save_model("model", model, model.state_dict().items())
        if config.merge:
            self._save_model("merged", base, merged_weights(model))

    def _save_model(self, name: str, model: nn.Module, weights: Iterable) -> None:
        """Write a model to a folder of the run. `weights` may be in parts on several processes."""
        names = {name for name, _ in model.named_parameters()}
        twice = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
        whole_weights, trained = {}, self.run.learner.trained()
        for key, weight in weights:
            # With an adapter only that is written. Tied weights are written once.
            frozen = self.config.lora_rank and key in names and key not in trained
            if key in twice or (frozen and model is self.run.learner.model):
                continue
            weight = whole(weight).cpu()  # not all of them at once in the memory of a GPU
            if self.processes.first:
                whole_weights[key] = weight
        work = partial(save_model, model, self.run.tokenizer, self.path / name, whole_weights)
        self.processes.on_first(work)
