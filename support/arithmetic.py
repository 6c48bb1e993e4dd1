"""Two-digit sums with a written-out thought, and a student who is careless about carries.

    worked_solution("47+85=")       # <think>7+5=12,4+8+1=13</think><answer>132</answer>
    careless_solution("47+85=", rng)            # the same with a carry forgotten, perhaps
    error_kind("47+85=", completion)            # "right", "inner carry", "leading carry", ...

The one difficulty, the carry, can be seen in the text: anyone can check what a policy has learned.
"""

import random
import re
from collections.abc import Callable

from rewards import TAGS

READABLE = re.compile(r"\d\+\d=\d+,\d\+\d(\+1)?=\d+ \d+")


def worked_solution(prompt: str) -> str:
    """The correct completion of a sum, column by column, lowest first."""
    return _written(prompt, carry=lambda due: due)


def careless_solution(
    prompt: str, rng: random.Random, forget: float = 0.5, invent: float = 0.2
) -> str:
    """One demonstration by a student who adds columns correctly but is careless with carries.

    A carry that is due is forgotten with probability `forget` (`4+8=12`), one that is not is added
    with `invent`, into the tens and as the leading 1 alike. So the student leans the right way:
    carries independent of the column would leave reward nothing to strengthen. In 30% of the
    demonstrations one of the four tags is replaced by another one.
    """
    text = _written(prompt, carry=lambda due: rng.random() < (1 - forget if due else invent))
    if rng.random() < 0.3:
        wrong = rng.choice(TAGS)
        text = text.replace(wrong, rng.choice([tag for tag in TAGS if tag != wrong]))
    return text


def error_kind(prompt: str, completion: str) -> str:
    """The first thing wrong with a completion of a sum, in the order in which it is written.

    One of `right` (it is the worked solution), `column` (a wrong sum or a wrongly copied digit),
    `inner carry`, `leading carry`, `form` (only the tags, or it cannot be read).
    """
    if completion.strip() == worked_solution(prompt):
        return "right"
    digits, right = _without_tags(completion), _without_tags(worked_solution(prompt))
    if digits == right or not READABLE.fullmatch(digits):
        return "form"
    careless = _without_tags(_written(prompt, carry=lambda due: not due))
    if digits.startswith(careless[: careless.rindex("=") + 1]):
        return "inner carry"
    thought, answer = right.split()
    careless = answer[1:] if len(answer) == 3 else "1" + answer  # 132 written 32, or 26 written 126
    return "leading carry" if digits == f"{thought} {careless}" else "column"


def _without_tags(text: str) -> str:
    """A wrong tag is no excuse for not reading the sums."""
    return " ".join(re.sub("|".join(TAGS), " ", text).split())


def _written(prompt: str, carry: Callable[[bool], bool]) -> str:
    """The completion of a sum in which `carry(due)` says whether a carry is written."""
    a, b = map(int, prompt.removesuffix("=").split("+"))
    low, high, carried = a % 10 + b % 10, a // 10 + b // 10, ""
    if carry(low >= 10):
        high, carried = high + 1, "+1"
    thought = f"{a % 10}+{b % 10}={low},{a // 10}+{b // 10}{carried}={high}"
    leading = "1" if carry(high >= 10) else ""
    return f"<think>{thought}</think><answer>{leading}{high % 10}{low % 10}</answer>"
