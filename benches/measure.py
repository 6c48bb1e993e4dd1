"""How the benches measure and report: in turn, repeated, with the spread, beside the machine.

    times = interleaved({"a": f, "b": g}, rounds=7)         # seconds a call, measured in turn
    ratio(times, "a", "b")                                  # [median, lower, upper quartile]
    for result in in_processes(2, function, items): ...     # in new processes, two at a time
    print(table("title", rows))

A number from one machine on one day says little, a ratio says more, and a ratio of two things timed
in turn in the same process says most: whatever slows the machine down then hits both.
"""

import json
import math
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from support.files import write_atomically


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, least: float = 0.002
) -> dict[str, list[float]]:
    """Seconds a call of each function, measured in turn, `rounds` times.

    A first call of each warms up caches and finds how many calls make `least` seconds, so that the
    clock's own cost does not show. Round i of every function belongs together: see `ratio`.
    """
    calls = {}
    for name, function in functions.items():
        seconds = min(seconds_of(function, 1), seconds_of(function, 1))
        calls[name] = max(1, math.ceil(least / max(seconds, 1e-9)))
    times = {name: [] for name in functions}
    for _ in tqdm(range(rounds), unit="round", leave=False, disable=None):
        for name, function in functions.items():
            times[name].append(seconds_of(function, calls[name]))
    return times


def seconds_of(function: Callable[[], object], calls: int) -> float:
    """Seconds a call, a GPU's work included."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def peak_bytes() -> int:
    """The most memory ever held: by torch's allocator on a GPU, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # Linux's getrusage would count what the parent process held, too
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status.read_text()).group(1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on macOS, else KiB


def ratio(times: dict[str, list[float]], numerator: str, denominator: str) -> list[float]:
    """The ratio of two functions' times: [median, lower quartile, upper quartile] over rounds.

    Each round gives one ratio of neighbours in time, so slow minutes of the machine cancel.
    """
    ratios = [a / b for a, b in zip(times[numerator], times[denominator], strict=True)]
    low, median, high = quartiles(ratios)
    return [median, low, high]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


# ---- processes -----------------------------------------------------------------------------------


def in_processes(count: int, function: Callable, items: Sequence) -> Iterator:
    """`function` of each item, in order, computed by `count` new processes at a time.

    They have imported what it needs and done nothing yet.
    """
    # Its server imports once; a fork of *this* process would share its past.
    context = get_context("forkserver")
    context.set_forkserver_preload(["__main__", "train"])
    with ProcessPoolExecutor(count, context, initializer=start_process) as pool:
        # Not pool.map: it cancels what has not begun, of which a pool that was ended complains.
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            # Ctrl-C, here or where the results are used: do not wait for the rest.
            for process in active_children():
                process.terminate()
            raise


def start_process() -> None:
    """No progress bars of models, and one thread, which is what train.py chooses for its small one.

    Ctrl-C reaches this process too, but it is the first one that ends the others.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)


# ---- reporting -----------------------------------------------------------------------------------


def table(title: str, rows: Sequence[dict]) -> str:
    """Rows of equal keys as aligned text; three digits; [a, low, high] as a (low-high)."""
    cells = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
    return "\n".join(["", title, *lines])


def shown(value: object) -> str:
    """One cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        if value[0] is None:
            return "never"
        return f"{shown(value[0])} ({shown(value[1])}-{shown(value[2])})"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def write(folder: Path, name: str, command: str, result: dict) -> Path:
    """`FOLDER/NAME.json`: the result with its command and machine."""
    path = folder / f"{name}.json"
    head = {"bench": name, "command": command, "machine": machine()}
    write_atomically(path, json.dumps(head | result) + "\n")
    return path


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        name = found.group(1) if found else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],  # runnable processes: above `cores`, others were working too
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def new_figure(columns: int, height: float = 4.2):
    """A figure with a row of axes; without pyplot, so there is no window and no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]
