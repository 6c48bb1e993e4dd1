"""How the benches measure: in turn, in rounds, and knowing what else the machine does."""

import json
from collections import namedtuple

import psutil
import pytest
import torch
from conftest import ROOT

from benches import measure
from benches.measure import QUIET, OtherWork, busy_seconds, interleaved, ratio, table, write


def test_functions_are_called_in_turn_and_the_first_round_warms_up():
    called = []
    functions = {name: lambda name=name: called.append(name) for name in "ab"}
    times = interleaved(functions, rounds=3)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert called == [*"ab" * 4]


def test_a_ratio_is_taken_round_by_round():
    times = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}  # the second round was slow for both
    assert ratio(times, "a", "b") == [2.0, 2.0, 2.5]
    assert ratio({"a": [4.0], "b": [2.0]}, "a", "b") == [2.0, 2.0, 2.0]


class MadeUpProcess:
    """What psutil knows of a process: user, system, ended children's user and system, waiting."""

    def __init__(self, *seconds, children=()):
        self.seconds, self.below = seconds, children

    def cpu_times(self):
        if not self.seconds:
            raise psutil.NoSuchProcess(1)
        return (*self.seconds, 1000.0)

    def children(self, recursive):
        return self.below if recursive else self.below[:1]


def test_the_bench_and_all_it_started_are_no_other_work(monkeypatch):
    """A child of a child counts, one that has just ended does not; waiting is no work."""
    children = [MadeUpProcess(20, 3, 2, 0), MadeUpProcess(5, 0, 0, 0), MadeUpProcess()]
    first = MadeUpProcess(100, 7, 0, 3, children=children)
    monkeypatch.setattr(measure.psutil, "Process", lambda pid: first)
    kinds = "user nice system idle iowait irq softirq steal guest guest_nice"
    of_all = namedtuple("Times", kinds)(1000, 100, 50, 99999, 999, 3, 2, 5, 77, 77)
    monkeypatch.setattr(measure.psutil, "cpu_times", lambda: of_all)
    assert busy_seconds() == 1160 - 110 - 25 - 5


def test_the_largest_load_between_two_looks_is_kept(monkeypatch):
    clock = {"now": 0.0, "busy": 0.0}
    monkeypatch.setattr(measure.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(measure, "busy_seconds", lambda: clock["busy"])
    other, seen = OtherWork(), []
    for now, busy in ((0.5, 0.5), (2.0, 1.0), (4.0, 4.0), (14.0, 5.0)):
        clock.update(now=now, busy=busy)
        other.look()
        seen.append(other.largest)
    assert seen == [None, 0.5, 1.5, 1.5]  # half a second is too short to tell


def test_stored_results_were_measured_on_a_quiet_machine():
    loads = {}
    for path in (ROOT / "notebooks" / "results").glob("*.json"):
        result = json.loads(path.read_text())
        if "machine" in result:  # not what others measured
            loads[path.stem] = result.get("other_work")
    assert loads and not {name for name, load in loads.items() if load is None}
    assert not {name: load for name, load in loads.items() if load > QUIET}


def test_tables_show_numbers_and_spreads():
    rows = [{"a": 1.23456, "b": [2.0, 1.0, 3.0]}, {"a": None, "b": 1_000_000}]
    lines = table("title", rows).splitlines()
    assert lines[1:] == ["title", "   a          b", "1.23    2 (1-3)", "   -  1,000,000"]
    assert table("", [{"a": [None, 0.0, 0.0], "b": 12345.6}]).split() == [*"ab", "never", "12,346"]


@pytest.mark.parametrize("own", [{}, {"other_work": 0.25}])
def test_what_is_written_says_how_and_where_it_was_made(own, tmp_path, monkeypatch):
    monkeypatch.setattr(measure.OTHERS, "largest", 0.125)
    path = write(tmp_path, "part", "python bench.py part", {"rows": [1, 2]} | own)
    result = json.loads(path.read_text())
    assert path == tmp_path / "part.json" and list(tmp_path.iterdir()) == [path]
    assert (result["bench"], result["command"]) == ("part", "python bench.py part")
    assert result["rows"] == [1, 2] and result["machine"]["torch"] == torch.__version__
    assert result["other_work"] == own.get("other_work", 0.125)  # a race's heats know better
