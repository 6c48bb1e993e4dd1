"""The authors' logs give the paper's numbers, by the same measure as our race."""

import json
import os
from pathlib import Path

import pytest

from bench import speedup
from benches.paper import SINGLE_GPU, checkpoint_log, paper_curves, table_log
from benches.standings import mean_curve

# The authors' logs, github.com/YixuanEvenXu/pods: the variable names a clone's results/ folder.
BESIDE = Path(__file__).parents[2] / "shared" / "paper" / "results"
PAPER = Path(os.environ.get("PODS_RESULTS", BESIDE))


@pytest.mark.skipif(not PAPER.is_dir(), reason="needs the authors' logs, see PODS_RESULTS above")
def test_speedup_of_the_authors_published_logs():
    found = {}
    for name, setting in paper_curves(PAPER).items():
        curves = [mean_curve(setting["times"], setting[arm]) for arm in ("baseline", "pods")]
        runs = len(setting["baseline"]), len(setting["pods"])
        found[name] = (round(speedup(*curves), 2), setting["unit"], runs)
    assert found == {
        "GSM8K, Qwen2.5-3B, L40S": (2.0, "hours", (10, 10)),
        "MATH, Qwen2.5-3B, L40S": (2.0, "hours", (10, 10)),
        "GSM8K, Llama-3.2-3B, L40S": (3.0, "hours", (10, 10)),
        "GSM8K, Qwen2.5-3B, 8 x H100": (1.71, "minutes", (5, 5)),
        "GSM8K, Qwen2.5-7B, 8 x A100": (1.75, "minutes", (5, 5)),
    }


def test_checkpoints_are_read_in_the_order_of_their_steps_and_repeats_averaged(tmp_path):
    setting = SINGLE_GPU["GSM8K, Qwen2.5-3B, L40S"]
    log = {f"checkpoint-{step}": {"gsm8k": {"ans_acc": [step, step + 2]}} for step in (100, 20, 3)}
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert checkpoint_log(tmp_path / "log.json", setting) == [4, 21, 101]


def test_a_table_is_read_at_the_nearest_minutes_and_only_for_the_tag(tmp_path):
    ours, other = "a -n2 b - eval/accuracy_reward/mean", "a -n4 b - eval/accuracy_reward/mean"
    rows = ["eval/time," + ours + "," + other, "60,0.1,0.9", "118,0.2,", "200,,0.9", "240,0.4,0.9"]
    (tmp_path / "log.csv").write_text("\n".join(rows))
    assert table_log(tmp_path / "log.csv", "-n2 ", [1, 2, 4]) == [[0.1, 0.2, 0.4]]
