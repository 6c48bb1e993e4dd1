"""What bench.py wrote, read again: the results of notebook 3.

race = load(ROOT / "notebooks/results/race.json")          # None if it is not there
how_it_was_made(race)                                       # command, machine, date
in_words([2.26, 1.46, 2.74])                                # 2.26 (1.46 to 2.74): sooner
"""

import json
import re
from pathlib import Path

from benches.standings import Arm


def load(path: Path) -> dict | None:
    """A result of bench.py, or None; `runs` are of each arm."""
    if not path.exists():
        return None
    result = json.loads(path.read_text())
    for part in (result, *result.get("starts", {}).values()):
        part["runs"] = {arm: Arm.from_json(rates) for arm, rates in part.get("runs", {}).items()}
    return result


def every(result: dict) -> float:
    """Seconds between evaluations."""
    marks = next(iter(result["runs"].values())).best[0].curve["time"]
    return result["seconds"] / (len(marks) - 1)


def how_it_was_made(result: dict) -> str:
    """The command and the machine, as a sentence."""
    command = re.sub(r" --out \S+", "", result["command"])
    machine = result["machine"]
    return (
        f"`{command}` on {machine['cpu']}, {machine['cores']} cores (load "
        f"{machine['load']:.1f} when it ended), torch {machine['torch']}, {machine['date']}."
    )


def in_words(gain: list | None) -> str:
    """A speed-up with its interval, and what may be said of it."""
    value, low, high = gain
    if value is None:
        return "does not get there in this race"
    verdict = "sooner" if low > 1 else "later" if high < 1 else "no clear difference"
    return f"{value:.2f} ({low:.2f} to {high:.2f}): {verdict}"
