"""Presets against the paper, rivals over any of them, the command line, a run that goes on."""

import dataclasses
import json

import pytest
from conftest import flags, small

from pods import RULES
from support import presets, settings
from support.errors import InputError
from support.presets import PRESETS, RIVALS, parse
from support.settings import Config, flag
from support.tasks import TASKS

ONE_GPU = dict(n=64, m=16, steps=None, minutes=360, lora_rank=64, beta=0, eval_task=())
ONE_GPU |= dict(lr=5e-6, warmup_steps=0, adam_beta2=0.99, weight_decay=0.1, max_grad_norm=0.1)
ONE_GPU |= dict(rule="max_variance", loss_type="grpo", temperature=0.9, dtype="bfloat16")
ONE_GPU |= dict(prompts_per_step=1, max_new_tokens=512, reward_weights=(1, 0.1, 0.1))
# Four accumulation steps, each of a group of m.
EIGHT_GPUS = ONE_GPU | dict(n=128, m=32, prompts_per_step=4, minutes=30, lora_rank=0)
EIGHT_GPUS |= dict(max_new_tokens=1024, reward_weights=(1, 1, 1), gradient_checkpointing=True)
QWEN, LLAMA = "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k-qwen2.5-3b-l40s", ONE_GPU | dict(model=QWEN)),
        ("math-qwen2.5-3b-l40s", ONE_GPU | dict(model=QWEN, n=32, m=8, eval_task=("math500",))),
        ("gsm8k-llama3.2-3b-l40s", ONE_GPU | dict(model=LLAMA, minutes=90, beta=0.04)),
        ("sciknoweval-qwen2.5-3b-l40s", ONE_GPU | dict(model=QWEN)),
        ("gsm8k-qwen2.5-3b-h100", EIGHT_GPUS | dict(model=QWEN)),
        ("gsm8k-qwen2.5-7b-a100", EIGHT_GPUS | dict(model="Qwen/Qwen2.5-7B-Instruct")),
    ],
)
def test_presets_have_the_papers_numbers(name, expected):
    settings = vars(Config(**PRESETS[name]))
    assert settings.items() >= (expected | {"task": name.partition("-")[0]}).items()
    assert presets.MACHINES[name].processes == (1 if name.endswith("l40s") else 8)


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        ("grpo", "", {"n": 16}),
        ("grpo-ga", "", {"m": 64}),
        ("2-grpo", "", {"n": 2, "m": 2, "prompts_per_step": 32}),
        ("cppo", "", {"rule": "max_advantage", "advantages": "all"}),
        ("reinforce-ada", "", {"select_by": "accuracy", "advantages": "all"}),
        ("maxrl", "", {"n": 16, "scale": "mean"}),
        # Over other settings: the baseline of the same budget.
        ("math-qwen2.5-3b-l40s grpo", "", PRESETS["math-qwen2.5-3b-l40s"] | {"n": 8}),
        ("grpo rare", "", PRESETS["rare"] | {"n": 16}),
        ("grpo", "--m 8", {"n": 8, "m": 8}),
        # Later ones win, and flags over all.
        ("grpo maxrl reinforce", "", {"n": 16, "scale": "none"}),
        ("rare cppo", "--rule random", PRESETS["rare"] | {"rule": "random", "advantages": "all"}),
    ],
)
def test_presets_combine(names, given, expected):
    config, command = parse(["--preset", *names.split(), *given.split()])
    assert config == Config(**expected)
    assert command.preset == names.split()


def test_a_plan_is_made_for_the_machine_of_the_last_preset_that_names_one():
    last = presets.machine_for(["math-qwen2.5-3b-l40s", "gsm8k-qwen2.5-3b-h100", "cppo"])
    assert last == presets.MACHINES["gsm8k-qwen2.5-3b-h100"]
    assert presets.machine_for(["cppo"]) == presets.this_machine()


# ---- the command line ----------------------------------------------------------------------------


def test_help_has_a_line_for_every_setting_rule_preset_and_task(capsys):
    with pytest.raises(SystemExit) as exit:
        parse(["--help"], "what it is for")
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "what it is for" in text
    for field in dataclasses.fields(Config):
        assert f"\n  {flag(field.name)}" in text and field.metadata["help"]
    for name in (*RULES, *PRESETS, *RIVALS, *TASKS):
        assert any(line.startswith(f"  {name}  ") for line in text.splitlines())
    assert text.index("--preset") < 80 and "[--" not in text[80:]  # one short line of usage


def test_a_reward_may_be_given_in_one_flag_or_in_several_over_a_presets_weights():
    one, _ = parse(["--reward", "format=0", "a.py:f=2"])
    several, _ = parse(["--reward", "format=0", "--reward", "a.py:f=2"])
    assert one == several == Config(reward_weights=(1, 0, 0.1), reward="a.py:f=2")
    of_preset, _ = parse(["--preset", "gsm8k-qwen2.5-3b-h100", "--reward", "format=0"])
    assert of_preset.reward_weights == (1, 0, 1)


# ---- a run that goes on --------------------------------------------------------------------------

STORED = dict(steps=4, eval_task=("arithmetic",), reward=("a.py:f=2.0",), reward_weights=(1, 0, 0))


@pytest.fixture
def stored(tmp_path):
    """The folder of a run, as far as its settings go."""
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(small(**STORED))))
    return tmp_path


def resumed(folder, *arguments) -> Config:
    return parse(["--resume", "--out", str(folder), *map(str, arguments)])[0]


def test_a_resumed_run_has_its_own_settings_and_may_be_given_them_again(stored):
    assert resumed(stored) == small(**STORED)
    again = ["--eval-task", "arithmetic", "--reward", "format=0", "tag_count=0", "a.py:f=2"]
    assert resumed(stored, *flags(steps=4), *again) == small(**STORED)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lr", 0.1], "--lr 0.1 differs from the run's 0.0003"),
        (["--seed", 1], "--seed 1 differs from the run's 0"),
        (["--reward", "a.py:f=3"], "--reward .*3.0.* differs from the run's .*2.0"),
        (["--reward", "format=1", "a.py:f=2"], "--reward-weights .* differs from the run's"),
        (["--preset", "math-qwen2.5-3b-l40s"], "differs from the run's"),
        (["--preset", "cppo"], "--rule max_advantage differs from the run's max_variance"),
    ],
)
def test_what_is_learned_may_not_be_changed(stored, arguments, words):
    with pytest.raises(InputError, match=words):
        resumed(stored, *arguments)


def test_how_long_and_in_how_much_memory_may_be_changed(stored, monkeypatch):
    monkeypatch.setattr(settings, "find_spec", lambda name: name)  # all are installed
    changes = dict(steps=9, micro_batch=3, save_every=1, threads=1, tracker="tensorboard")
    changes |= dict(gpu_memory_utilization=0.5)
    arguments = [part for name, value in changes.items() for part in (flag(name), value)]
    config = resumed(stored, *arguments, "--gradient-checkpointing", "--shard")
    expected = changes | {"gradient_checkpointing": True, "shard": True}
    assert {*expected, "minutes"} == set(presets.CHANGEABLE)
    assert config == small(**STORED | expected)
    # A new end replaces the old one.
    assert resumed(stored, "--minutes", 2) == small(**STORED | {"steps": None, "minutes": 2})


def test_a_run_of_a_version_with_fewer_settings_had_todays_defaults(stored):
    settings = json.loads((stored / "config.json").read_text())
    for name in ("save_every", "tracker", "clip", "reward", "mask_truncated"):
        del settings[name]
    settings["knob"] = 3  # of a version that had another setting
    (stored / "config.json").write_text(json.dumps(settings))
    assert resumed(stored) == small(**STORED | {"save_every": Config.save_every, "reward": ()})


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "holds no run"), ('{"n"', "holds no run"), ('{"n": "8"}', "--n '8': must be int")],
)
def test_a_config_edited_by_hand_is_refused_in_one_line(stored, content, words):
    (stored / "config.json").write_text(content)
    with pytest.raises(InputError, match=words) as error:
        resumed(stored)
    assert "\n" not in str(error.value)


def test_resuming_needs_the_folder_of_a_run(tmp_path):
    with pytest.raises(InputError, match="--resume needs --out"):
        parse(["--resume"])
    with pytest.raises(InputError, match="not --resume"):
        resumed(tmp_path, "--eval-only")
