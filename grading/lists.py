r"""Lists, matrices, intervals and sets, as far as their text tells.

    split_list(r"(1,2)")                 # ("()", ["1", "2"])
    split_list(r"1\pm\sqrt{2}")          # ("", [r"1+\sqrt{2}", r"1-\sqrt{2}"])
    as_intervals(r"x<1 or x\ge 2")       # ("x", r"(-\infty,1)\cup[2,\infty)")
    same_set(r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)")   # True

An item is a text again, for `grading.equality` to compare: it may be a list itself. Sets of real
numbers are equal if the same numbers are in them, of their end points and one between each two.
"""

import itertools
import re
from collections.abc import Callable
from functools import reduce

from grading.formulas import Unreadable, constant

MATRIX = re.compile(
    r"[(\[]? ?\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\} ?[)\]]?"
)
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z]) ?")
ONE_OF = re.compile(r",? \b(?:and|or)\b | ?\\cup(?![a-z])")
SIGN = re.compile(r" ?(<|>|\\(?:[lg]e|ne)(?![a-z])) ?")
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
INDEX = re.compile(  # and constants, which name nothing
    r"_(?:\{[^{}]*\}|\w)|\^\{?-1\}?|(?<=[A-Za-z])\([^()]*\)|\\(?:pi|infty|emptyset|frac|sqrt)"
)
NO_NAME = re.compile(r"[-+*<>=\d^]|\\(?:pm|cdot|times|in)(?![a-z])|(?<![a-z\\])[a-z][a-z](?![a-z])")


def is_name(text: str) -> bool:
    r"""Whether a text only names what is asked for: x_1, f(2), |AB|, \frac{NO}{BO}, (p,q), S:T.

    A sum, a multiple or a product of two letters is no name: 2x=6 does not say that x is 6.
    """
    bare = INDEX.sub("", text)
    return bool(re.search(r"[^\W\d_]", bare)) and not NO_NAME.search(bare)


def split_list(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a list, or "" for none, and its items; \pm makes two of one."""
    kind, items = "", split(ONE_OF.sub(",", text))
    if len(items) == 1 and (matrix := MATRIX.fullmatch(text)):
        rows = [row.split("&") for row in matrix[2].split(r"\\") if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return f"matrix {shape}", [cell.strip() for row in rows for cell in row]
    if len(items) == 1 and text.startswith(("{", r"\{")) and text.endswith("}"):
        inside = split(re.sub(r"^\\?\{|\\?\}$", "", text))
        if len(inside) > 1 or (inside and text[0] == "\\"):
            kind, items = r"\{\}", inside
    elif len(items) == 1 and text[:1] in ("(", "[") and text[-1] in ")]" and r"\pm" not in text:
        inside = split(text[1:-1])
        if len(inside) > 1:
            return text[0] + text[-1], inside
    return kind, [both for item in items for both in _both_signs(item)]


def split(text: str, separators: tuple[str, ...] = (";", ",")) -> list[str]:
    """The items between the first of the separators that stands outside all brackets.

    None if the brackets do not match.
    """
    depth, cuts = 0, {separator: [] for separator in separators}
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        for separator in separators if depth == 0 else ():
            if text.startswith(separator, at):
                cuts[separator].append(at)
    separator = next((separator for separator in separators if cuts[separator]), "")
    starts = [0, *(at + len(separator) for at in cuts.get(separator, []))]
    ends = [*cuts.get(separator, []), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _both_signs(item: str) -> list[str]:
    r"""1\pm 2 is 1+2 and 1-2. Two \pm change apart, but with \mp, the other one, together."""
    kinds, results = PLUS_MINUS.findall(item), []
    together = "mp" in kinds
    for choice in itertools.product("+-", repeat=1 if together else min(len(kinds), 4)):
        signs = itertools.cycle(choice)
        written = {"pm+": "+", "pm-": "-", "mp+": "-", "mp-": "+"}
        results.append(PLUS_MINUS.sub(lambda kind: written[kind[1] + next(signs)], item))  # noqa: B023
    return results


# ---- Sets of real numbers.


def as_intervals(text: str) -> tuple[str, str]:
    r"""The variable and the intervals of x\le 1 or x>2; of other sets, "" and themselves."""
    ranges = [_interval(part) for part in re.split(r",? or ", text)]
    if all(ranges) and len({variable for variable, _ in ranges}) == 1:
        return ranges[0][0], r"\cup".join(interval for _, interval in ranges)
    return "", text if text[:1] in ("(", "[") or SET.search(text) else ""


def _interval(text: str) -> tuple[str, str] | None:
    """The variable and the interval of one relation, such as 1<x, x<2 or 1<f(x)<2."""
    parts = SIGN.split(text)
    if len(parts) == 3 and not is_name(parts[0]):
        parts = [parts[2], TURNED[parts[1]], parts[0]]
    elif len(parts) == 5 and parts[1] in (">", r"\ge"):
        parts = [parts[4], TURNED[parts[3]], parts[2], TURNED[parts[1]], parts[0]]
    if len(parts) not in (3, 5) or not all(parts) or not is_name(parts[-3]):
        return None
    name, sign, bound = parts[-3:]
    low_sign, low = (parts[1], parts[0]) if len(parts) == 5 else ("<", r"-\infty")
    if sign == r"\ne" and len(parts) == 3:
        return name, rf"(-\infty,{bound})\cup({bound},\infty)"
    if sign in (">", r"\ge") and len(parts) == 3:
        low_sign, low, sign, bound = TURNED[sign], bound, "<", r"\infty"
    if not {low_sign, sign} <= {"<", r"\le"}:
        return None
    opening, closing = "[" if low_sign == r"\le" else "(", "]" if sign == r"\le" else ")"
    return name, f"{opening}{low},{bound}{closing}"


Members = tuple[list, Callable]  # the end points of a set; and whether a number is in it
SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![a-z])")
MOST_ENDS = 50
OPERATIONS = {
    r"\cup": lambda left, right: lambda x: left(x) or right(x),
    r"\cap": lambda left, right: lambda x: left(x) and right(x),
    r"\setminus": lambda left, right: lambda x: left(x) and not right(x),
}


def same_set(answer: str, gold: str) -> bool | None:
    """Whether the same real numbers are in two sets; None if one is no set that is read here."""
    if not SET.search(answer) and not SET.search(gold):
        return None
    try:
        (ends, in_answer), (gold_ends, in_gold) = _members(answer), _members(gold)
    except Unreadable:
        return None
    ends = sorted({*ends, *gold_ends, 0})
    if len(ends) > MOST_ENDS:
        return None
    between = [(low + high) / 2 for low, high in itertools.pairwise(ends)]
    return all(in_answer(x) == in_gold(x) for x in (*ends, *between, ends[0] - 1, ends[-1] + 1))


def _members(text: str) -> Members:
    for operator, combined in OPERATIONS.items():  # the first one binds least
        if len(texts := split(text, (operator,))) > 1:
            parts = [_members(part) for part in texts]
            ends = [end for ends, _ in parts for end in ends]
            return ends, reduce(combined, (test for _, test in parts))
    if text in (r"\mathbb{R}", r"\emptyset"):
        return [], lambda x: text == r"\mathbb{R}"
    kind, items = split_list(text)
    if kind == r"\{\}":
        numbers = [constant(item) for item in items]
        return numbers, lambda x: x in numbers
    if len(items) != 2 or kind not in ("()", "(]", "[)", "[]"):
        raise Unreadable
    low, high = map(constant, items)
    closed = [end for end, bracket in ((low, kind[0]), (high, kind[1])) if bracket in "[]"]
    infinity = constant(r"\infty")
    if infinity in map(abs, closed):
        raise Unreadable
    ends = [end for end in (low, high) if abs(end) < infinity]
    return ends, lambda x: low < x < high or (x in closed and low <= x <= high)
