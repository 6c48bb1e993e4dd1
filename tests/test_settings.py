"""Settings: what is refused, what is made of flags, what a resumed run may change."""

import dataclasses
import json

import pytest
from conftest import flags, small

from support.errors import InputError
from support.settings import (
    CHANGEABLE,
    Config,
    as_flags,
    flag,
    importance_cap,
    parse,
    task_and_folder,
)

# ---- what cannot work ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"m": 65}, ["--m 65", "--n 64"]),
        ({"m": 1}, ["--m 1", "2 or more"]),
        ({"n": 0}, ["--m 16", "--n 0"]),
        ({"rule": "best"}, ["--rule best", "max_variance"]),
        ({"loss_type": "ppo"}, ["--loss-type ppo", "dapo"]),
        ({"sampler": "none"}, ["--sampler none", "vllm"]),
        ({"dtype": "float16"}, ["--dtype float16", "bfloat16"]),
        ({"tracker": "paper"}, ["--tracker paper", "tensorboard"]),
        ({"steps": 0}, ["--steps 0"]),
        ({"steps": -3}, ["--steps -3"]),
        ({"minutes": 0}, ["--minutes 0"]),
        ({"lr": float("nan")}, ["--lr nan"]),
        ({"lr": float("inf")}, ["--lr inf"]),
        ({"temperature": 0}, ["--temperature 0"]),
        ({"beta": -1}, ["--beta -1"]),
        ({"beta": float("inf")}, ["--beta inf"]),
        ({"weight_decay": float("inf")}, ["--weight-decay inf"]),
        ({"adam_beta2": 1.0}, ["--adam-beta2 1.0"]),
        ({"max_grad_norm": 0}, ["--max-grad-norm 0"]),
        ({"micro_batch": 0}, ["--micro-batch 0"]),
        ({"gpu_memory_utilization": 1.5}, ["--gpu-memory-utilization 1.5"]),
        ({"importance_cap": 0.5}, ["--importance-cap 0.5"]),
        ({"merge": True}, ["--merge", "--lora-rank"]),
        ({"eval_task": ("gsm8k=A", "gsm8k=B")}, ["gsm8k=A gsm8k=B", "twice"]),
        ({"reward_weights": (1, 2)}, ["--reward-weights", "tag_count"]),
        ({"reward_weights": (0, 0, 0)}, ["--reward-weights", "not all 0"]),
        ({"reward_weights": (1, float("nan"), 0)}, ["--reward-weights"]),
        # What only a config.json edited by hand can hold.
        ({"n": "8"}, ["--n '8'", "must be int"]),
        ({"n": 8.0}, ["--n 8.0", "must be int"]),
        ({"n": True}, ["--n True", "must be int"]),
        ({"task": None}, ["--task None", "must be str"]),
        ({"merge": 1}, ["--merge 1", "must be bool"]),
        ({"reward_weights": (1, "a", 0)}, ["--reward-weights", "must be float"]),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_their_flags(settings, words):
    with pytest.raises(InputError) as error:
        Config(**settings)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_settings_at_their_limits_are_taken():
    Config(n=2, m=2, clip=0, beta=0, warmup_steps=0, eval_problems=0, gpu_memory_utilization=1)
    Config(importance_cap=0, reward_weights=(0, 0, -1.0), adam_beta2=0)


def test_a_run_without_an_end_has_the_default_number_of_steps():
    assert Config().steps == 200
    assert Config(minutes=2).steps is None
    assert Config(minutes=2, steps=5).steps == 5


def test_one_evaluation_task_may_be_a_word():
    assert Config(eval_task="arithmetic").eval_task == ("arithmetic",)


def test_a_task_and_its_folder(tmp_path, monkeypatch):
    assert task_and_folder("gsm8k") == ("gsm8k", None)
    assert task_and_folder("gsm8k=data/own") == ("gsm8k", "data/own")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x=1.jsonl").touch()  # a file may have = in its name
    assert task_and_folder("x=1.jsonl") == ("x=1.jsonl", None)


@pytest.mark.parametrize(
    ("settings", "cap"),
    [
        ({}, 0.0),
        ({"sampler": "vllm"}, 2.0),
        ({"importance_cap": 3.0}, 3.0),
        ({"sampler": "vllm", "importance_cap": 0.0}, 0.0),
    ],
)
def test_the_correction_is_on_with_vllm_and_off_with_torch(settings, cap):
    assert importance_cap(Config(**settings)) == cap


# ---- the command line ----------------------------------------------------------------------------


def test_every_setting_is_a_flag_with_a_meaning(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(["--help"], "what it is for")
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "what it is for" in text
    for field in dataclasses.fields(Config):
        assert flag(field.name) in text
        assert field.metadata["help"]


def test_flags_reach_the_configuration():
    line = "--n 8 --m 4 --minutes 2 --reward-weights 1 1 1 --eval-task a b --lr 1e-6 --merge"
    config, command = parse([*line.split(), "--lora-rank", "2", "--out", "here"])
    assert (config.n, config.m, config.minutes, config.steps) == (8, 4, 2.0, None)
    assert config.reward_weights == (1.0, 1.0, 1.0)
    assert config.eval_task == ("a", "b")
    assert config.lr == 1e-6 and config.merge
    assert str(command.out) == "here"
    assert not (command.resume or command.eval_only or command.dry_run)


def test_without_flags_the_settings_are_the_defaults():
    assert parse([])[0] == Config()


def test_printed_settings_are_flags_that_give_the_same_settings():
    for given in ([], ["--merge", "--lora-rank", "4"], ["--eval-task", "math500", "gsm8k=dir"]):
        config, _ = parse(given)
        printed = as_flags(config)
        assert max(map(len, printed.splitlines())) <= 102
        assert parse(printed.split())[0] == config


def test_a_preset_is_overridden_flag_by_flag():
    config, command = parse(["--preset", "gsm8k-llama3.2-3b-l40s", "--m", "8", "--no-shard"])
    assert command.preset == "gsm8k-llama3.2-3b-l40s"
    assert (config.n, config.m, config.beta) == (64, 8, 0.04)
    assert parse(["--preset", "cpu"])[0] == Config()


# ---- a run that goes on --------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    """The folder of a run, as far as its settings go."""
    settings = dataclasses.asdict(small(steps=4, eval_task=("arithmetic",)))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return tmp_path


def resumed(folder, *arguments) -> Config:
    return parse(["--resume", "--out", str(folder), *map(str, arguments)])[0]


def test_a_resumed_run_has_its_own_settings(stored):
    assert resumed(stored) == small(steps=4, eval_task=("arithmetic",))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", 0.1], "--lr 0.1 differs from the run's 0.0003"),
        (["--seed", 1], "--seed 1 differs from the run's 0"),
        (["--preset", "math-qwen2.5-3b-l40s"], "differs from the run's"),
    ],
)
def test_what_is_learned_may_not_be_changed(stored, arguments, words):
    with pytest.raises(InputError, match=words):
        resumed(stored, *arguments)


def test_how_long_and_in_how_much_memory_may_be_changed(stored):
    changes = dict(steps=9, micro_batch=3, save_every=1, threads=1, tracker="tensorboard")
    changes |= dict(gpu_memory_utilization=0.5)
    arguments = [part for name, value in changes.items() for part in (flag(name), value)]
    config = resumed(stored, *arguments, "--gradient-checkpointing", "--shard")
    expected = changes | {"gradient_checkpointing": True, "shard": True}
    assert {*expected, "minutes"} == set(CHANGEABLE)
    assert config == small(**expected, eval_task=("arithmetic",))


def test_a_new_end_replaces_the_old_one(stored):
    config = resumed(stored, "--minutes", 2)
    assert (config.steps, config.minutes) == (None, 2.0)


def test_the_same_settings_may_be_given_again(stored):
    arguments = [*flags(steps=4), "--eval-task", "arithmetic"]
    assert resumed(stored, *arguments) == resumed(stored)


def test_a_run_of_a_version_with_fewer_settings_had_todays_defaults(stored):
    settings = json.loads((stored / "config.json").read_text())
    for name in ("save_every", "tracker", "clip"):
        del settings[name]
    (stored / "config.json").write_text(json.dumps(settings))
    assert resumed(stored) == dataclasses.replace(
        small(steps=4, eval_task=("arithmetic",)), save_every=Config.save_every
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "no settings"),
        ('{"n"', "no run"),
        ('{"n": "8"}', "--n '8': must be int"),
        ('{"reward_weights": [1, "a", 0]}', "must be float"),
        ('{"reward_weights": "abc"}', "must be float"),
    ],
)
def test_a_config_edited_by_hand_is_refused_in_one_line(stored, content, words):
    (stored / "config.json").write_text(content)
    with pytest.raises(InputError, match=words) as error:
        resumed(stored)
    assert "\n" not in str(error.value)


def test_resuming_needs_the_folder_of_a_run(tmp_path):
    with pytest.raises(InputError, match="--resume needs --out"):
        parse(["--resume"])
    with pytest.raises(InputError, match="holds no run"):
        resumed(tmp_path)
    with pytest.raises(InputError, match="not --resume"):
        resumed(tmp_path, "--eval-only")
