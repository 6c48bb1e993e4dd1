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

# What is wrong where only carries are: in the tens column, and in the leading 1.
CARRIES = [("form", False, False), ("leading carry", False, True)]
CARRIES += [("inner carry", True, False), ("inner carry", True, True)]
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
    """What is wrong with a completion of a sum.

    One of `right` (it is the worked solution), `inner carry` (and perhaps the leading one, too),
    `leading carry`, `column` (another wrong digit), `form` (only the tags, or it cannot be read).
    """
    if completion.strip() == worked_solution(prompt):
        return "right"
    digits = _without_tags(completion)
    for kind, *wrong in CARRIES:
        careless = iter(wrong)
        if digits == _without_tags(_written(prompt, lambda due: due != next(careless))):  # noqa: B023
            return kind
    return "column" if READABLE.fullmatch(digits) else "form"


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
