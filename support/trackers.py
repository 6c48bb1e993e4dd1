"""Experiment trackers: a run's metrics, sent where a team looks at them.

    send, close = connect("tensorboard", folder, settings, next_step=0)
    send({"step": 1, "reward": 0.4, "seconds": {"update": 0.1}})
    close()

Rows after a resumed run's checkpoint come twice: TensorBoard forgets the first, W&B the second.
"""

import importlib
import uuid
from collections.abc import Callable
from pathlib import Path

from support.errors import InputError


def connect(name: str, folder: Path, settings: dict, next_step: int) -> tuple[Callable, Callable]:
    """What sends a row, and what sends all that is left.

    TensorBoard's files are in the run's folder; for the others a file `tracker` there keeps the
    run's name. InputError: the tracker refuses, for want of an account or a network.
    """
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "pods"), purge_step=next_step)
            lines = [f"    {key}: {value}\n" for key, value in settings.items()]
            writer.add_text("settings", "".join(lines))

            def send(row: dict) -> None:
                for key, value in flat(row).items():
                    writer.add_scalar(key, value, row["step"])
                writer.flush()

            return send, writer.close

        package, known = importlib.import_module(name), folder / "tracker"
        run = known.read_text() if known.exists() else f"{folder.name}-{uuid.uuid4().hex}"
        # W&B knows a run by its id, Trackio by its name.
        identity = {"id": run[-32:]} if name == "wandb" else {}
        package.init(project="pods", config=settings, name=run, resume="allow", **identity)
        known.write_text(run)
        return lambda row: package.log(flat(row), step=row["step"]), package.finish
    except Exception as error:  # each raises its own
        raise InputError(f"--tracker {name}: {error}") from error


def flat(row: dict, prefix: str = "") -> dict[str, float]:
    """The row's numbers under names like seconds/update, as trackers want them."""
    numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            numbers |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            numbers[prefix + name] = value
    return numbers
