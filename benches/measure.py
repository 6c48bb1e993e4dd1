"""How the benches measure and report: in turn, repeated, with the spread, on a quiet machine.

    times = interleaved({"a": f, "b": g}, rounds=7)         # seconds a call, measured in turn
    ratio(times, "a", "b")                                  # [median, lower, upper quartile]
    print(table("title", rows))

A ratio of two things timed in turn in one process says most: what slows the machine hits both.
"""

import argparse
import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil
import torch
from tqdm import tqdm

from support import presets, settings
from support.errors import InputError
from support.evaluation import evaluate
from support.run import Run
from support.storage import write_atomically

QUIET = 0.5  # cores that other processes may keep busy while something is measured


def train_settings(arguments: argparse.Namespace, *first: str) -> settings.Config:
    """Settings by the flags of train.py after `--`, which count more than the `first` ones."""
    threads = ("--threads", str(arguments.threads))
    config, command = presets.parse([*threads, *first, *arguments.train_flags])
    for name in ("out", "resume", "eval_only", "dry_run"):
        if getattr(command, name, None):
            raise InputError(f"{settings.flag(name)} after --: bench.py trains as it needs to")
    return config


def evaluated(run: Run) -> dict[str, float]:
    """The numbers of an evaluation on the run's first evaluation task."""
    return next(iter(evaluate(run)[0].values()))


def interleaved(functions: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each function, measured in turn `rounds` times; GPUs' work included."""
    times = {name: [] for name in functions}
    for i in tqdm(range(rounds + 1), unit="round", leave=False, disable=None):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if i > 0:  # the first call warms up
                times[name].append(time.perf_counter() - start)
        OTHERS.look()
    return times


def ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> list[float]:
    """The ratio of two functions' times: [median, lower quartile, upper quartile] over rounds.

    Each round gives one ratio of neighbours in time, so slow minutes of the machine cancel.
    """
    ratios = np.divide(times[numerator], times[denominator])
    return np.quantile(ratios, [0.5, 0.25, 0.75]).tolist()


class OtherWork:
    """How many cores others keep busy between two looks: `largest` so far, None before two."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget what was seen so far."""
        self.largest, self.then, self.busy = None, time.monotonic(), busy_seconds()

    def look(self) -> None:
        """Count what others did since the last look, if that is a second ago: a tick is 10 ms."""
        now = time.monotonic()
        if now - self.then < 1.0:
            return
        busy = busy_seconds()
        cores = max(0.0, (busy - self.busy) / (now - self.then))
        self.largest = max(self.largest or 0.0, round(cores, 3))
        self.then, self.busy = now, busy


def busy_seconds() -> float:
    """CPU seconds so far of all processes except the first one of the bench and all it started.

    Time that a hypervisor takes for other guests counts: it slows the bench just as much.
    """
    times = psutil.cpu_times()._asdict()
    for name in ("idle", "iowait", "guest", "guest_nice"):  # a guest's time is in `user` already
        times.pop(name, None)
    busy, parent = sum(times.values()), multiprocessing.parent_process()
    first = psutil.Process(parent.pid if parent else None)
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            busy -= sum(process.cpu_times()[:4])  # its own, and its ended children's
    return busy


OTHERS = OtherWork()  # one for each process


def table(title: str, rows: Sequence[dict]) -> str:
    """Rows of equal keys as aligned text; three digits; [a, low, high] as a (low-high)."""
    cells = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    return "\n".join(["", title, *lines])


def shown(value: object) -> str:
    """One cell of a table."""
    if isinstance(value, list):
        middle, low, high = map(shown, value)
        return "never" if value[0] is None else f"{middle} ({low}-{high})"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return "-" if value is None else str(value)


def write(folder: Path, name: str, command: str, result: dict) -> Path:
    """`FOLDER/NAME.json`: the result with its command, the machine, and other work there."""
    path = folder / f"{name}.json"
    head = {"bench": name, "command": command, "machine": machine(), "other_work": OTHERS.largest}
    write_atomically(path, json.dumps(head | result) + "\n")
    return path


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    name, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())):
        name = found.group(1)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = {"cpu": name, "cores": os.cpu_count(), "gpu": gpu}
    for package in ("torch", "transformers", "peft", "vllm"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"python": platform.python_version(), "date": time.strftime("%Y-%m-%d %H:%M")}
