"""A reward of your own: a function in a Python file, beside accuracy, format and tag count.

    python train.py --reward mine.py:brevity=0.2

    def brevity(completions, **others):                  # in mine.py
        return [1 / (1 + len(text) / 100) for text in completions]

What it is given and what it must return: docs/own_reward.md. It runs in the trainer's process, as
the user's own code: nothing bounds its time, its memory or what it may do.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from support.errors import InputError
from support.tasks import Problem


@dataclass
class OwnReward:
    """One function: `numbers = reward(problems, completions)`."""

    spec: str  # mine.py:brevity
    name: str  # brevity, of its part of the reward
    weight: float
    function: Callable[..., Sequence[float]]
    digest: str  # of its file

    def __call__(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """A number for each completion, which has one of the problems; or else InputError."""
        names = {name for p in problems for name in p.columns}
        lists = {name: [p.columns.get(name) for p in problems] for name in names}
        lists |= {"answers": [p.answer for p in problems], "prompts": [p.prompt for p in problems]}
        lists["completions"] = list(completions)
        try:
            values = self.function(**{name: list(items) for name, items in lists.items()})
        except (Exception, SystemExit) as error:
            where = self.failing(lists, len(completions))
            raise InputError(f"--reward {self.spec} fails{where}: {said(error)}") from error
        values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
        gives, count = f"--reward {self.spec} gives", len(completions)
        if not isinstance(values, list | tuple) or len(values) != count:
            need = f"for {count} completions: need a list of {count} numbers"
            raise InputError(f"{gives} {said(values)} {need}")
        for i, value in enumerate(values, start=1):
            if not (isinstance(value, Real) and abs(value) < 1e100):  # nor is NaN below it
                raise InputError(f"{gives} {said(value)} for completion {i}: need a finite number")
        return list(map(float, values))

    def failing(self, lists: dict[str, list], count: int) -> str:
        """Which completion it is that the function fails on, as far as one alone shows it."""
        for i in range(count):
            try:
                self.function(**{name: [items[i]] for name, items in lists.items()})
            except (Exception, SystemExit):
                return f" on completion {i + 1}"
        return ""


def said(value: object) -> str:
    """A value, a list of values or an exception in one short line."""
    count = f"{len(value)} values " if isinstance(value, list | tuple) else ""
    return count + " ".join(repr(value).split())[:100]


def load(spec: str, weight: float) -> OwnReward:
    """Run the file and take the function out of it; InputError if that cannot be."""
    path, _, name = spec.rpartition(":")
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
        found = importlib.util.spec_from_file_location(f"own_reward_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(found)
        sys.modules[module.__name__] = module  # where dataclasses look for their module
        found.loader.exec_module(module)
        return OwnReward(spec, name, weight, getattr(module, name), digest)
    except (Exception, SystemExit) as error:
        raise InputError(f"--reward {spec} cannot be loaded: {said(error)}") from error
