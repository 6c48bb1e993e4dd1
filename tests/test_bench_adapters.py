"""What is measured of a merged adapter, against what is known."""

import json

import pytest
from conftest import adapted

import bench
from benches.adapters import share_merged
from support.adapters import merged_weights


def bfloat16_share(scale: float) -> float:
    """Of an update of this size, relative to the weights, what is left in bfloat16."""
    _, model = adapted("qwen2")
    for name, weight in model.named_parameters():
        if ".lora_B" in name:
            weight.data *= scale
        elif ".lora_A" not in name:
            weight.data = weight.data.bfloat16()
    return share_merged(model, dict(merged_weights(model)))


def test_in_float32_all_of_an_update_is_merged_and_in_bfloat16_not_if_it_is_small():
    _, model = adapted("qwen2")
    assert share_merged(model, dict(merged_weights(model))) == pytest.approx(1.0, abs=1e-4)
    large, small, none = [bfloat16_share(scale) for scale in (1.0, 1e-3, 1e-9)]
    assert large == pytest.approx(1.0, abs=0.01)
    assert small < 0.9 * large and none < 0.5 * small


def test_the_bench_compares_the_trainer_with_the_sampler(tmp_path, capsys):
    flags = ["adapters", "--updates", "1", "3", "--lr", "1e-3", "--rank", "4", "--out"]
    rows = {}
    for dtype in ("float32", "bfloat16"):
        assert bench.main([*flags, str(tmp_path), "--dtype", dtype]) == 0
        rows[dtype] = json.loads((tmp_path / "adapters.json").read_text())["rows"]
        assert [row["updates"] for row in rows[dtype]] == [1, 3]
    for exact, rounded in zip(rows["float32"], rows["bfloat16"], strict=True):
        assert exact["share merged"] == pytest.approx(1.0, abs=1e-3)
        assert exact["sampler - trainer"] < 1e-5 < 1e-3 < exact["log-probs moved"]
        assert rounded["sampler - trainer"] > 100 * exact["sampler - trainer"]
    assert "share merged" in capsys.readouterr().out
