"""A run on one page: view.html in its folder; a double click opens it, without server or network.

    python -m support.page runs/...                       # of a run that was stopped or is going on
    python -m support.page runs/... docs/explore.html     # written somewhere else

The page is support/view.html with the run's config.json and logs in it, as far as they are there.
However long the run is, it stays small and says what it leaves out: of a large file only every 2nd,
4th, ... step is taken, of a step the first groups, of a long text the beginning and the end.

Model output is hostile. It stands in a block of JSON, which no `<` can end; the script never makes
HTML of it; the page's policy (CSP) allows this script and style by their hashes, and nothing else.
"""

import base64
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.files import write_atomically

TEMPLATE = Path(__file__).with_name("view.html")
STEPS = 500  # the most that a page has, besides the last one
GROUPS = 8  # of a step
FILE_BYTES = 3_000_000  # of each file
CHARACTERS = 20_000  # of a text
# How a log's rows begin: those that are not wanted are not read any further.
BEGINNING = re.compile(r'\{"step": (\d+)(?:, "group": (\d+))?')


def write_page(folder: Path, page: Path | None = None) -> Path:
    """Write the page of the run in `folder`, to view.html there or to `page`; returns its path."""
    page, text = page or folder / "view.html", TEMPLATE.read_text()
    allowed = [f"{tag}-src {sha256(text, tag)}" for tag in ("script", "style")]
    policy = "; ".join(["default-src 'none'", *allowed])
    data = json.dumps(run_data(folder), separators=(",", ":")).replace("<", "\\u003c")
    write_atomically(page, text.replace("__POLICY__", policy, 1).replace("__DATA__", data, 1))
    return page


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
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: python -m support.page RUN_FOLDER [PAGE]")
    if not any(Path(sys.argv[1]).glob("*.jsonl")):
        sys.exit(f"support.page: {sys.argv[1]} holds no run, that is, no logs")
    print(write_page(*map(Path, sys.argv[1:])))
