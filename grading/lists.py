r"""Lists and intervals, as far as their text tells.

    split_list(r"(1,2)")                 # ("()", ["1", "2"])
    split_list(r"1\pm\sqrt{2}")          # ("", [r"1+\sqrt{2}", r"1-\sqrt{2}"])
    split_list(r"(0,1)\cup[2,3]")        # (r"\cup", ["(0,1)", "[2,3]"])
    as_ranges(r"x<1 or x\ge 2")          # ("x", r"(-\infty,1)\cup[2,\infty)")

An item is a text again, for `grading.equality` to compare: it may be a list itself.
"""

import itertools
import re

MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}")
SIGN = r" ?(<|>|\\[lg]e(?![a-z])) ?"
RANGE = re.compile(rf"(?:([^<>]+?){SIGN})?([A-Za-z](?:_\w)?){SIGN}([^<>]+)")  # 1<x\le 2
RANGE_FROM = re.compile(rf"([^<>A-Za-z]+){SIGN}([A-Za-z](?:_\w)?)")  # 2<x
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def split_list(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a list, or "" for none, and its items; \pm makes two of one."""
    parts = _split(text, r"\cup")
    if len(parts) > 1:
        return r"\cup", parts
    items = _split(re.sub(r",? (?:and|or) ", ",", text), ",")
    items = [both for item in items for both in _both_signs(item)]
    if len(items) > 1 or not items:
        return "", items
    if matrix := MATRIX.fullmatch(text):
        rows = [row.split("&") for row in matrix[2].split(r"\\") if row.strip()]
        shape = "x".join(str(len(row)) for row in rows)
        return f"matrix {shape}", [cell.strip() for row in rows for cell in row]
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inside = _split(text[2:-2], ",")
        return r"\{\}", [both for item in inside for both in _both_signs(item)]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        inside = _split(text[1:-1], ",")
        if len(inside) > 1:
            return text[0] + text[-1], inside
    return "", items


def _split(text: str, separator: str) -> list[str]:
    """The items between separators outside all brackets; none if the brackets do not match."""
    depth, items, start = 0, [], 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if not depth and text.startswith(separator, at):
            items.append(text[start:at].strip())
            start = at + len(separator)
    return [*items, text[start:].strip()]


def _both_signs(item: str) -> list[str]:
    r"""1\pm 2 is 1+2 and 1-2. Two \pm change apart, but with \mp, the other one, together."""
    parts = re.split(r"\\(pm|mp)(?![a-z]) ?", item)
    if len(parts) == 1 or item.startswith(r"\{"):
        return [item]
    together = "mp" in parts[1::2]
    results = []
    for choice in itertools.product("+-", repeat=1 if together else min(len(parts) // 2, 4)):
        text, signs = parts[0], itertools.cycle(choice)
        for kind, rest in zip(parts[1::2], parts[2::2], strict=True):
            sign = next(signs)
            text += (sign if kind == "pm" else "+-"[sign == "+"]) + rest
        results.append(text)
    return results


def as_ranges(text: str) -> tuple[str, str]:
    r"""The variable and the intervals of x\le 1 or x>2; of intervals, "" and themselves."""
    ranges = [_as_range(part) for part in re.split(r",? or ", text)]
    if all(ranges) and len({variable for variable, _ in ranges}) == 1:
        return ranges[0][0], r"\cup".join(interval for _, interval in ranges)
    return "", text if text[:1] in ("(", "[") else ""


def _as_range(text: str) -> tuple[str, str] | None:
    if both := RANGE.fullmatch(text):
        low, low_sign, variable, sign, high = both.groups()
    elif one := RANGE_FROM.fullmatch(text):
        high, sign, variable = one.groups()
        low, low_sign, sign = None, None, FLIPPED[sign]
    else:
        return None
    up = (">", r"\ge")
    if low is None and sign in up:
        return variable, ("[" if sign == r"\ge" else "(") + high + r",\infty)"
    if sign in up or low_sign in up:
        return None  # 2>x>1, which nobody writes
    opening = "[" if low_sign == r"\le" else "("
    closing = "]" if sign == r"\le" else ")"
    return variable, opening + (low or r"-\infty") + "," + high + closing
