"""What a run's log says about other n and m: prices, cosines, and the whole command once."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import small

import bench
from benches.advice import advice, cosine, group, prices, progress
from benches.allocation import Moments, group_gradients, moments
from support.errors import InputError
from support.settings import Config

RARE = Moments(p=0.5, gap=1.0, v1=1.0, v0=1.0)
ROW = {"groups": 4, "groups_without_signal": 3, "pass_rates": [0.02, 0.0, 0.05, 1.0]}
ROW |= {"seconds": {"generate": 3.0, "score": 1.0, "select": 9.0, "update": 5.0, "sync": 9.0}}


def test_a_rollout_is_paid_where_it_is_made_and_where_it_is_trained_on():
    make, train = prices([ROW, ROW], Config(n=10, m=5))
    assert make == pytest.approx(8.0 / 8)  # a prompt, of four a step
    assert train == pytest.approx(10.0 / 10)  # two groups of five had signal


@pytest.mark.parametrize(("n", "m"), [(8, 8), (32, 8), (32, 2), (2, 2)])
def test_the_cosine_is_about_that_of_updates_with_their_expectation(n, m):
    """Two prompts at right angles, many numbers a gradient, as a policy's have."""
    draw, D, updates, expected, parts = torch.Generator().manual_seed(0), 120, 0.0, 0.0, []
    for prompt, rate in enumerate((0.2, 0.5)):
        right = torch.arange(200) < 200 * rate
        gradients = torch.zeros(200, 2 * D)
        own = slice(prompt * D, (prompt + 1) * D)
        gradients[:, own] = 0.15 * torch.randn(200, D, generator=draw)
        gradients[right, prompt * D] += 1.0
        rewards = right.double()
        drawn = group_gradients(gradients, rewards, rewards, "max_variance", n, m, 4000, draw)
        updates, expected = updates + drawn, expected + drawn.mean(0)
        about = moments(gradients, right)
        parts.append(group(about.p, about, "max_variance", n, m))
    seen = torch.cosine_similarity(updates, expected[None], dim=1).mean().item()
    assert 0.15 < seen < 0.97
    assert cosine(parts) == pytest.approx(seen, rel=0.06)


def test_a_prompt_without_right_or_without_wrong_answers_is_idle():
    for rate in (0.0, 1.0):
        (signal, busy) = group(rate, RARE, "max_variance", 64, 16)
        assert (signal.signal, signal.noise, busy) == (0.0, 0.0, 0.0)
    assert cosine([group(0.0, RARE, "random", 4, 4)]) == 0.0
    assert group(0.5, RARE, "random", 2, 2)[1] == pytest.approx(0.5)


def test_many_rollouts_pay_where_right_answers_are_rare_and_more_cost_little():
    def gain(dearer: float) -> float:
        """Of 128 rollouts over 16, which are `dearer` to make."""
        many = progress([ROW], RARE, "max_variance", 128, 16, dearer, 0.01)
        return many / progress([ROW], RARE, "max_variance", 16, 16, 1.0, 0.01)

    assert gain(1.0) > 1.5 > 1.0 > gain(16.0)


def made_up_run(folder: Path, rows: list[dict]) -> Path:
    """What a run leaves that is read here."""
    (folder / "config.json").write_text(json.dumps(asdict(small())))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_runs_log_gives_a_table_over_its_own_n_and_m(tmp_path, capsys):
    rows = [{"step": 0, "eval_accuracy": 0.3}, {"step": 1} | ROW, {"step": 2} | ROW]
    flags = ["--prompts", "1", "--pool", "48", "--groups", "500", "--ages", "1"]
    flags += ["--sizes", "8x4", "--out", str(tmp_path), "--run", str(made_up_run(tmp_path, rows))]
    assert bench.main(["signal", *flags]) == 0
    assert "progress a second" in capsys.readouterr().out
    result = json.loads((tmp_path / "signal.json").read_text())
    assert result["config"]["n"] == 8  # the run's settings
    table = {row["n"]: row for row in result["advice"]}
    assert table[8]["m=4"] == 1.0 and table[8]["m=16"] is None
    assert all(value > 0 for n in table for value in table[n].values() if value is not None)


def test_a_folder_without_pass_rates_is_one_line(tmp_path):
    made_up_run(tmp_path, [{"step": 0, "eval_accuracy": 0.3}])
    with pytest.raises(InputError, match=r"no metrics\.jsonl with pass_rates"):
        advice(tmp_path, small(), [], {8: 1.0})
