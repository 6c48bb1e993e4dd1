"""What the notebooks share: computed sentences and tables, exercises, stored races.

    python -m notebooks.lessons notebooks/*.ipynb      # run them, and store what comes out

A notebook holds what is learned from; what would only be scrolled past is here. Needs IPython.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from IPython.display import Markdown, display

from benches.standings import Arm

SHORT = bool(os.environ.get("CI"))  # a test wants to know whether it runs, not what comes out


def prepare(dpi: int = 80) -> None:
    """One thread (the fastest for a small policy), no progress bars, the look of the figures."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    plt.rcParams.update({"figure.dpi": dpi, "axes.grid": True, "grid.alpha": 0.3, "font.size": 10})


def at_most(number: int, short: int) -> int:
    """`number`, or `short` where CI is set."""
    return short if SHORT else number


def say(text: str) -> None:
    """Show a sentence or a table whose numbers were computed."""
    display(Markdown(text))


def as_table(rows: Sequence[dict]) -> str:
    """Rows of equal keys as a table."""
    lines = [map(str, rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def attempt(answer: Callable, check: Callable[[Callable], object]) -> None:
    """Say how far an exercise is: "to do" if the function returns nothing, "right" if it is.

    Raises:
        AssertionError: of `check(answer)`, if the answer is wrong.
    """
    returned = []

    def tried(*arguments):
        returned.append(answer(*arguments))
        return returned[-1]

    try:
        check(tried)
        say(f"Right: `{answer.__name__}` went through all checks.")
    except Exception:
        if returned[-1] is not None:
            raise
        say(f"To do: `{answer.__name__}` returns nothing yet.")


def load(path: Path) -> dict:
    """A race that bench.py wrote; its `runs` are an `Arm` each, `spacing` the grid's in seconds."""
    race = json.loads(path.read_text())
    race["runs"] = {arm: Arm.from_json(rates) for arm, rates in race["runs"].items()}
    marks = next(iter(race["runs"].values())).best[0].curve["time"]
    return race | {"spacing": race["seconds"] / (len(marks) - 1) / 4}


def how_it_was_made(result: dict) -> str:
    """The command and the machine, as a sentence."""
    machine = result["machine"]
    return (
        f"`{result['command']}` on {machine['cpu']}, {machine['cores']} cores (other work: "
        f"{result['other_work']:.1f} cores at most), torch {machine['torch']}, {machine['date']}."
    )


def store_anew(path: Path) -> None:
    """Run a notebook from top to bottom and store its outputs, without the times of its cells."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    about, where = notebook.metadata.copy(), {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=None, record_timing=False, resources=where).execute()
    notebook.metadata = about  # not the version of the Python that happened to run it
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store_anew(Path(name))
