r"""Questions of algebra, by math-verify: a process that answers them, and may be killed.

    python -m grading.algebra            # started by `grading.judges`, not by hand

Model output is hostile: a short text can keep a computer algebra system busy for hours. So it runs
here: one server imports math-verify once and forks children that compare. The kernel ends a child
at the first question that takes too much CPU time or memory, even in the middle of a big
multiplication, and the next child costs milliseconds, not an import. The server ends when the pipe
to the trainer closes, however the trainer ended.

A verdict belongs to its question alone. Each is answered by a fresh copy of the same process, and
may allocate so many objects: a measure of work that is the same on every machine however busy, as
time is not. Strings hash alike in every server and sympy's random numbers are seeded, so that its
algorithms take the same way each time. The limits of CPU time and memory are for what works without
allocating, which is stopped before it counts: they are far above what the first one allows.

Read from stdin: a JSON list of [answer, reference] a line. Written to stdout: for each question a
line with its index and "1" for equal, "0", or "x" if it failed, as they come.
"""

import gc
import itertools
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

from grading.equality import equal

WORK = 200  # for one question, in collections of the garbage collector,
OBJECTS = 100  # which come after so many objects that were allocated and are still there
CPU_SECONDS = 1.0
MEMORY_BYTES = 2 << 30  # address space of a child
PROCESSES = min(4, os.cpu_count() or 1)

Question = tuple[str, str]
DECIMAL = re.compile(r"(?<![\d_])\d*\.\d+")


def compare(answer: str, gold: str) -> bool:
    """Whether two sets, intervals, relations or other formulas are equal.

    Args: both as `grading.spelling.normalise` leaves them.
    """
    from math_verify import verify

    answers, golds = _parse(answer), _parse(gold)
    if not answers or not golds:
        return False
    return verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None)


def _parse(text: str) -> list:
    """What math-verify makes of a text, without its search for units (it takes the t of 4t off)."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    latex_only = [LatexExtractionConfig(normalization_config=normalization)]
    exact = DECIMAL.sub(  # floats would be rounded before they are compared
        lambda number: r"(\frac{{{}}}{{{}}})".format(*Fraction(number[0]).as_integer_ratio()), text
    )
    return parse(rf"\boxed{{{exact}}}", latex_only, "no_fallback", parsing_timeout=None)


def _answer_and_exit(question: Question, pipe: int) -> None:
    """In a forked child: writes one byte, or none if it is stopped before."""
    try:
        if sys.platform == "linux":  # macOS does not keep this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # the kernel's, whose signal ends it
        work = itertools.count(1)
        gc.collect()  # from here on, every child has allocated nothing
        gc.set_threshold(OBJECTS, 1_000_000, 1_000_000)
        gc.callbacks.append(
            lambda phase, _: os._exit(1) if phase == "start" and next(work) > WORK else None
        )
        os.write(pipe, b"1" if equal(*question, compare) else b"0")
    except Exception:  # whatever sympy raises on nonsense: no verdict
        pass
    finally:
        os._exit(0)  # never back into the server's loop


def answer_all(questions: Sequence[Question], reply: Callable[[int, str], None]) -> None:
    """Answer each question in a child of its own, some at a time, and `reply` to each once."""
    waiting, running = list(enumerate(questions))[::-1], {}
    while waiting or running:
        while waiting and len(running) < PROCESSES:
            index, question = waiting.pop()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                _answer_and_exit(question, writer)
            os.close(writer)
            running[child] = index, reader
        child, _ = os.wait()
        index, reader = running.pop(child)
        with os.fdopen(reader) as verdict:
            reply(index, verdict.read() or "x")


def serve() -> None:
    """Answer lists of questions until stdin closes."""
    from sympy.core import random

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be a verdict
    logging.disable(logging.CRITICAL)
    random.seed(0)
    # The parser learns its grammar as it goes; what it learns here, all children inherit.
    for text in (r"x^2+1\ge\frac{1}{2}", r"(-\infty,2)\cup[\sqrt{3},5)", r"A\cap B^c=0"):
        _parse(text)
    compare(r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)")
    gc.freeze()  # a child's collector then does not touch, and so copy, what it shares
    replies.write("ready\n")
    for line in sys.stdin:
        answer_all(json.loads(line), lambda index, verdict: replies.write(f"{index} {verdict}\n"))


if __name__ == "__main__":
    serve()
