"""The dry run says what a run will do, and where its memory ends."""

import re
import socket

import pytest
from conftest import random_model

from support import memory, presets
from support.plan import USABLE, dry_run
from support.settings import Config

PROMPT, T = 32, 32


@pytest.fixture
def folder(tmp_path):
    """The folder of a model, with no weights in it."""
    widths = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
    random_model("qwen2", vocab_size=300, **widths).config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_how_much_fits_depends_on_the_memory(folder):
    config = Config(model=folder, n=32, m=4, prompts_per_step=2, micro_batch=4)
    config.max_prompt_tokens, config.max_new_tokens = PROMPT, T
    shape = memory.architecture(folder)
    standing = 16 * memory.parameter_counts(shape, config)[0]
    needs = memory.update_bytes(shape, config)
    room = {None: 10**12, 20: needs(20), 0: needs(1) // 2}
    texts = {
        largest: dry_run(config, presets.Machine("M", int((standing + more) / USABLE) + 1))
        for largest, more in room.items()
    }
    assert "n = m = 32 fits in one micro-batch" in texts[None]
    assert "out of memory" not in texts[None]
    assert "m = 32, 64 sequences" in texts[20]
    assert re.search(r"m = 8, 16 sequences .* fits", texts[20])
    assert re.search(r"m = 16, 32 sequences .* out of memory", texts[20])
    assert "--micro-batch up to 20 fits (4: fits); n = m = 32 in one: out of memory" in texts[20]
    assert "no micro-batch fits: try --gradient-checkpointing, --lora-rank, a smaller" in texts[0]
    config.gradient_checkpointing, config.lora_rank = True, 2
    text = dry_run(config, presets.Machine("M", 10**5, processes=2))
    assert "DDP: no micro-batch fits: try --shard" in text  # not what is there already
    assert re.search(r"in the update .* out of memory", texts[0])


def test_plan_counts_over_all_processes(folder):
    config = Config(model=folder, n=16, m=8, prompts_per_step=3, micro_batch=7, epochs=2)
    text = dry_run(config, presets.Machine("M", 10**10, processes=4))
    assert "a step: 12 prompt(s), 192 rollouts of at most 64 tokens" in text
    assert "96 kept" in text
    assert "4 micro-batch(es) of 7 sequences, 2 optimiser step(s)" in text


def test_what_data_parallelism_divides(folder):
    config = Config(model=folder, n=8, m=4)
    text = dry_run(config, presets.Machine("M", 10**10, processes=4))
    count = memory.parameter_counts(memory.architecture(folder), config)[0] / 1e6
    (always,) = re.findall("always there(.*)", text)
    numbers = [float(number) for number in re.findall(r"([\d.]+) MB", always)]
    # Sharded: a quarter of all, and the sampler's model.
    expected = [16 * count, 4 * count + 4 * count]
    assert numbers == pytest.approx(expected, abs=0.06)
    assert "DDP" not in dry_run(config, presets.Machine("M", 10**10))


@pytest.mark.parametrize("name", ["cpu", "gsm8k-llama3.2-3b-l40s", "gsm8k-qwen2.5-7b-a100"])
def test_presets_can_be_planned_without_weights_or_network(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    config = Config(**presets.PRESETS[name])
    text = dry_run(config, presets.MACHINES.get(name))
    assert f"m = {config.n}, {config.prompts_per_step * config.n} sequences" in text
    assert max(map(len, text.splitlines())) <= 100
    # The paper's own setting runs on the paper's machine, by the preset's kind of parallelism.
    for phase in ("in generation", "in the update"):
        (line,) = re.findall(f"{phase}.*", text)
        assert re.findall("fits|out of memory", line)[config.shard] == "fits"
