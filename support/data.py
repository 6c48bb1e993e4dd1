"""The problems of a run with their prompts, and the order in which they come.

    data = load_data("gsm8k", "train", None, tokenizer, config, vocabulary)
    problems, prompt_ids = data.at(range(4), seed=0)     # the first four of an endless sequence

Everything random is a function of what is asked for: a resumed run needs no generator state.
"""

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from support import tasks
from support.errors import InputError, say
from support.settings import Config
from support.tasks import Problem


@dataclass
class Data:
    """A task's problems, and their prompts rendered for one tokenizer."""

    problems: list[Problem]
    prompt_ids: list[list[int]]

    def at(self, positions: Iterable[int], seed: int) -> tuple[list[Problem], list[list[int]]]:
        """What stands at these positions of one shuffle of all problems after another."""
        count = len(self.problems)
        indices = [epoch_order(count, seed, place // count)[place % count] for place in positions]
        return [self.problems[i] for i in indices], [self.prompt_ids[i] for i in indices]

    def subset(self, count: int) -> "Data":
        """`count` problems (0: all), the same ones for every seed, so that runs can be compared."""
        return Data(*self.at(range(min(count or len(self.problems), len(self.problems))), seed=0))

    def digest(self) -> str:
        """A few letters that differ if a prompt or an answer does, or their order."""
        answers = [problem.answer for problem in self.problems]
        return hashlib.sha256(repr((self.prompt_ids, answers)).encode()).hexdigest()[:16]


def load_data(
    task: str, split: str, folder: str | None, tokenizer, config: Config, vocabulary: int
) -> Data:
    """A task's problems, from its own `folder` or, the task of --task, from the one of --data."""
    folder = folder or (config.data if task == config.task else None)
    try:
        problems = tasks.load_task(task, split, folder)
        return Data(*tasks.encode(problems, tokenizer, config.max_prompt_tokens, vocabulary))
    except ValueError as error:
        raise InputError(f"--model {config.model}, --task {task}: {error}") from error


def say_shared(name: str, tested: Sequence[Problem], trained: Sequence[Problem]) -> None:
    """Say how many questions of the evaluation task `name` are also trained on."""
    known = {" ".join(problem.prompt.split()).casefold() for problem in trained}
    shared = [p for p in tested if " ".join(p.prompt.split()).casefold() in known]
    if shared:
        asked = f"{len(shared)} of {len(tested)} test questions of {name}"
        say(f"{asked} are also trained on: its accuracy is in part what was learned by heart")


def derived_seed(*parts: object) -> int:
    """A seed that depends on all its parts, the same in every process and Python version."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of the problems in one pass over them; each pass has its own."""
    order = list(range(count))
    random.Random(derived_seed(seed, "order", epoch)).shuffle(order)
    return order
