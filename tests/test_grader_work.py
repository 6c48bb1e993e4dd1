"""A verdict's work is bounded by the length of its texts: counted in calls, not timed."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from grading import equality, formulas, spelling
from rewards import score

# Every operation of the parser, and every kind of list, nested or many times over; _ is a blank.
PIECES = r"""
x+ ( |x x^{ ! 9^ - 0.1 1, 1; (1, x= =1 { ab_ \frac{1}{ \sin_ \exp( \sqrt{2+ \sqrt[9]{ \ln( \log_2_
999! (9^{9^9})^ 9^{45000} \binom{999}{500} \gcd(9^{99}, \max(x, i^{99} \tan(9^{99}) e^{99999}
\lfloor_9^{9999} x_{1} \vec{v} x<1_or_ 1<x< \{1, \{x, \{\{x,y\}, \pm1 \pm_1, (0,1)\cup [x,y)\cup
\{1\}\cup \mathbb{R}\setminus \begin{pmatrix}1&2\end{pmatrix} 1\\ 1_2 (3)/(4) \approx_5_= \text{a \
\overline{3} km_ 5_km/h_ 1_and_ (B)_ B,_ ½ √ 元 NaCl \in_ $
"""


def calls(answer: str, gold: str) -> int:
    """The functions that are called for a verdict when nothing is remembered."""
    spelling.normalise.cache_clear()
    formulas.values.cache_clear()
    count = 0

    def counted(_, event, __):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        equality.equal(answer, gold)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("piece", PIECES.split())
def test_work_is_bounded_for_every_operation_however_often_or_deep(piece):
    formulas.values("x")  # imports mpmath
    text = (piece.replace("_", " ") * 1000)[:999] + "1"
    for gold in ("5", text.replace("1", "2")):
        assert calls(text, gold) < 1500 * len(text)  # a fraction of a second


def test_many_items_are_compared_only_if_few_are_spelled_apart():
    numbers = [str(i) for i in range(200)]
    assert equality.equal(",".join(numbers), ",".join(reversed(numbers)))
    assert equality.equal(",".join([*numbers[1:], "0.0"]), ",".join(numbers))
    assert not equality.equal(",".join(f"{i}.0" for i in range(99)), ",".join(numbers[:99]))


def test_verdicts_are_the_same_in_many_threads_at_once():
    pairs = [(rf"\boxed{{\sqrt{{{i * i * 2}}}}}", rf"{i + i % 2}\sqrt{{2}}") for i in range(2, 40)]
    texts, answers = zip(*pairs, strict=True)
    formulas.values.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        graded = [pool.submit(score, texts, answers) for _ in range(4)]
    assert [future.result()["accuracy"] for future in graded] == [[1.0, 0.0] * 19] * 4
