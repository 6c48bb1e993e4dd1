"""Two-digit sums with a written-out thought, and a student who is careless about carries.

    worked_solution("47+85=")       # <think>7+5=12,4+8+1=13</think><answer>132</answer>
    careless_solution("47+85=", rng)            # the same with a carry forgotten, perhaps
    error_kind("47+85=", completion)            # "right", "inner carry", "leading carry", ...

The embedded default task. Its one difficulty, the carry, can be seen in the text, so anyone can
check by eye what a policy has learned.
"""

import random
import re
from collections.abc import Callable

from rewards import TAGS


def worked_solution(prompt: str) -> str:
    """The correct completion of a sum, column by column, lowest first."""
    return _written(prompt, carry=lambda due: due)


def careless_solution(
    prompt: str, rng: random.Random, forget: float = 0.5, invent: float = 0.2
) -> str:
    """One demonstration by a student who adds columns correctly but is careless with carries.

    A carry that is due is forgotten with probability `forget` (`4+8=12` above), one that is not due
    is added with `invent`, into the tens column and as the leading 1 alike. By default the student
    leans the right way: carries independent of the column would leave reward nothing to strengthen.
    In 30% of the demonstrations one of the four tags is replaced by another one.
    """
    text = _written(prompt, carry=lambda due: rng.random() < (1 - forget if due else invent))
    if rng.random() < 0.3:
        wrong = rng.choice(TAGS)
        text = text.replace(wrong, rng.choice([tag for tag in TAGS if tag != wrong]))
    return text


def error_kind(prompt: str, completion: str) -> str:
    """The first thing wrong with a completion of a sum, in the order in which it is written.

    Returns:
        `right` (it is the worked solution), `column` (a wrong sum or a wrongly copied digit),
        `inner carry`, `leading carry`, or `form` (only the tags, or nothing that can be read).
    """
    completion = completion.strip()
    if completion == worked_solution(prompt):
        return "right"
    # A wrong tag is no excuse for not reading the sums: split at any tag, whichever it is.
    parts = [part for part in re.split("|".join(TAGS), completion) if part]
    thought = re.fullmatch(r"(\d)\+(\d)=(\d+),(\d)\+(\d)(\+1)?=(\d+)", parts[0]) if parts else None
    if len(parts) != 2 or thought is None or not parts[1].isdigit():
        return "form"
    a0, b0, low, a1, b1, plus_one, high = thought.groups()
    low, high, carried = int(low), int(high), 1 if plus_one else 0
    if f"{a1}{a0}+{b1}{b0}=" != prompt or low != int(a0) + int(b0):
        return "column"
    if carried != low // 10:
        return "inner carry"
    if high != int(a1) + int(b1) + carried:
        return "column"
    if parts[1] == _answer(high >= 10, high, low):
        return "form"
    # The one carry that is left is the leading 1: 132 written 32, or 26 written 126.
    return "leading carry" if parts[1] == _answer(high < 10, high, low) else "column"


def _written(prompt: str, carry: Callable[[bool], bool]) -> str:
    """The completion of a sum in which `carry(due)` says whether a carry is written."""
    a, b = map(int, prompt.removesuffix("=").split("+"))
    low, high, carried = a % 10 + b % 10, a // 10 + b // 10, ""
    if carry(low >= 10):
        high, carried = high + 1, "+1"
    thought = f"{a % 10}+{b % 10}={low},{a // 10}+{b // 10}{carried}={high}"
    return f"<think>{thought}</think><answer>{_answer(carry(high >= 10), high, low)}</answer>"


def _answer(leading_one: bool, high: int, low: int) -> str:
    """The answer's digits from the two column sums."""
    return ("1" if leading_one else "") + str(high % 10) + str(low % 10)
