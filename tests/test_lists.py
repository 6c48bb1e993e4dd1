"""Lists, intervals and sets, by their text."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.lists import as_intervals, is_name, same_set, split_list


@pytest.mark.parametrize(
    ("text", "kind", "items"),
    [
        ("5", "", ["5"]),
        ("(5)", "", ["(5)"]),
        ("1,2", "", ["1", "2"]),
        ("1, 2 and 3", "", ["1", "2", "3"]),
        ("1 or 2", "", ["1", "2"]),
        ("(1,2,2)", "()", ["1", "2", "2"]),
        ("[1,2)", "[)", ["1", "2"]),
        ("(1,2),(3,4)", "", ["(1,2)", "(3,4)"]),
        (r"\{1,2\}", r"\{\}", ["1", "2"]),
        (r"\{5\}", r"\{\}", ["5"]),
        (r"f(1,2)", "", ["f(1,2)"]),
        (r"\pm 3", "", ["+3", "-3"]),
        (r"1\pm\sqrt{2}", "", [r"1+\sqrt{2}", r"1-\sqrt{2}"]),
        (r"(\pm a,0)", "", ["(+a,0)", "(-a,0)"]),
        (r"\pm 1\pm 2", "", ["+1+2", "+1-2", "-1+2", "-1-2"]),
        (r"a\pm b\mp c", "", ["a+b-c", "a-b+c"]),
        (r"\{\pm 1,2\}", r"\{\}", ["+1", "-1", "2"]),
        (r"(0,1)\cup[2,3]", "", ["(0,1)", "[2,3]"]),
        ("{1,2}", r"\{\}", ["1", "2"]),
        ("1,2; 3,4", "", ["1,2", "3,4"]),
        ("(1;2)", "()", ["1", "2"]),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "matrix 2x2", ["1", "2", "3", "4"]),
        (r"\begin{bmatrix}1\\2\\\end{bmatrix}", "matrix 1x1", ["1", "2"]),
        ("1)2", "", []),
    ],
)
def test_a_list_is_its_brackets_and_its_items(text, kind, items):
    assert split_list(text) == (kind, items)


def test_many_signs_are_bounded():
    assert len(split_list(r"\pm 1" * 50)[1]) == 16


@pytest.mark.parametrize(
    ("text", "variable", "ranges"),
    [
        ("x>2", "x", r"(2,\infty)"),
        (r"x \ge 2", "x", r"[2,\infty)"),
        ("x<2", "x", r"(-\infty,2)"),
        (r"x\le 2", "x", r"(-\infty,2]"),
        ("2<x", "x", r"(2,\infty)"),
        (r"2\ge x", "x", r"(-\infty,2]"),
        (r"-1 < t\le \pi", "t", r"(-1,\pi]"),
        (r"x<1 or x\ge 2", "x", r"(-\infty,1)\cup[2,\infty)"),
        ("(1,2)", "", "(1,2)"),
        ("x<1 or y>2", "", ""),
        (r"2>x\ge 1", "x", "[1,2)"),
        ("0<f(x)<1", "f(x)", "(0,1)"),
        (r"x\ne 1", "x", r"(-\infty,1)\cup(1,\infty)"),
        ("1<x>2", "", ""),
        ("2x+3>5", "", ""),
        ("5", "", ""),
    ],
)
def test_inequalities_are_intervals(text, variable, ranges):
    assert as_intervals(text) == (variable, ranges)


@pytest.mark.parametrize(
    "text", ["x", "x_1", "a_{37}", "f(2)", "|AB|", r"\frac{NO}{BO}", "(p,q)", "S:T", r"\theta"]
)
def test_what_names_a_value(text):
    assert is_name(text)


@pytest.mark.parametrize("text", ["", "2x", "xy", "x+z", "x^2", "5", r"\pi", r"-\infty", "x=y"])
def test_what_says_more_than_a_name(text):
    assert not is_name(text)


ENDS = st.sampled_from(
    [r"-\infty", "-2", "-1", "0", r"\frac{1}{2}", "1", r"\sqrt{2}", "3", r"\infty"]
)
INTERVALS = st.builds("{}{},{}{}".format, st.sampled_from("(["), ENDS, ENDS, st.sampled_from(")]"))
INTERVALS = INTERVALS.filter(lambda text: not re.search(r"\[-?\\i|\\infty\]", text))
PIECES = INTERVALS | st.builds(r"\{{{}\}}".format, st.sampled_from(["-1", "0", "1", r"\sqrt{2}"]))
SETS = st.lists(PIECES, min_size=1, max_size=3).map(r"\cup".join)
VALUES = {r"-\infty": -9.0, r"\infty": 9.0, r"\frac{1}{2}": 0.5, r"\sqrt{2}": 2**0.5}


def holds(text: str, x: float) -> bool:
    """Whether x is in one of the pieces, by floats."""
    for piece in text.split(r"\cup"):
        inside = piece.strip("()[]").replace(r"\{", "").replace(r"\}", "").split(",")
        low, high = (
            VALUES[end] if end in VALUES else float(end) for end in (inside[0], inside[-1])
        )
        closed = {low} & {x} if piece[0] in "[\\" else set()
        closed |= {high} & {x} if piece[-1] in "]}" else set()
        if low < x < high or (low <= x <= high and x in closed):
            return True
    return False


@given(SETS, SETS)
def test_sets_are_equal_if_they_hold_the_same_numbers(a, b):
    points = [-3, -2, -1.5, -1, -0.5, 0, 0.2, 0.5, 0.7, 1, 1.2, 2**0.5, 2, 3, 4]
    expected = all(holds(a, x) == holds(b, x) for x in points)
    assert same_set(a + r"\cup\emptyset", b) == expected


def test_what_is_no_set_of_numbers():
    assert same_set("1,2", "2,1") is None
    assert same_set(r"[-\infty,2)\cup(3,4)", r"(3,4)") is None
    assert same_set(r"(1\cup 2,3)", r"\emptyset") is None
    assert same_set(r"A\cup B", r"\{1\}") is None
    assert same_set(r"(a,b)\cup(1,2)", r"(1,2)") is None
    assert same_set(r"\cup".join(rf"\{{{i}\}}" for i in range(99)), r"\{1\}") is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (r"\mathbb{R}\setminus\{0,1\}", r"(-\infty,0)\cup(0,1)\cup(1,\infty)"),
        (r"\mathbb{R}\setminus\{0,2\}", r"(-\infty,0)\cup(0,1)\cup(1,\infty)"),
        (r"\{1,2\}\cup\{3\}", r"\{1,2,3\}\cup\{1\}"),
        (r"\{0.5\}\cup\{1\}", r"\{\frac{1}{2}\}\cup\{1\}"),
        (r"(0,1)\cup(1,2)", r"(0,2)\cup\{3\}"),
    ],
)
def test_math_verify_says_the_same_of_sets(a, b):
    math_verify = pytest.importorskip("math_verify", reason="needs math-verify, an oracle")
    read = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (a, b)]
    assert same_set(a, b) == math_verify.verify(*read, timeout_seconds=None)
