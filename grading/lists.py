r"""Lists, matrices, intervals and sets, as far as their text tells.

    split_list(r"(1,2)")                 # ("()", ["1", "2"])
    split_list(r"1\pm\sqrt{2}")          # ("", [r"1+\sqrt{2}", r"1-\sqrt{2}"])
    split_list(r"(0,1)\cup[2,3]")        # ("", ["(0,1)", "[2,3]"])
    as_intervals(r"x<1 or x\ge 2")       # ("x", r"(-\infty,1)\cup[2,\infty)")

An item is a text again, for `grading.equality` to compare: it may be a list itself.
"""

import itertools
import re
from collections.abc import Iterator

from grading.quantities import number

MATRIX = re.compile(
    r"[(\[]? ?\\begin\{([pb]?matrix|smallmatrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\} ?[)\]]?"
)
UNITED = re.compile(r"\\\} ?\\cup ?\\\{")  # \{1,2\}\cup\{3\} is \{1,2,3\}
PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-z]) ?")
ONE_OF = re.compile(r",? \b(?:and|or)\b | ?\\cup(?![a-z])")
SIGN = re.compile(r" ?(<|>|\\(?:[lg]e|ne)(?![a-z])) ?")
TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
INDEX = re.compile(  # and constants, which name nothing
    r"_(?:\{[^{}]*\}|\w)|\^\{?-1\}?|(?<=[A-Za-z}1'])\([^()]*\)|\\(?:pi|infty|emptyset|frac|sqrt)"
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
    text = UNITED.sub(",", text)
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


def split(text: str, separators: str = ";,") -> list[str]:
    """The items between the first separator that stands outside all brackets; [] if none match."""
    depth, outside = 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        outside += "x" if depth else character
    separator = next((each for each in separators if each in outside), "\n")
    items, start = [], 0
    for piece in outside.split(separator):
        items.append(text[start : start + len(piece)].strip())
        start += len(piece) + 1
    return items


def _both_signs(item: str) -> list[str]:
    r"""1\pm 2 is 1+2 and 1-2. Two \pm change apart, but with \mp, the other one, together."""
    kinds = PLUS_MINUS.findall(item)
    choices = itertools.product("+-", repeat=1 if "mp" in kinds else min(len(kinds), 4))
    written = {"pm+": "+", "pm-": "-", "mp+": "-", "mp-": "+"}

    def chosen(signs: Iterator[str]) -> str:
        return PLUS_MINUS.sub(lambda kind: written[kind[1] + next(signs)], item)

    return [chosen(itertools.cycle(choice)) for choice in choices]


WITHOUT = re.compile(r"\\mathbb\{R\}(?: ?(?:\\setminus|\\backslash|-) ?\\?\{(.+?)\\?\})?")


def as_intervals(text: str) -> tuple[str, str]:
    r"""The variable and the intervals of x\le 1 or x>2; of other sets, "" and their intervals."""
    if without := WITHOUT.fullmatch(text):  # \mathbb{R}\setminus\{1,2\}
        points = split(without[1]) if without[1] else []
        if None not in (values := list(map(number, points))):
            points = [point for _, point in sorted(zip(values, points))]
        ends = itertools.pairwise([r"-\infty", *points, r"\infty"])
        return "", r"\cup".join(f"({low},{high})" for low, high in ends)
    ranges = [_interval(part) for part in re.split(r",? or ", text)]
    if all(ranges) and len({variable for variable, _ in ranges}) == 1:
        return ranges[0][0], r"\cup".join(interval for _, interval in ranges)
    return "", text if text[:1] in ("(", "[") else ""


def _interval(text: str) -> tuple[str, str] | None:
    """The variable and the interval of one relation, such as 1<x, x<2 or 1<f(x)<2."""
    parts = SIGN.split(text)
    if len(parts) > 1 and parts[1] in (">", r"\ge"):
        parts = [TURNED.get(part, part) for part in reversed(parts)]
    if len(parts) == 3:
        parts = [r"-\infty", "<", *parts] if is_name(parts[0]) else [*parts, "<", r"\infty"]
    if len(parts) != 5 or not all(parts) or not is_name(parts[2]):
        return None
    low, low_sign, name, sign, high = parts
    if r"\ne" in (low_sign, sign):
        point = high if sign == r"\ne" else low
        return name, rf"(-\infty,{point})\cup({point},\infty)"
    opening, closing = {"<": "(", r"\le": "["}.get(low_sign), {"<": ")", r"\le": "]"}.get(sign)
    return (name, f"{opening}{low},{high}{closing}") if opening and closing else None
