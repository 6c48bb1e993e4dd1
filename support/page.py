"""What a run shows of its groups: logs of all rewards and some texts, and a page to look at them.

    logs = logged(run.processes, step, problems, rollouts, parts, keep, advantages)
    python -m support.page runs/...                       # view.html of a run that is going on
    python -m support.page runs/... docs/explore.html     # written somewhere else

A row of groups.jsonl is one prompt of one step: its n rewards, the m kept, their advantages. A row
of rollouts.jsonl is one rollout with its text, of up to four in a group: best and worst kept, best
and worst left out; among equal rewards the first counts as best. docs/questions.md has all columns.

The page is support/view.html with the run's config.json and logs in it. However long the run is, it
stays small and says what it leaves out: of a large file only every 2nd, 4th, ... step is taken, of
a step the first groups, of a long text the beginning and the end.

Model output is hostile. It stands in a block of JSON, which no `<` can end; the script never makes
HTML of it; the page's policy (CSP) allows this script and style by their hashes, and nothing else.
"""

import base64
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from rollouts import Rollouts
from support.processes import Processes, combined
from support.tasks import Problem

TEXT_BYTES = 50_000_000  # while a run's texts fit into this, those of every step are written
TEMPLATE = Path(__file__).with_name("view.html")
STEPS = 500  # the most that a page has, besides the last one
GROUPS = 8  # of a step
FILE_BYTES = 3_000_000  # of each file
CHARACTERS = 20_000  # of a text
# How a log's rows begin: those that are not wanted are not read any further.
BEGINNING = re.compile(r'\{"step": (\d+)(?:, "group": (\d+))?')


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
        problems, rollouts, keep, advantages: of this process: P, [P, n], [P, m], [P, m].
        parts: what `score` returned: P*n numbers for each name, `total` among them.
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
    logs = combined(processes.gather({"groups": groups, "rollouts": texts}))
    # Decided by the step and its texts alone, so that a resumed run decides as the first one did.
    if step % steps_between(step, logs["rollouts"]):
        logs["rollouts"] = []
    return logs


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
    excess = step * sum(len(json.dumps(row)) + 1 for row in texts) / TEXT_BYTES
    return 2 ** math.ceil(math.log2(excess)) if excess > 1 else 1


def short(numbers: Sequence[float]) -> list[float]:
    """Rounded to 4 digits; 1 for 1.0, which saves a third of the file."""
    rounded = (round(number, 4) for number in numbers)
    return [int(number) if number % 1 == 0 else number for number in rounded]


def page_of(folder: Path) -> str:
    """The page of the run in `folder`."""
    text = TEMPLATE.read_text()
    allowed = [f"{tag}-src {sha256(text, tag)}" for tag in ("script", "style")]
    policy = "; ".join(["default-src 'none'", *allowed])
    data = json.dumps(run_data(folder), separators=(",", ":")).replace("<", "\\u003c")
    return text.replace("__POLICY__", policy, 1).replace("__DATA__", data, 1)


def sha256(html: str, tag: str) -> str:
    """The hash of what stands between <tag> and </tag>, as a content security policy names it."""
    content = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].encode()
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def run_data(folder: Path) -> dict:
    """The settings, and rows of the files that there are."""
    settings, metrics = folder / "config.json", folder / "metrics.jsonl"
    answers = list(lines(folder / "evaluation.jsonl"))
    every = 1 + sum(map(size, answers)) // FILE_BYTES
    evaluated = [line for line in lines(metrics) if '"eval": ' in line]  # few of all steps
    return {
        "config": json.loads(settings.read_text()) if settings.exists() else {},
        "metrics": thinned(metrics),
        "evaluations": [parsed(line) for line in evaluated[:: 1 + len(evaluated) // STEPS]],
        "groups": thinned(folder / "groups.jsonl"),
        "texts": thinned(folder / "rollouts.jsonl"),
        "answers": [parsed(line) for line in answers[::every]],
        "left_out": {"groups_from": GROUPS, "answers_every": every},
    }


def thinned(path: Path) -> list[dict]:
    """A log's rows of every 2nd, 4th, ... step, so that they fit, and those of the last step."""
    sizes = Counter()  # of each step
    for step, line in rows(path):
        sizes[step] += size(line)
    last, every, steps = max(sizes, default=0), 1, set(sizes)
    while every < last and (len(steps) > STEPS or sum(map(sizes.get, steps)) > FILE_BYTES):
        every *= 2
        steps = {step for step in sizes if step % every == 0 or step == last}
    return [parsed(line) for step, line in rows(path) if step in steps]


def rows(path: Path) -> Iterator[tuple[int, str]]:
    """The step and the line of each row, of a step's first groups alone."""
    for line in lines(path):
        begins = BEGINNING.match(line)
        if begins and int(begins[2] or 0) < GROUPS:
            yield int(begins[1]), line


def lines(path: Path) -> Iterator[str]:
    """The whole lines of a file that may be missing, or end in half of one."""
    if path.exists():
        with open(path, errors="replace") as file:
            yield from (line for line in file if line.endswith("}\n"))


def size(line: str) -> int:
    """How many characters a row has on the page, about."""
    return min(len(line), 2 * CHARACTERS)


def parsed(line: str) -> dict:
    """A row; its long texts lose their middle."""
    row = json.loads(line)
    for name, value in row.items():
        if isinstance(value, str) and len(value) > CHARACTERS:
            half = CHARACTERS // 2
            gap = f"\n[... {len(value) - 2 * half:,} characters are left out here ...]\n"
            row[name] = value[:half] + gap + value[-half:]
    return row


if __name__ == "__main__":
    folder, *given = map(Path, sys.argv[1:3] or ["."])
    if not any(folder.glob("*.jsonl")):
        sys.exit(f"{folder} holds no logs; usage: python -m support.page RUN_FOLDER [PAGE]")
    page = given[0] if given else folder / "view.html"
    page.write_text(page_of(folder))
    print(page)
