"""What ends a run early, with everything saved; and what does not end it.

with StopSignal(processes) as stop:     # Ctrl-C, SIGTERM, a closed terminal, a scheduler's warning
    while not stop.asked(): ...         # the same answer in all processes

@lasting_output()                       # a reader that goes away (`| head`) ends nothing
def main(): ...
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from tqdm import tqdm

from support.processes import RANK, Processes

# A closed terminal sends SIGHUP, Slurm warns by SIGUSR1 or SIGUSR2, SIGXCPU says that the limit of
# CPU time is near. Windows has only the first two.
NAMES = "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]


class StopSignal:
    """Keeps a signal until the step is done: it asks to finish the step, save and leave.

    A Ctrl-C that comes second leaves at once. Other signals never do: a closed terminal sends
    SIGHUP twice, and SIGXCPU comes every second. A signal that is ignored (`nohup`), or handled
    outside Python, is left alone.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.number, self.time = None, 0.0  # of the first signal that came
        self.stopped = False  # whether the processes have agreed to stop

    def __enter__(self) -> "StopSignal":
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self.handlers[number] = signal.signal(number, self._caught)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def asked(self) -> bool:
        """Whether to stop. A signal may reach one process only; all stop at the same step."""
        self.stopped = self.processes.any(self.number is not None)
        return self.stopped

    @property
    def exit_code(self) -> int:
        """The shell's convention for a program that ended by this signal."""
        return 128 + (self.number or signal.SIGTERM)

    def _caught(self, number: int, _frame) -> None:
        # A launcher passes on to its processes the Ctrl-C that they had from the terminal.
        wait = 3 if self.processes.count > 1 else 0
        if self.number is None:
            self.number, self.time = number, time.monotonic()
            if self.processes.first:
                later = f", in {wait} seconds or later," if wait else ""
                message = f"finishing this step and saving; Ctrl-C{later} stops at once"
                tqdm.write(message, file=sys.stderr)
        elif number == signal.SIGINT and time.monotonic() - self.time >= wait:
            raise KeyboardInterrupt


class Lasting:
    """A stream of output. Once it cannot be written any more, what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        """Write at once, so that nothing is left for Python to write, and fail, at the end."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # the pipe or the terminal is closed, the disk is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextmanager
def lasting_output() -> Iterator[None]:
    """The program's output inside: of several processes only the first one uses stdout."""
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere if RANK else Lasting(sys.stdout)),
        redirect_stderr(Lasting(sys.stderr)),
    ):
        yield
