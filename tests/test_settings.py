"""Settings: what is refused, what is held, and the flags that are printed."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from pods import RULES
from support.errors import InputError
from support.presets import parse
from support.settings import Config, as_flags, task_and_folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"m": 1}, ["--m 1", "2 or more"]),
        ({"rule": "best"}, ["--rule best", "max_variance"]),
        ({"select_by": "brevity"}, ["--select-by brevity", "total", "tag_count"]),
        ({"steps": 0}, ["--steps 0", "at least 1"]),
        ({"minutes": 0}, ["--minutes 0.0", "above 0"]),
        ({"lr": float("nan")}, ["--lr nan"]),
        ({"weight_decay": float("inf")}, ["--weight-decay inf"]),
        ({"adam_beta2": 1.0}, ["--adam-beta2 1.0", "below 1"]),
        ({"importance_cap": 0.5}, ["--importance-cap 0.5"]),
        ({"merge": True}, ["--merge", "--lora-rank"]),
        ({"average_over": "signal", "beta": 0.1}, ["--average-over signal", "--beta"]),
        ({"sampler": "vllm", "temperature": 0.001}, ["--temperature 0.001", "--sampler vllm"]),
        ({"eval_task": ("gsm8k=A", "gsm8k=B")}, ["gsm8k=A gsm8k=B", "twice"]),
        ({"reward_weights": (1, 2)}, ["--reward-weights", "tag_count"]),
        ({"reward_weights": (0, 0, 0)}, ["--reward-weights", "not all 0"]),
        ({"reward_weights": (1, float("nan"), 0)}, ["--reward-weights"]),
        ({"reward": "brevity=1"}, ["--reward brevity=1", "accuracy", "FILE.py:FUNCTION"]),
        ({"reward": "mine.py:brevity=much"}, ["mine.py:brevity=much"]),
        ({"reward": "mine.py:length=1"}, ["--reward length", "otherwise"]),
        ({"reward": ("a.py:f=1", "b.py:f=1")}, ["--reward f", "otherwise"]),
        # What only Python or a config.json edited by hand can hold.
        ({"n": True}, ["--n True", "must be int"]),
        ({"task": None}, ["--task None", "must be str"]),
        ({"merge": 1}, ["--merge 1", "must be bool"]),
        ({"reward_weights": "abc"}, ["--reward-weights", "must be float"]),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_their_flags(settings, words):
    with pytest.raises(InputError) as error:
        Config(**settings)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_settings_at_their_limits_are_taken():
    Config(n=2, m=2, clip=0, beta=0, warmup_steps=0, importance_cap=0, reward_weights=(0, 0, -1))


def test_from_python_a_list_is_a_tuple_and_a_number_of_numpy_is_one_of_python():
    config = Config(
        n=np.int64(16), lr=np.float32(0.5), minutes=2, reward_weights=[1, 0, 0], eval_task=["gsm8k"]
    )
    assert (config.n, config.lr, config.minutes) == (16, 0.5, 2.0)
    assert (config.reward_weights, config.eval_task) == ((1.0, 0.0, 0.0), ("gsm8k",))
    assert Config(eval_task="gsm8k").eval_task == ("gsm8k",)
    assert Config(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_what_is_left_open_depends_on_other_settings():
    assert (Config().steps, Config(minutes=2).steps) == (200, None)
    assert (Config().importance_cap, Config(sampler="vllm").importance_cap) == (0, 2)
    assert Config(sampler="vllm", importance_cap=0).importance_cap == 0


def test_a_part_of_the_reward_has_one_weight_however_it_is_given():
    assert Config(reward=("format=0",)) == Config(reward_weights=(1, 0, 0.1))
    config = Config(reward=["mine.py:brevity=.2", "accuracy=2"], select_by="brevity")
    assert (config.reward_weights, config.reward) == ((2, 0.1, 0.1), ("mine.py:brevity=0.2",))
    with pytest.raises(InputError, match=r"of total, accuracy, format, tag_count, brevity$"):
        dataclasses.replace(config, select_by="other")
    assert dataclasses.replace(config) == config
    Config(reward_weights=(0, 0, 0), reward="mine.py:brevity=-1")  # its own weight is one


def test_a_rule_of_ones_own_is_chosen_by_its_name(monkeypatch):
    monkeypatch.setitem(RULES, "first", lambda rewards, m: torch.arange(m))
    assert Config(rule="first") == parse(["--rule", "first"])[0]


def test_a_task_and_its_folder(tmp_path, monkeypatch):
    assert task_and_folder("gsm8k") == ("gsm8k", None)
    assert task_and_folder("gsm8k=data/own") == ("gsm8k", "data/own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x=1.jsonl").touch()  # a file may have = in its name
    assert task_and_folder("x=1.jsonl") == ("x=1.jsonl", None)


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        ("", ""),
        ("--m 8 --minutes 2", "--m 8 --minutes 2.0"),
        ("--merge --lora-rank 4", "--lora-rank 4 --merge"),
        ("--eval-task math500 gsm8k=dir", "--eval-task math500 gsm8k=dir"),
        ("--reward accuracy=2 a.py:f=1", "--reward-weights 2.0 0.1 0.1 --reward a.py:f=1.0"),
    ],
)
def test_what_differs_from_the_defaults_is_printed_as_flags(flags, printed):
    config, _ = parse(flags.split())
    assert as_flags(config).split() == printed.split()
    assert parse(printed.split())[0] == config


def test_many_flags_are_printed_in_several_lines():
    config, _ = parse(["--preset", "gsm8k-qwen2.5-7b-a100"])
    assert len(as_flags(config).splitlines()) > 1
    assert parse(as_flags(config).split())[0] == config
