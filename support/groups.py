"""What a run logs of whole groups: every reward and what was kept, and a few texts to read.

    groups, texts = logged(run.processes, step, problems, rollouts, parts, keep, advantages)

A row of groups.jsonl is one prompt of one step:

    step, group           which prompt of the step, counted over all processes
    prompt, answer        what was asked, and the reference
    rewards               [n] the total of each rollout
    parts                 [n] for each part of the reward, by name; `select_by` names what the rule saw
    lengths, finished     [n] tokens with EOS; 1 if the rollout ended with EOS, 0 if it was cut off
    kept, advantages      [m] indices, ascending, and the advantage of each of these

With four parts it has about 24 bytes a rollout and 12 a kept one: 1.8 kB for n = 64, 6.5 for n = 256.

A row of rollouts.jsonl is one rollout with its text: step, group, index (in the group), prompt,
answer, completion, finished, the parts with `total`, kept. Of each group there are up to four: the
best and the worst kept, the best and the worst that were left out. Of equal ones the first is best
and the last is worst.

Numbers are rounded to 4 digits, and whole ones are written without a point.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from rollouts import Rollouts
from support.files import json_line
from support.processes import Processes
from support.tasks import Problem

# As long as a run's texts fit into this, each step's are written, and then ever fewer.
TEXT_BYTES = 50_000_000


def logged(
    processes: Processes,
    step: int,
    problems: Sequence[Problem],
    rollouts: Rollouts,
    parts: Mapping[str, Sequence[float]],
    keep: torch.Tensor,
    advantages: torch.Tensor,
) -> tuple[list[dict], list[dict]]:
    """The step's rows of groups.jsonl and of rollouts.jsonl, of all processes, for every process.

    Args:
        problems: P of this process; its `rollouts` are [P, n].
        parts: what `score` returned: P*n numbers for each name, `total` among them.
        keep, advantages: [P, m].
    """
    n = rollouts.mask.shape[1]
    lengths, finished = rollouts.mask.sum(-1).tolist(), rollouts.finished.int().tolist()
    groups, texts = [], []
    for p, problem in enumerate(problems):
        own = {name: short(values[p * n : (p + 1) * n]) for name, values in parts.items()}
        total, kept = own.pop("total"), keep[p].tolist()
        asked = {"prompt": problem.prompt, "answer": problem.answer}
        row = {"step": step, "group": p} | asked | {"rewards": total, "parts": own}
        row |= {"lengths": lengths[p], "finished": finished[p], "kept": kept}
        groups.append(row | {"advantages": short(advantages[p].tolist())})
        for i in telling(total, kept):
            row = {"step": step, "group": p, "index": i} | asked
            row |= {"completion": rollouts.texts[p][i], "finished": bool(finished[p][i])}
            row |= {name: values[i] for name, values in own.items()}
            texts.append(row | {"total": total[i], "kept": i in kept})
    shares = processes.gather((groups, texts))
    for rank, share in enumerate(shares):
        for row in [*share[0], *share[1]]:
            row["group"] += rank * len(problems)
    groups = [row for share in shares for row in share[0]]
    texts = [row for share in shares for row in share[1]]
    # Decided by the step and its texts alone, so that a resumed run decides as the first one did.
    return groups, texts if step % steps_between(step, texts) == 0 else []


def telling(rewards: Sequence[float], kept: Sequence[int]) -> list[int]:
    """The rollouts whose texts show what was selected: best and worst kept, best and worst not."""
    order = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    inside = [i for i in order if i in kept]
    outside = [i for i in order if i not in kept]
    return list(dict.fromkeys(inside[:1] + inside[-1:] + outside[:1] + outside[-1:]))


def steps_between(step: int, texts: Sequence[dict]) -> int:
    """1 while all steps' texts would fit into TEXT_BYTES, then 2, 4, ...: half as much again each
    time that the number of steps doubles."""
    excess = step * sum(len(json_line(row)) for row in texts) / TEXT_BYTES
    return 2 ** math.ceil(math.log2(excess)) if excess > 1 else 1


def short(numbers: Sequence[float]) -> list[float]:
    """Rounded to 4 digits; 1 for 1.0."""
    rounded = [round(number, 4) for number in numbers]
    return [int(number) if number == number // 1 else number for number in rounded]
