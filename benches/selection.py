"""What does choosing m of n rollouts cost? The rule against torch.sort and against obvious ways.

python bench.py select
python bench.py select --sizes 1x1024 512x64 --patience 30

Legend: G groups, n rollouts each, m kept.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benches.measure import interleaved, new_figure, ratio, seconds_of, table
from pods import max_variance

WAYS = {
    "sort": "torch.sort alone",
    "max_variance": "pods.max_variance",
    "authors": "m + 1 subsets of size m",
    "brute": "all C(n, m) subsets",
}
ONE_GROUP = ((1, n) for n in (16, 64, 256, 1024, 4096, 65_536, 1_000_000))
SIZES = (*ONE_GROUP, *itertools.product((16, 512, 4096), (64, 1024)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--sizes", type=group_size, nargs="+", help="such as 1x1024 512x64")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds a call may take")


def group_size(text: str) -> tuple[int, int]:
    """`512x1024` -> 512 groups of 1024."""
    groups, _, n = text.partition("x")
    return int(groups), int(n)


def select(arguments: argparse.Namespace) -> dict:
    """How long max-variance selection takes.

    `max_variance` is one sort and a few passes, so it should stay within 3x of torch.sort of the
    same rewards where the work, not the call, is what costs; below about 10,000 rewards a call of
    anything costs tens of microseconds. The authors' way costs m + 1 small subsets for every group.
    What would take longer than --patience a call is left out ("-").
    """
    rows = []
    for G, n in SIZES if arguments.sizes is None else arguments.sizes:
        m = max(2, n // 4)
        generator = torch.Generator().manual_seed(n + G)
        rewards = torch.randn(G, n, dtype=torch.float64, generator=generator)
        functions = {
            "sort": partial(torch.sort, rewards),
            "max_variance": partial(max_variance, rewards, m),
        }
        for name, function, most in (("authors", authors_way, 4096), ("brute", brute_force, 16)):
            if n <= most:
                seconds = G * seconds_of(partial(function, rewards[0], m), 1)
                if seconds <= arguments.patience:
                    functions[name] = partial(each_group, function, rewards, m)
        times = interleaved(functions, arguments.rounds)

        row = {"groups": G, "n": n, "m": m}
        for name in WAYS:
            row[f"{name} ms"] = 1e3 * statistics.median(times[name]) if name in times else None
        row["max_variance / sort"] = ratio(times, "max_variance", "sort")
        for name in ("authors", "brute"):
            measured = name in times
            row[f"{name} / max_variance"] = ratio(times, name, "max_variance") if measured else None
        rows.append(row)
    print(table("selection: ratios as median (quartiles) over rounds", rows))
    draw(rows, arguments.out / "select.png")
    return {"rows": rows}


def authors_way(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The obvious max-variance selection for one group [n]: build all m + 1 subsets, compare.

    This is how the paper's released trainers do it: each subset is put together, the i lowest and
    the m - i highest, and its variance computed from all its m members.
    """
    order = rewards.argsort()  # [n]
    best, largest = None, -math.inf
    for i in range(m + 1):
        subset = torch.cat([order[:i], order[len(order) - (m - i) :]])  # [m]
        variance = rewards[subset].var(correction=0).item()
        if variance > largest:
            best, largest = subset, variance
    return best.sort().values


def brute_force(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The best of all subsets of size m of one group [n]: C(n, m) of them."""
    subsets = torch.tensor(list(itertools.combinations(range(len(rewards)), m)))  # [C(n, m), m]
    return subsets[rewards[subsets].var(-1, correction=0).argmax()]


def each_group(
    function: Callable[[torch.Tensor, int], torch.Tensor], rewards: torch.Tensor, m: int
) -> torch.Tensor:
    """A function for one group, applied to every row of rewards [G, n]: indices [G, m]."""
    return torch.stack([function(group, m) for group in rewards])


def draw(rows: list[dict], path: Path) -> None:
    """Time of one call against the group's size, and against the number of groups."""
    figure, (left, right) = new_figure(2)
    most = max((row["n"] for row in rows if row["groups"] > 1), default=None)
    one_group = [row for row in rows if row["groups"] == 1]
    largest_groups = [row for row in rows if row["n"] == most]
    left.set(title="one group, m = n / 4", xlabel="rollouts n in the group")
    right.set(title=f"n = {most}, m = n / 4", xlabel="groups in one call")
    for axes, key, view in ((left, "n", one_group), (right, "groups", largest_groups)):
        for name, label in WAYS.items():
            points = [(row[key], row[f"{name} ms"]) for row in view if row[f"{name} ms"]]
            if points:
                axes.loglog(*zip(*points), marker="o", ms=4, label=label)
        axes.set_ylabel("milliseconds a call")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
