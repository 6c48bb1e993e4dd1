r"""Verdicts on many answers at once, and the trainer's end of the pipe to the process for algebra.

    judge([("0.5", r"\frac{1}{2}"), ("7", "8")])   # [True, False]
    are_gradable(["5", r"\sqrt{}+"])               # [True, False]

Nearly everything is settled in this process, in microseconds, by `grading.equality`. What needs
math-verify is asked of `grading.algebra`, in one batch; equal questions are asked once, and
verdicts are remembered, so that a step costs what its new and different answers cost. A verdict
depends on its pair alone: not on the batch, the order, or what else the machine is doing.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grading.equality import NeedsAlgebra, equal, gradable, is_tame
from grading.spelling import normalise

REMEMBERED = 50_000  # verdicts; the oldest are forgotten
SILENCE_SECONDS = 120  # a server that says nothing for so long is dead, not slow

Pair = tuple[str | None, str]
_memory: dict[Pair, bool] = {}
_counts: Counter = Counter()


def judge(pairs: Sequence[Pair]) -> list[bool]:
    """For each answer and its reference whether they are equal; an answer of None is wrong.

    Raises:
        RuntimeError: math-verify is needed and cannot be started.
    """
    known = {pair: _memory[pair] for pair in dict.fromkeys(pairs) if pair in _memory}
    questions = []
    for pair in dict.fromkeys(pairs):
        if pair not in known:
            verdict = _without_algebra(*pair)
            if verdict is None:
                questions.append(pair)
            else:
                known[pair] = _remember(pair, verdict)
    for pair, verdict in zip(questions, _server.ask(questions), strict=True):
        known[pair] = verdict == "1"
        if verdict != LOST:
            _remember(pair, known[pair])
    return [known[pair] for pair in pairs]


def _without_algebra(answer: str | None, gold: str) -> bool | None:
    if answer is None:
        return False
    try:
        return equal(answer, gold)
    except RecursionError:  # lists in lists in lists
        return False
    except NeedsAlgebra:
        if all(is_tame(normalise(text)) for text in (answer, gold)):
            return None
        _counts["refused"] += 1
        return False


def _remember(pair: Pair, verdict: bool) -> bool:
    if len(_memory) >= REMEMBERED:
        _memory.pop(next(iter(_memory)), None)
    _memory[pair] = verdict
    return verdict


def are_gradable(answers: Sequence[str]) -> list[bool]:
    """Which references can be compared with: neither blank, nor cut, nor unfinished.

    Decided from the text alone, so a data set is the same in every process and every run.
    """
    return [gradable(answer) for answer in answers]


def is_gradable(answer: str) -> bool:
    """Whether a reference can be compared with."""
    return gradable(answer)


def grader_stats() -> dict[str, int]:
    """Counts since the start, to tell a failing grader from a failing policy.

    `algebra`: questions to math-verify; `failed`: those of them that ran out of time or memory or
    raised, and scored 0; `refused`: scored 0 unseen, as too big; `restarted`: dead servers.
    """
    return {name: _counts[name] for name in ("algebra", "failed", "refused", "restarted")}


LOST = "lost"  # the verdict on a question over which the server died, twice


class _Server:
    """Starts the process when first needed, and again when it has died."""

    def __init__(self) -> None:
        self.lock, self.process = threading.Lock(), None

    def ask(self, questions: Sequence[tuple[str, str]]) -> list[str]:
        """For each question "1", "0", "x" if it was given up, or `LOST`."""
        verdicts = dict.fromkeys(range(len(questions)), LOST)
        with self.lock:
            for _ in range(2):
                missing = [index for index, verdict in verdicts.items() if verdict == LOST]
                if not missing:
                    break
                try:
                    self._exchange(missing, questions, verdicts)
                except (BrokenPipeError, TimeoutError):
                    self.stop()
                    _counts["restarted"] += 1
                except BaseException:  # Ctrl-C: replies on their way would be the next call's
                    self.stop()
                    raise
            _counts["algebra"] += len(questions)
            _counts["failed"] += sum(verdict in ("x", LOST) for verdict in verdicts.values())
        return list(verdicts.values())

    def _exchange(self, missing: list[int], questions: Sequence, verdicts: dict) -> None:
        if self.process is None:
            self._start()
        request = (json.dumps([questions[index] for index in missing]) + "\n").encode()
        while request:
            request = request[self.process.stdin.write(request) :]
        for _ in missing:
            index, verdict = self._receive(SILENCE_SECONDS).split()
            verdicts[missing[int(index)]] = verdict

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grading.algebra"],
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # no buffers and no locks of their own, which a fork would copy half full
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        try:
            self._receive(seconds=300)
        except (BrokenPipeError, TimeoutError) as error:
            self.stop()
            raise RuntimeError("the grader did not start: pip install math-verify") from error

    def _receive(self, seconds: float) -> str:
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise TimeoutError
        line = self.process.stdout.readline().decode()
        if not line.endswith("\n"):
            raise BrokenPipeError
        return line.strip()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.leave()

    def leave(self) -> None:
        """Closes this process's ends of the pipes; the server ends when every process has."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


_server = _Server()
atexit.register(_server.stop)


def _after_fork() -> None:
    """A forked child talks to a server of its own: two on one pipe would mix up their verdicts."""
    _server.leave()
    _server.__init__()


os.register_at_fork(after_in_child=_after_fork)
