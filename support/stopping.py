"""Ctrl-C and SIGTERM: the step is finished, all is saved, and all processes stop together."""

import signal
import sys
import threading
import time

from tqdm import tqdm

from support.processes import Processes


class StopSignal:
    """Ctrl-C and SIGTERM, kept until the step is done.

    with StopSignal(processes) as stop:
        while not stop.asked(): ...               # the same answer in all processes

    The first signal asks to finish the step, save and leave; a second one leaves at once.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.number = None  # of the signal that came
        self.time = 0.0  # when
        self.stopped = False  # whether the processes have agreed to stop

    def __enter__(self) -> "StopSignal":
        self.handlers = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in (signal.SIGINT, signal.SIGTERM):
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
        several = self.processes.count > 1
        if self.number is not None:
            # A launcher passes on to its processes the Ctrl-C that they had from the terminal.
            if several and time.monotonic() - self.time < 3:
                return
            raise KeyboardInterrupt
        self.number, self.time = number, time.monotonic()
        if self.processes.first:
            later = ", in 3 seconds or later," if several else ""
            message = f"finishing this step and saving; once more{later} to stop at once"
            tqdm.write(message, file=sys.stderr)
