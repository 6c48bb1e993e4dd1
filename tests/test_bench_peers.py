"""What is made of the seconds of two trainers; that they do the same work is in test_bench.py."""

import sys

import bench
import benches
from benches.peers import step_rows


def test_a_step_is_split_into_generation_and_the_rest():
    times = {
        "train.py total": [1.0, 10.0, 1.0],  # the second round was slow for both
        "train.py generate": [0.5, 5.0, 0.5],
        "TRL total": [3.0, 30.0, 3.0],
        "TRL generate": [2.0, 20.0, 2.0],
    }
    rows = {row["part"]: row for row in step_rows(times)}
    assert list(rows) == ["generate", "rest", "total"]
    assert rows["generate"]["TRL / train.py"] == [4.0, 4.0, 4.0]
    assert rows["rest"] == {
        "part": "rest",
        "TRL s": 1.0,
        "train.py s": 0.5,
        "TRL / train.py": [2.0, 2.0, 2.0],
    }
    assert rows["total"]["TRL / train.py"] == [3.0, 3.0, 3.0]
    assert len(times) == 4  # what was measured stays as it was


def test_without_trl_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benches.trl_steps", None)  # so importing it fails
    monkeypatch.delattr(benches, "trl_steps", raising=False)
    assert bench.main(["peers", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench.py: peers compares with TRL: pip install trl==1.16.0\n"
