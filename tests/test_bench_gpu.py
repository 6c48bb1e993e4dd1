"""What is to be run on a GPU, run without one: every part, with the embedded policy."""

import json
from functools import partial

from conftest import TASK

from benches import gpu
from benches.measure import write
from support.run import Run
from support.settings import Config

CONFIG = Config(task=TASK, n=8, m=4, prompts_per_step=2, eval_problems=4, micro_batch=4)


def test_every_part_runs_and_is_written_as_it_comes(tmp_path, capsys, monkeypatch):
    def broken(run):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "generation", broken)
    result, written = {}, []

    def save(parts: dict) -> None:
        write(tmp_path, "gpu", "python bench.py gpu", parts)
        written.append(json.loads((tmp_path / "gpu.json").read_text()))

    config = Config(**vars(CONFIG) | {"lora_rank": 4, "dtype": "bfloat16"})
    gpu.measure(config, [4, 8], 4, partial(gpu.part, result, save))
    cases = ("tiny policy", "adapter", "all weights", "float32")
    names = ("start", "log-probs", "generation", "learning", "memory")
    expected = ["machine", *(f"{case}: {name}" for case in cases for name in names)]
    assert list(result) == expected
    head = {"bench", "command", "other_work"}
    so_far = [set(list(result)[:count]) for count in range(1, len(result) + 1)]
    assert [set(parts) - head for parts in written] == so_far
    failed = [name for name, found in result.items() if "failed" in found]
    assert failed == [f"{case}: generation" for case in cases]  # and everything else went on
    assert "RuntimeError: no such kernel" in written[-1][failed[0]]["failed"]
    for case, largest in (("all weights", 0.2), ("float32", 1e-4)):
        found = result[f"{case}: log-probs"]
        assert found["before the first sleep"]["max"] < largest
        assert found["after the first sleep"]["max"] < largest
    learned = result["float32: learning"]
    assert learned["n=4, seconds"]["generate"] > 0 and learned["n=8, seconds"]["update"] > 0
    assert 0 <= learned["accuracy after"] <= 1
    assert result["float32: memory"]["in the update"].startswith("planned 0.0")
    assert "all weights: learning" in capsys.readouterr().out


def test_a_sampler_with_other_weights_is_seen():
    run = Run(CONFIG)
    policy = run.learner.policy
    run.sampler.sync = lambda model: [weight.data.mul_(1.1) for weight in policy.parameters()]
    run.sampler.generate = lambda *args, **kwargs: rollouts
    rollouts = Run(CONFIG).sampler.generate(run.prompts(1)[1], 4, run.max_new_tokens, 1.0, seed=0)
    found = gpu.gaps(run)
    assert found["before the first sleep"]["max"] < 1e-4
    assert found["after the first sleep"]["mean"] > 1e-2


def test_padding_is_no_token():
    run = Run(CONFIG)
    found = gpu.generation(run)
    assert 0 < found["tokens/s"] < found["padded tokens/s"]
