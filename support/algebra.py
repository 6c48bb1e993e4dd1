r"""Questions of algebra, by math-verify: a process that answers them, and may be killed.

    python -m support.algebra            # started by `support.judges`, not by hand

Model output is hostile: a short text can keep a computer algebra system busy for hours. So it runs
here: one server imports math-verify once and forks children that compare. The kernel ends a child
at the first question that takes too much CPU time or memory, even in the middle of a big
multiplication, and the next child costs milliseconds, not an import. The server ends when the pipe
to the trainer closes, however the trainer ended.

A verdict belongs to its question alone. The limit is one answer's, not its call's, and counts CPU
time, not the clock: a busy machine makes a reply late, not wrong. An ordinary question takes a
tenth of the limit. Strings hash alike in every server and sympy's random numbers are seeded, so
that its algorithms take the same way each time.

Read from stdin: a JSON list of [answer, reference] a line. Written to stdout: for each question a
line with its index and "1" for equal, "0", or "x" if it failed, as they come.
"""

import gc
import json
import logging
import os
import re
import resource
import signal
import sys
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from support.equality import equal

CPU_SECONDS = 0.2  # for one question
MEMORY_BYTES = 2 << 30  # address space of a child
PROCESSES = min(4, os.cpu_count() or 1)

Question = tuple[str, str]
DECIMAL = re.compile(r"(?<![\d_])\d*\.\d+")


def compare(answer: str, gold: str) -> bool:
    """Whether two sets, intervals, relations or other formulas are equal.

    Args: both as `support.spelling.normalise` leaves them.
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


def _answer_and_exit(questions: Sequence[Question], pipe: int) -> None:
    """In a forked child: a byte for each question, until the kernel ends it."""
    try:
        if sys.platform == "linux":  # macOS does not keep this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        for answer, gold in questions:
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                right = equal(answer, gold, compare)
                verdict = b"1" if right else b"0"
            except Exception:  # whatever sympy raises on nonsense; counted as failed by the trainer
                verdict = b"x"
            os.write(pipe, verdict)
    finally:
        os._exit(0)  # never back into the server's loop


def answer_all(questions: Sequence[Question], reply) -> None:
    """Share the questions among children and `reply(index, verdict)` to each one once."""
    indices = range(len(questions))
    shares = deque(filter(None, (indices[start::PROCESSES] for start in range(PROCESSES))))
    running = {}
    while shares or running:
        while shares:
            share = shares.popleft()
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                _answer_and_exit([questions[index] for index in share], writer)
            os.close(writer)
            running[child] = share, reader
        child, _ = os.wait()
        share, reader = running.pop(child)
        with os.fdopen(reader) as pipe:
            verdicts = pipe.read()
        if len(verdicts) < len(share):  # it died at the question after the last verdict
            verdicts += "x"
            if rest := share[len(verdicts) :]:
                shares.append(rest)
        for index, verdict in zip(share, verdicts, strict=False):
            reply(index, verdict)


def serve() -> None:
    """Answer lists of questions until stdin closes."""
    from sympy.core import random

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be a verdict
    logging.disable(logging.CRITICAL)
    random.seed(0)
    # The parser learns its grammar as it goes; what it learns here, all children inherit.
    for text in (r"\{x : x^2+1\ge\frac{1}{2}\}", r"(-\infty,2)\cup[\sqrt{3},5)", r"A\cap B^c=0"):
        _parse(text)
    compare(r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)")
    gc.freeze()  # a child's collector then does not touch, and so copy, what it shares
    replies.write("ready\n")
    for line in sys.stdin:
        answer_all(json.loads(line), lambda index, verdict: replies.write(f"{index} {verdict}\n"))


if __name__ == "__main__":
    serve()
