"""Experiment trackers: a run's metrics, sent where a team looks at them.

    tracker = start("tensorboard", processes, folder, settings)
    tracker.log({"reward": 0.4, "seconds": {"update": 0.1}}, step=1)
    tracker.close()

Each through its own few calls; "none" is one that does nothing, so that the loop need not ask.
"""

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from support.errors import InputError
from support.processes import Processes

PROJECT = "pods"
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio"}


def check(name: str) -> None:
    """Raise InputError for a tracker whose package is not installed."""
    if name != "none" and importlib.util.find_spec(PACKAGES[name]) is None:
        raise InputError(f"--tracker {name} is not installed: pip install {PACKAGES[name]}")


def start(name: str, processes: Processes, folder: Path, settings: dict) -> "Tracker":
    """A tracker that has been told the settings; of several processes only the first one's sends.

    Raises:
        InputError: it refuses: no account, no network.
    """

    def started() -> Tracker:
        try:
            if name == "none":
                return Tracker()
            if name == "tensorboard":
                return TensorBoard(folder, settings)
            return Service(importlib.import_module(PACKAGES[name]), settings)
        except Exception as error:  # each raises its own
            raise InputError(f"--tracker {name}: {error}") from error

    return processes.on_first(started, send=False) or Tracker()


class Tracker:
    """One that does nothing."""

    def log(self, row: dict, step: int) -> None:
        """Send the numbers of one step."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard(Tracker):
    """Event files in the run's folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, settings: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / PROJECT))
        text = "".join(f"    {name}: {value}\n" for name, value in settings.items())
        self.writer.add_text("settings", text)

    def log(self, row: dict, step: int) -> None:
        for name, value in flat(row).items():
            self.writer.add_scalar(name, value, global_step=step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Service(Tracker):
    """Weights & Biases, or Trackio, which has the same calls."""

    def __init__(self, package: ModuleType, settings: dict) -> None:
        self.package = package
        package.init(project=PROJECT, config=settings)

    def log(self, row: dict, step: int) -> None:
        self.package.log(flat(row), step=step)

    def close(self) -> None:
        self.package.finish()


def flat(row: dict, prefix: str = "") -> dict[str, float]:
    """The row's numbers under names like seconds/update, as trackers want them."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            numbers[prefix + name] = value
    return numbers
