"""How the benches measure: in turn, in rounds, in processes that have done nothing yet."""

import json
import math
import os

import pytest
import torch

from benches.measure import in_processes, interleaved, quartiles, ratio, table, write


def test_functions_are_called_in_turn_and_short_ones_more_often():
    called = []
    times = interleaved(
        {"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3, least=0.0
    )
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert called == [*"aabb", *"ab" * 3]  # two calls of each to warm up, then the rounds
    assert min(min(seconds) for seconds in times.values()) > 0
    called.clear()
    interleaved({"a": lambda: called.append("a")}, rounds=1, least=0.001)
    assert len(called) > 20


def test_a_ratio_is_taken_round_by_round():
    times = {"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}  # the second round was slow for both
    assert ratio(times, "a", "b") == [2.0, 2.0, 2.5]


def test_quartiles_of_one_value_are_the_value():
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_processes_work_in_order_and_are_not_this_one():
    assert list(in_processes(2, math.sqrt, [4, 9, 16])) == [2, 3, 4]
    (other,) = in_processes(1, eval, ["__import__('os').getpid()"])
    assert other != os.getpid()
    torch.set_num_threads(1)
    assert list(in_processes(1, eval, ["__import__('torch').get_num_threads()"])) == [1]


def test_an_error_in_a_process_comes_back():
    with pytest.raises(ValueError, match="math domain"):
        list(in_processes(2, math.sqrt, [-1, 4, 9]))


def test_tables_show_numbers_and_spreads():
    rows = [{"a": 1.23456, "b": [2.0, 1.0, 3.0]}, {"a": None, "b": 1_000_000}]
    lines = table("title", rows).splitlines()
    assert lines[1:] == ["title", "   a          b", "1.23    2 (1-3)", "   -  1,000,000"]
    assert table("", [{"a": [None, 0.0, 0.0], "b": 12345.6}]).split() == [*"ab", "never", "12,346"]


def test_what_is_written_says_how_and_where_it_was_made(tmp_path):
    path = write(tmp_path, "part", "python bench.py part", {"rows": [1, 2]})
    result = json.loads(path.read_text())
    assert path == tmp_path / "part.json" and list(tmp_path.iterdir()) == [path]
    assert (result["bench"], result["command"]) == ("part", "python bench.py part")
    assert result["rows"] == [1, 2] and result["machine"]["torch"] == torch.__version__
