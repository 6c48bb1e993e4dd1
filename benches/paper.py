"""What did the authors measure? Their published evaluation logs, as curves.

    curves = paper_curves("pods/results")       # of a clone of github.com/YixuanEvenXu/pods
    log = curves["GSM8K, Qwen2.5-3B, L40S"]
    speedup(mean_curve(log["times"], log["baseline"]), mean_curve(log["times"], log["pods"]))

The logs are read, never divided by numbers that were measured here.
"""

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_COST = 1.34  # of PODS over GRPO on the paper's L40S: 10.12 s with n = 64, 7.56 s with n = 16


@dataclass(frozen=True)
class SingleGPU:
    """One of the paper's settings on one GPU: a log file a run, an evaluation a checkpoint."""

    baseline: str  # in the names of its logs
    pods: str
    data: str  # the test set
    metric: str
    hours: float  # shown in the paper
    every: float  # hours between checkpoints


SINGLE_GPU = {
    "GSM8K, Qwen2.5-3B, L40S": SingleGPU(
        "GSM8K-512-16-16", "GSM8K-512-64-16", "gsm8k", "ans_acc", hours=6, every=1 / 2
    ),
    "MATH, Qwen2.5-3B, L40S": SingleGPU(
        "MATH-NF-512-8-8", "MATH-NF-512-32-8", "math500", "ans_acc", hours=6, every=1 / 2
    ),
    "GSM8K, Llama-3.2-3B, L40S": SingleGPU(
        "Llama-512-16-16-0.04", "Llama-512-64-16-0.04", "gsm8k", "both_acc", hours=1.5, every=1 / 6
    ),
}
EIGHT_GPUS = {  # one table for all runs
    "GSM8K, Qwen2.5-3B, 8 x H100": "h100s-acc.csv",
    "GSM8K, Qwen2.5-7B, 8 x A100": "a100s-acc.csv",
}


def paper_curves(folder: Path | str) -> dict[str, dict]:
    """The authors' published evaluation logs (`results/` of github.com/YixuanEvenXu/pods).

    Returns:
        For each setting: `unit` of time, `times`, and for `baseline` and `pods` a list of runs,
        each the accuracies at these times. `mean_curve` and `speedup` take it from there.
    """
    settings, folder = {}, Path(folder)
    for name, one in SINGLE_GPU.items():
        times = [one.every * (i + 1) for i in range(round(one.hours / one.every))]
        setting = {"unit": "hours", "times": times}
        for arm, stem in (("baseline", one.baseline), ("pods", one.pods)):
            logs = sorted(folder.glob(f"Instruct-{stem}-Run*.json"))
            setting[arm] = [checkpoint_log(log, one)[: len(times)] for log in logs]
        settings[name] = setting
    for name, file in EIGHT_GPUS.items():
        times = list(range(2, 31, 2))
        setting = {"unit": "minutes", "times": times}
        for arm, tag in (("baseline", "-n32-m32-ga16 "), ("pods", "-n128-m32-ga4 ")):
            setting[arm] = table_log(folder / file, tag, times)
        settings[name] = setting
    return settings


def checkpoint_log(path: Path, setting: SingleGPU) -> list[float]:
    """One run's accuracies, a mean over repeats for each checkpoint, in the order of the steps."""
    checkpoints = json.loads(path.read_text())
    order = sorted(checkpoints, key=lambda name: int(name.rpartition("-")[2]))
    return [statistics.fmean(checkpoints[name][setting.data][setting.metric]) for name in order]


def table_log(path: Path, tag: str, minutes: Sequence[float]) -> list[list[float]]:
    """The accuracies of the runs whose name holds `tag`, at the rows nearest to these minutes."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    runs = []
    for column in rows[0]:
        if tag in column and column.endswith("accuracy_reward/mean"):
            points = [
                (float(row["eval/time"]) / 60, float(row[column])) for row in rows if row[column]
            ]
            runs.append([min(points, key=lambda p: abs(p[0] - minute))[1] for minute in minutes])
    return runs
