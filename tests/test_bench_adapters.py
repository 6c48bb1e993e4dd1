"""What is measured of a merged adapter, against what is known."""

import json

import bench


def test_rounding_to_the_nearest_loses_small_updates_and_rounding_by_chance_does_not(tmp_path):
    flags = ["adapters", "--updates", "1", "3", "--lr", "1e-4", "--rank", "4"]
    assert bench.main([*flags, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "adapters.json").read_text())["rows"]
    assert [row["updates"] for row in rows] == [1, 3]
    for row in rows:
        assert abs(row["share, not at all"] - 1) < 1e-3
        assert row["gap, not at all"] < 0.01 * row["log-probs moved"]
        assert row["share, nearest"] < 0.5 and abs(row["share, by chance"] - 1) < 0.2
        assert row["gap, by chance"] < row["gap, nearest"] < 2 * row["log-probs moved"]
