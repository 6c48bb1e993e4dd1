"""A run on one page: view.html in its folder, opened by a double click, without server or network.

    python -m support.page runs/...                       # of a run that was stopped or is going on
    python -m support.page runs/... docs/explore.html     # written somewhere else
    write_page(folder)                                    # what train.py does

The page is support/view.html with a run's data in it: config.json, metrics.jsonl, groups.jsonl,
rollouts.jsonl and evaluation.jsonl, as far as they are there. It stays small however long the run
is: of a file that is too large only every 2nd, 4th, ... step is taken, of a step only the first
groups, and a long text loses its middle. The page says what it leaves out.

Model output is hostile. It stands in a block of JSON, in which `<` is escaped, so that nothing in
it can end the block. The script never makes HTML of it. And the page's own policy (CSP) allows
nothing except this script and this style, known by their hashes: no other script, no connection.
"""

import base64
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.errors import InputError
from support.files import write_atomically

TEMPLATE = Path(__file__).with_name("view.html")
STEPS = 500  # the most that a page has
GROUPS = 8  # of a step
FILE_BYTES = 3_000_000  # of each file
CHARACTERS = 20_000  # of a text
# How the rows of the three logs begin: only rows that are wanted are read any further.
BEGINNING = re.compile(r'\{"step": (\d+)(?:, "group": (\d+))?')


def write_page(folder: Path, page: Path | None = None) -> Path:
    """Write the page of the run in `folder`, to view.html there or to `page`; returns its path.

    Raises:
        InputError: the folder holds no run.
    """
    page = page or folder / "view.html"
    text = TEMPLATE.read_text()
    hashes = {tag: content_hash(text, tag) for tag in ("script", "style")}
    policy = f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}"
    data = json.dumps(run_data(folder), separators=(",", ":")).replace("<", "\\u003c")
    write_atomically(page, text.replace("__POLICY__", policy, 1).replace("__DATA__", data, 1))
    return page


def content_hash(html: str, tag: str) -> str:
    """The hash of what stands between <tag> and </tag>, as a content security policy names it."""
    content = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def run_data(folder: Path) -> dict:
    """What the page shows of a run: its settings, and rows of its files. Missing files are empty."""
    settings = folder / "config.json"
    metrics = folder / "metrics.jsonl"
    answers = list(filter(None, map(parsed, lines(folder / "evaluation.jsonl"))))
    if not answers and not metrics.exists():
        raise InputError(f"{folder} holds no run: neither metrics.jsonl nor evaluation.jsonl")
    # Evaluations are rare among the steps, and all that some users look at.
    evaluations = [parsed(line) for line in lines(metrics) if '"eval": ' in line]
    every = max(1, -(-sum(map(size, answers)) // FILE_BYTES))
    return {
        "config": json.loads(settings.read_text()) if settings.exists() else {},
        "metrics": thinned(metrics),
        "evaluations": list(filter(None, evaluations))[:: 1 + len(evaluations) // STEPS],
        "groups": thinned(folder / "groups.jsonl"),
        "texts": thinned(folder / "rollouts.jsonl"),
        "answers": answers[::every],
        "left_out": {"groups_from": GROUPS, "answers_every": every},
    }


def thinned(path: Path) -> list[dict]:
    """A log's rows of every 2nd, 4th, ... step, so that they fit, and those of the last step."""
    sizes = Counter()  # of each step
    for line in lines(path):
        if begins := BEGINNING.match(line):
            sizes[int(begins[1])] += min(len(line), CHARACTERS) * (int(begins[2] or 0) < GROUPS)
    last, every, steps = max(sizes, default=0), 1, set(sizes)
    while every <= last and (
        len(steps) > STEPS or sum(sizes[step] for step in steps) > FILE_BYTES
    ):
        every *= 2
        steps = {step for step in sizes if step % every == 0 or step == last}
    rows = []
    for line in lines(path):
        begins = BEGINNING.match(line)
        if begins and int(begins[1]) in steps and int(begins[2] or 0) < GROUPS:
            rows.append(parsed(line))
    return list(filter(None, rows))


def lines(path: Path) -> Iterator[str]:
    """Of a file that may be missing."""
    if path.exists():
        with open(path, errors="replace") as file:
            yield from file


def parsed(line: str) -> dict | None:
    """A row, its long texts without their middle; None for half a row that a killed run left."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    for name, value in row.items():
        if isinstance(value, str) and len(value) > CHARACTERS:
            half = CHARACTERS // 2
            left_out = f"\n[... {len(value) - 2 * half:,} characters are left out here ...]\n"
            row[name] = value[:half] + left_out + value[-half:]
    return row


def size(row: dict) -> int:
    """The bytes of a row of evaluation.jsonl on the page, about."""
    return 200 + sum(len(value) for value in row.values() if isinstance(value, str))


if __name__ == "__main__":
    try:
        print(write_page(*map(Path, sys.argv[1:3])))
    except (InputError, TypeError) as error:
        sys.exit(f"support.page: {error}")
