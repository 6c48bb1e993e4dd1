"""Lists and intervals, by their text."""

import re

import pytest

from grading.lists import as_intervals, is_name, split, split_list

# A text => its brackets: its items. Four blanks between two of these.
LISTS = r"""
5 => : 5    (5) => : (5)    1,2 => : 1 | 2    1, 2 and 3 => : 1 | 2 | 3    1 or 2 => : 1 | 2
(1,2,2) => (): 1 | 2 | 2    [1,2) => [): 1 | 2    (1;2) => (): 1 | 2
\{1,2\} => \{\}: 1 | 2    \{5\} => \{\}: 5    {1,2} => \{\}: 1 | 2    f(1,2) => : f(1,2)
\{1,2\}\cup\{3\} => \{\}: 1 | 2 | 3    (0,1)\cup[2,3] => : (0,1) | [2,3]    1,2; 3,4 => : 1,2 | 3,4
\pm 3 => : +3 | -3    1\pm\sqrt{2} => : 1+\sqrt{2} | 1-\sqrt{2}    (\pm a,0) => : (+a,0) | (-a,0)
\pm 1\pm 2 => : +1+2 | +1-2 | -1+2 | -1-2    a\pm b\mp c => : a+b-c | a-b+c
\{\pm 1,2\} => \{\}: +1 | -1 | 2    \begin{bmatrix}1\\2\\\end{bmatrix} => matrix 1x1: 1 | 2
\begin{pmatrix}1&2\\3&4\end{pmatrix} => matrix 2x2: 1 | 2 | 3 | 4    (1,2),(3,4) => : (1,2) | (3,4)
"""


@pytest.mark.parametrize("row", re.split(r"\n| {4}", LISTS.strip()))
def test_a_list_is_its_brackets_and_its_items(row):
    text, kind, items = re.split(" => |: ", row)
    assert split_list(text) == (kind, items.split(" | "))


def test_separators_count_outside_brackets_alone():
    assert split("a, f(b,c); d") == ["a, f(b,c)", "d"]
    assert split("x=f(y=1)=2", "=") == ["x", "f(y=1)", "2"]
    assert split("a)b") == split_list("1)2")[1] == []


def test_many_signs_are_bounded():
    assert len(split_list(r"\pm 1" * 50)[1]) == 16


# A text => its variable: its intervals.
INTERVALS = r"""
x>2 => x: (2,\infty)    x \ge 2 => x: [2,\infty)    x<2 => x: (-\infty,2)
2<x => x: (2,\infty)    2\ge x => x: (-\infty,2]    -1 < t\le \pi => t: (-1,\pi]    (1,2) => : (1,2)
x<1 or x\ge 2 => x: (-\infty,1)\cup[2,\infty)    2>x\ge 1 => x: [1,2)    0<f(x)<1 => f(x): (0,1)
x\ne 1 => x: (-\infty,1)\cup(1,\infty)    \mathbb{R} => : (-\infty,\infty)    1<x>2 => :
\mathbb{R}\setminus\{3,-1\} => : (-\infty,-1)\cup(-1,3)\cup(3,\infty)    x<1 or y>2 => :
2x+3>5 => :    5 => :    x\le 2 => x: (-\infty,2]
"""


@pytest.mark.parametrize("row", re.split(r"\n| {4}", INTERVALS.strip("\n")))
def test_inequalities_are_intervals(row):
    text, variable, ranges = re.split(" => |: ?", row)
    assert as_intervals(text) == (variable, ranges)


NAMES = ["x", "x_1", "a_{37}", "f(2)", "|AB|", r"\frac{NO}{BO}", "(p,q)", "S:T", r"\theta"]
NO_NAMES = ["", "2x", "xy", "x+z", "x^2", "5", r"\pi", r"-\infty", "x=y"]


def test_a_name_says_nothing_of_a_value():
    assert [text for text in NAMES + NO_NAMES if is_name(text)] == NAMES
