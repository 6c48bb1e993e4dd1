"""What a run logs of whole groups: every reward and what was kept, and a few texts to read.

    logs = logged(run.processes, step, problems, rollouts, parts, keep, advantages)

A row of groups.jsonl is one prompt of one step (1.6 kB for n = 64 and m = 16, 6 kB for n = 256):

    step, group           which prompt of the step, counted over all processes
    prompt, answer        what was asked, and the reference
    rewards               [n] the total of each rollout
    parts                 [n] for each part of the reward, by its name
    lengths, finished     [n] tokens with EOS; 1 if the rollout ended with EOS, 0 if it was cut off
    kept, advantages      [m] indices, ascending, and the advantage of each of these

A row of rollouts.jsonl is one rollout with its text: step, group, index (in the group), prompt,
answer, completion, finished, the parts with `total`, kept. A group has up to four such rows: best
and worst kept, best and worst left out; among equal rewards the first counts as best. Numbers in
groups.jsonl have 4 digits.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from rollouts import Rollouts
from support.files import json_line
from support.processes import Processes
from support.tasks import Problem

TEXT_BYTES = 50_000_000  # while a run's texts fit into this, those of every step are written


def logged(
    processes: Processes,
    step: int,
    problems: Sequence[Problem],
    rollouts: Rollouts,
    parts: Mapping[str, Sequence[float]],
    keep: torch.Tensor,
    advantages: torch.Tensor,
) -> dict[str, list[dict]]:
    """The step's rows of groups.jsonl and of rollouts.jsonl, of all processes.

    Args:
        problems, rollouts: of this process, P and [P, n].
        parts: what `score` returned: P*n numbers for each name, `total` among them.
        keep, advantages: [P, m].
    """
    n = rollouts.mask.shape[1]
    lengths, finished = rollouts.mask.sum(-1).tolist(), rollouts.finished.int().tolist()
    groups, texts = [], []
    for p, problem in enumerate(problems):
        own = {name: short(values[p * n : (p + 1) * n]) for name, values in parts.items()}
        rewards, kept = own.pop("total"), keep[p].tolist()
        head = {"step": step, "group": p + processes.rank * len(problems)}
        asked = {"prompt": problem.prompt, "answer": problem.answer}
        row = head | asked | {"rewards": rewards, "parts": own, "lengths": lengths[p]}
        row |= {"finished": finished[p], "kept": kept, "advantages": short(advantages[p].tolist())}
        groups.append(row)
        for i in telling(rewards, kept):
            row = head | {"index": i} | asked | {"completion": rollouts.texts[p][i]}
            row |= {"finished": bool(finished[p][i])}
            row |= {name: values[p * n + i] for name, values in parts.items()}
            texts.append(row | {"kept": i in kept})
    shares = processes.gather((groups, texts))
    groups, texts = ([row for share in shares for row in share[kind]] for kind in (0, 1))
    # Decided by the step and its texts alone, so that a resumed run decides as the first one did.
    return {"groups": groups, "rollouts": [] if step % steps_between(step, texts) else texts}


def telling(rewards: Sequence[float], kept: Sequence[int]) -> list[int]:
    """The rollouts whose texts show what was selected: the ends of the kept and of the others."""
    order = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    inside = [i for i in order if i in kept]
    outside = [i for i in order if i not in kept]
    return list(dict.fromkeys(inside[:1] + inside[-1:] + outside[:1] + outside[-1:]))


def steps_between(step: int, texts: Sequence[dict]) -> int:
    """1 while the texts of all steps so far, each as long as these, fit into TEXT_BYTES.

    Then 2, 4, ...: a run of twice as many steps has 25 MB more.
    """
    excess = step * sum(len(json_line(row)) for row in texts) / TEXT_BYTES
    return 2 ** math.ceil(math.log2(excess)) if excess > 1 else 1


def short(numbers: Sequence[float]) -> list[float]:
    """Rounded to 4 digits; 1 for 1.0, which saves a third of the file."""
    rounded = (round(number, 4) for number in numbers)
    return [int(number) if number % 1 == 0 else number for number in rounded]
