"""Lists and intervals, by their text."""

import pytest

from grading.lists import as_intervals, is_name, split, split_list


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
        (r"\{1,2\}\cup\{3\}", r"\{\}", ["1", "2", "3"]),
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


def test_separators_count_outside_brackets_alone():
    assert split("a, f(b,c); d") == ["a, f(b,c)", "d"]
    assert split("x=f(y=1)=2", "=") == ["x", "f(y=1)", "2"]
    assert split("a)b") == []


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
        (r"\mathbb{R}", "", r"(-\infty,\infty)"),
        (r"\mathbb{R}\setminus\{3,-1\}", "", r"(-\infty,-1)\cup(-1,3)\cup(3,\infty)"),
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
