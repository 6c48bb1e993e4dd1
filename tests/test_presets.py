"""Presets against the paper."""

import dataclasses

import pytest

from support import presets
from support.settings import Config
from support.tiny import STARTS


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_settings_of_train(name):
    values = presets.PRESETS[name]
    fields = {field.name for field in dataclasses.fields(Config)}
    assert set(values) <= fields
    config = Config(**values)
    assert {key: getattr(config, key) for key in values} == values
    assert config.steps is None or name == "cpu"  # the paper's runs end by time
    assert (name in presets.MACHINES) == (name not in ("cpu", "rare"))


@pytest.mark.parametrize(
    ("name", "model", "task", "n", "m", "minutes", "processes"),
    [
        ("gsm8k-qwen2.5-3b-l40s", "Qwen/Qwen2.5-3B-Instruct", "gsm8k", 64, 16, 360, 1),
        ("math-qwen2.5-3b-l40s", "Qwen/Qwen2.5-3B-Instruct", "math", 32, 8, 360, 1),
        ("gsm8k-llama3.2-3b-l40s", "meta-llama/Llama-3.2-3B-Instruct", "gsm8k", 64, 16, 90, 1),
        (
            *("sciknoweval-qwen2.5-3b-l40s", "Qwen/Qwen2.5-3B-Instruct", "sciknoweval"),
            *(64, 16, 360, 1),
        ),
        ("gsm8k-qwen2.5-3b-h100", "Qwen/Qwen2.5-3B-Instruct", "gsm8k", 128, 32, 30, 8),
        ("gsm8k-qwen2.5-7b-a100", "Qwen/Qwen2.5-7B-Instruct", "gsm8k", 128, 32, 30, 8),
    ],
)
def test_presets_have_the_papers_numbers(name, model, task, n, m, minutes, processes):
    config = Config(**presets.PRESETS[name])
    assert (config.model, config.task, config.n, config.m) == (model, task, n, m)
    assert (config.minutes, presets.MACHINES[name].processes) == (minutes, processes)
    assert (config.lr, config.warmup_steps, config.temperature) == (5e-6, 0, 0.9)
    assert (config.dtype, config.loss_type, config.rule) == ("bfloat16", "grpo", "max_variance")
    assert config.beta == (0.04 if "llama" in name else 0)
    assert config.eval_task == (("math500",) if task == "math" else ())
    if processes == 1:
        assert (config.lora_rank, config.prompts_per_step, config.max_new_tokens) == (64, 1, 512)
        assert (config.adam_beta2, config.weight_decay, config.max_grad_norm) == (0.99, 0.1, 0.1)
        assert config.reward_weights == (1, 0.1, 0.1)
    else:
        assert (config.lora_rank, config.max_new_tokens) == (0, 1024)
        assert config.reward_weights == (1, 1, 1)
        assert config.prompts_per_step == 4  # accumulation steps, each of a group of m
        assert config.gradient_checkpointing


def test_the_rare_preset_is_the_embedded_policy_that_is_hardly_ever_right():
    config = Config(**presets.PRESETS["rare"])
    _, task, (_, most) = STARTS[config.model]
    assert config.task == task and most <= 0.01
    assert config.minutes == 0.5  # README: two half minutes


def test_this_machine_has_this_computers_memory():
    machine = presets.this_machine(processes=2)
    assert machine.processes == 2
    assert machine.memory > 10**8
