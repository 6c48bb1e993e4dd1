"""What is to be run on a GPU, run without one: every part, with the embedded policy."""

import pytest
import torch
from conftest import TASK

import bench
from benches import gpu
from support.run import Run
from support.settings import Config


@pytest.fixture(scope="module")
def config() -> Config:
    return Config(task=TASK, n=8, m=4, prompts_per_step=2, eval_problems=1, micro_batch=4)


def test_without_a_gpu_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["gpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "bench.py: gpu: torch finds no GPU here; the other benches need none\n"
    )


def test_all_of_it_runs_and_says_what_was_planned_and_measured(config, capsys):
    result = gpu.measure(config, [4, 8], count=2)
    whens = [row["when"] for row in result["gaps"]]
    assert whens[:2] == ["before the first sleep", "after the first sleep"]
    assert whens[2:] == [f"step {step}" for step in range(1, 7)]
    assert all(row["max"] < 1e-4 for row in result["gaps"] if row["max"] is not None)
    assert [row["n"] for row in result["steps"]] == [4, 8, 4, 8, 4, 8]
    few, many = result["phases"]
    assert (few["n"], many["n"]) == (4, 8) and min(few["update"], many["generate"]) > 0
    assert result["step cost ratio"] == many["total"] / few["total"]
    _, batch, update = result["memory"]
    assert batch["what"] == "micro-batch of 4 sequences"
    assert 0 < batch["planned GB"] < update["planned GB"] < update["measured GB"]  # the process's
    shown = capsys.readouterr().out
    for part in ("after the first sleep", "tokens/s", "the paper's L40S", "measured GB"):
        assert part in shown


def test_a_sampler_with_other_weights_is_seen(config):
    run = Run(config)
    policy = run.learner.policy
    run.sampler.sync = lambda model: [weight.data.mul_(1.1) for weight in policy.parameters()]
    run.sampler.generate = lambda *args, **kwargs: rollouts
    rollouts = Run(config).sampler.generate(run.prompts(1)[1], 4, run.max_new_tokens, 1.0, seed=0)
    before, after = gpu.gaps(run)
    assert before["max"] < 1e-4 and after["mean"] > 1e-2


def step(n: int, generate: float, update: float, skipped: bool = False) -> dict:
    """A row of `steps`: two groups, completions of ten tokens."""
    seconds = dict.fromkeys(gpu.PHASES, 0.0) | {"generate": generate, "update": update}
    return {"n": n, "skipped": skipped, "groups": 2, "completion_length": 10.0, "seconds": seconds}


def test_phases_are_medians_of_warm_steps_that_had_an_update():
    rows = [step(16, 9.0, 9.0), step(64, 9.0, 9.0)]  # they warm up
    rows += [step(16, 1.0, 3.0), step(64, 2.0, 3.0)]
    rows += [step(16, 1.0, 0.0, skipped=True), step(64, 4.0, 3.0)]
    rows += [step(16, 1.0, 5.0), step(64, 4.0, 5.0)]
    few, many = gpu.phases(rows)
    assert (few["steps"], few["generate"], few["update"], few["total"]) == (2, 1.0, 4.0, 5.0)
    assert (many["steps"], many["generate"], many["update"], many["total"]) == (3, 4.0, 3.0, 7.0)
    assert (few["tokens/s"], many["tokens/s"]) == (2 * 16 * 10 / 1.0, 2 * 64 * 10 / 4.0)
    assert gpu.phases([step(16, 1.0, 1.0), step(16, 2.0, 0.0, skipped=True)])[0]["total"] == 2.0
