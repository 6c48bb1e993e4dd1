"""The embedded policy: its tokenizer, the shipped folder, and a rebuilt one at the same gate."""

import os
import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import tasks, tiny
from support.arithmetic import careless_solution, worked_solution
from support.tiny import (
    EMBEDDED,
    STARTS,
    check_gate,
    error_breakdown,
    make_tokenizer,
    warm_start,
)

SYMBOL = re.compile("</?think>|</?answer>|<eos>|[0-9+=,]")


# ---- the tokenizer -------------------------------------------------------------------------------


@pytest.fixture(params=["made", "shipped"])
def tokenizer(request):
    """The shipped one is loaded as users do: AutoTokenizer chooses a class by the architecture."""
    made = request.param == "made"
    return make_tokenizer() if made else AutoTokenizer.from_pretrained(tiny.TINY_POLICY)


def test_text_survives_the_round_trip_one_token_a_symbol(tokenizer):
    rng = random.Random(0)
    for problem in tasks.load_task("arithmetic", "test")[:200]:
        text = problem.prompt + careless_solution(problem.prompt, rng) + tiny.EOS
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.convert_ids_to_tokens(ids) == SYMBOL.findall(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_vocabulary_is_what_sums_need(tokenizer):
    assert len(tokenizer) == len(tiny.VOCABULARY) == 19
    assert tokenizer.convert_ids_to_tokens(range(19)) == tiny.VOCABULARY
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tiny.VOCABULARY.index("<eos>")
    assert tokenizer.bos_token_id is None


def test_an_unknown_letter_is_one_unknown_token():
    tokens = make_tokenizer().tokenize("4x+ 7=")
    assert tokens == ["4", "<unknown>", "+", "<unknown>", "7", "="]


def test_the_chat_template_is_the_bare_prompt(tokenizer):
    """Neither the system prompt nor a BOS: the warm start saw none."""
    ids = tasks.render(tokenizer, "47+85=")
    assert tokenizer.convert_ids_to_tokens(ids) == list("47+85=")


def test_prompts_are_padded_on_the_left(tokenizer):
    mask = tokenizer(["47+85=", "1+2="], padding=True)["attention_mask"]
    assert mask == [[1] * 6, [0, 0, 1, 1, 1, 1]]


def test_every_sum_and_every_careless_solution_fits_the_positions(tokenizer):
    longest, rng = 0, random.Random(1)
    for problem in tasks.load_task("arithmetic", "train")[::9]:
        for solve in (worked_solution, lambda prompt: careless_solution(prompt, rng)):
            text = problem.prompt + solve(problem.prompt) + tiny.EOS
            longest = max(longest, len(tokenizer(text)["input_ids"]))
    assert longest == 6 + 23 <= tiny.make_model(0).config.max_position_embeddings
    assert longest <= tokenizer.model_max_length


# ---- the shipped policy --------------------------------------------------------------------------


@pytest.mark.parametrize("folder", tiny.EMBEDDED.values(), ids=tiny.EMBEDDED)
def test_a_shipped_policy_is_an_ordinary_small_model_folder(folder):
    model, made = AutoModelForCausalLM.from_pretrained(folder), tiny.make_model(0)
    assert type(model) is type(made) and model.dtype == torch.float32
    assert 280_000 < model.num_parameters() == made.num_parameters() < 283_000
    assert f"{model.num_parameters():,} parameters" in tiny.make_model.__doc__
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    of_the_file = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    ours, theirs = made.config.to_dict(), model.config.to_dict()
    assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} <= of_the_file
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1.3e6
    for file in folder.glob("*token*"):  # one tokenizer, whichever policy
        assert file.read_bytes() == (tiny.TINY_POLICY / file.name).read_bytes()


@pytest.mark.parametrize("name", tiny.EMBEDDED)
def test_the_shipped_policies_pass_their_gates(name):
    model, (_, task, _) = AutoModelForCausalLM.from_pretrained(EMBEDDED[name]), STARTS[name]
    breakdown = error_breakdown(model, task=task)
    assert sum(breakdown.values()) == pytest.approx(1)
    check_gate(breakdown, name)
    assert breakdown["inner carry"] > 0.2, "the flaw that reward should find is not there"
    assert error_breakdown(model, samples=100) == error_breakdown(model, samples=100)


# ---- the warm start ------------------------------------------------------------------------------


def test_a_warm_start_is_deterministic():
    first = warm_start(seed=3, steps=5).state_dict()
    torch.rand(3)  # nothing but the seed may matter
    again = warm_start(seed=3, steps=5).state_dict()
    other = warm_start(seed=4, steps=5).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.skipif(not os.environ.get("CI"), reason="40 seconds: a policy is rebuilt in CI alone")
def test_a_rebuilt_policy_passes_the_gate_of_the_shipped_one():
    check_gate(error_breakdown(warm_start()))


def test_an_untrained_policy_fails_the_gate():
    with pytest.raises(ValueError, match="try another seed"):
        check_gate(error_breakdown(tiny.make_model(0), samples=50))


@pytest.mark.parametrize(
    "breakdown",
    [
        {"right": 0.19, "inner carry": 0.81},
        {"right": 0.46, "inner carry": 0.54},
        {"right": 0.31, "inner carry": 0.66, "column": 0.03},
        {"form": 1.0},
        {},
    ],
    ids=["rarely right", "too good", "wrong sums", "no form", "empty"],
)
def test_the_gate_rejects(breakdown):
    with pytest.raises(ValueError, match="try another seed"):
        check_gate(breakdown)


def test_the_gate_accepts_a_third_right_and_the_rest_carries():
    check_gate({"right": 0.31, "inner carry": 0.36, "leading carry": 0.26, "column": 0.009})
    check_gate({"right": 0.31, "inner carry": 0.69})
