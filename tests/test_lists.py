"""Lists and intervals, by their text."""

import pytest

from grading.lists import as_ranges, split_list


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
        (r"(0,1)\cup[2,3]", r"\cup", ["(0,1)", "[2,3]"]),
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
        ("2>x>1", "", ""),
        ("2x+3>5", "", ""),
        ("5", "", ""),
    ],
)
def test_inequalities_are_intervals(text, variable, ranges):
    assert as_ranges(text) == (variable, ranges)
