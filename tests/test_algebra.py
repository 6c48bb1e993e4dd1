"""Algebra by math-verify: exact, without units, and stopped by its work."""

import subprocess
import sys
from pathlib import Path

import pytest

from grading import algebra
from grading.algebra import answer_all, compare

ROOT = Path(__file__).parents[1]
COMPLEMENT = (r"\mathbb{R}\setminus\{0,1\}", r"(-\infty,0)\cup(0,1)\cup(1,\infty)")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (*COMPLEMENT, True),
        (r"\mathbb{R}\setminus\{0,2\}", COMPLEMENT[1], False),
        (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}", True),
        (r"\{0.5\}\cup\{1\}", r"\{\frac{1}{2},1\}", True),
        (r"\{0.3333333333333333\}\cup\{1\}", r"\{\frac{1}{3},1\}", False),
        (r"\{3t\}\cup\{1\}", r"\{3,1\}", False),
        (r"\unknown{}", r"\{1\}", False),
    ],
)
def test_sets_are_compared(answer, gold, right):
    assert compare(answer, gold) == right


def test_every_question_is_answered_once_and_in_any_order():
    questions = [COMPLEMENT, (r"\mathbb{R}", COMPLEMENT[1])] * 5
    replies = []
    answer_all(questions, lambda *reply: replies.append(reply))
    assert sorted(replies) == [(index, "10"[index % 2]) for index in range(10)]


@pytest.mark.parametrize(
    "deed",
    [
        "while True: pass",  # no allocation: the kernel counts the time
        "kept = [[] for _ in range(10**9)]",
        "bytearray(3 << 30)",
        "9 ** 9 ** 9",
        "raise ValueError",
        "import os; os._exit(0)",
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep the limit of memory")
def test_what_takes_too_much_has_no_verdict_and_spares_its_neighbours(deed):
    code = (
        "from grading import algebra\n"
        "def compare(answer, gold):\n"
        f"    if answer == 'bad':\n        {deed}\n"
        "    return True\n"
        "algebra.equal = lambda answer, gold, _: compare(answer, gold)\n"
        "replies = {}\n"
        "algebra.answer_all([('a', 'b'), ('bad', 'b'), ('c', 'd')], replies.__setitem__)\n"
        "print(sorted(replies.items()))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "[(0, '1'), (1, 'x'), (2, '1')]\n", run.stderr


def test_the_limit_of_work_is_far_from_ordinary_questions(monkeypatch):
    """Half of it suffices for this one, so that no difference between machines reaches it."""
    replies = {}
    monkeypatch.setattr(algebra, "WORK", algebra.WORK // 2)
    answer_all([COMPLEMENT], replies.__setitem__)
    assert replies == {0: "1"}
    monkeypatch.setattr(algebra, "WORK", 1)
    answer_all([COMPLEMENT], replies.__setitem__)
    assert replies == {0: "x"}
