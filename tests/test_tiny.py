"""The embedded policy: its tokenizer, the shipped folders, and a rebuilt one at the same gate."""

import os
import random
import re

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import tasks, tiny
from support.arithmetic import careless_solution, worked_solution
from support.tiny import STARTS, check_gate, error_breakdown, make_tokenizer, warm_start

SYMBOL = re.compile("</?think>|</?answer>|<eos>|[0-9+=,]")


@pytest.fixture(params=["made", "shipped"])
def tokenizer(request):
    """The shipped one is loaded as users do: AutoTokenizer chooses a class by the architecture."""
    made = request.param == "made"
    return make_tokenizer() if made else AutoTokenizer.from_pretrained(tiny.TINY_POLICY)


def test_text_survives_the_round_trip_one_token_a_symbol_and_fits_the_positions(tokenizer):
    rng, longest = random.Random(0), 0
    for problem in tasks.load_task("arithmetic", "train")[::20]:
        for solution in (worked_solution(problem.prompt), careless_solution(problem.prompt, rng)):
            text = problem.prompt + solution + tiny.EOS
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.convert_ids_to_tokens(ids) == SYMBOL.findall(text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            longest = max(longest, len(ids))
    assert longest == 6 + 23 <= tokenizer.model_max_length
    assert tokenizer.model_max_length == tiny.make_model(0).config.max_position_embeddings


def test_what_is_no_sum_is_unknown(tokenizer):
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == tiny.VOCABULARY
    assert tokenizer.tokenize("4x+ 7=") == ["4", "<unknown>", "+", "<unknown>", "7", "="]


@pytest.mark.parametrize("name", STARTS)
def test_a_shipped_policy_is_an_ordinary_small_model_folder(name):
    folder = tiny.EMBEDDED[name]
    model, made = AutoModelForCausalLM.from_pretrained(folder), tiny.make_model(0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    of_the_file = {"architectures", "dtype", "_name_or_path", "transformers_version"}
    ours, theirs = made.config.to_dict(), model.config.to_dict()
    assert {key for key in ours | theirs if ours.get(key) != theirs.get(key)} <= of_the_file
    for file in folder.glob("*token*"):  # one tokenizer, whichever policy
        assert file.read_bytes() == (tiny.TINY_POLICY / file.name).read_bytes()


@pytest.mark.parametrize("name", STARTS)
def test_the_shipped_policies_pass_their_gates(name):
    model, (_, task, _) = AutoModelForCausalLM.from_pretrained(tiny.EMBEDDED[name]), STARTS[name]
    breakdown = error_breakdown(model, task=task)
    check_gate(breakdown, name)
    assert breakdown["inner carry"] > 0.2, "the flaw that reward should find is not there"


@pytest.mark.skipif(not os.environ.get("CI"), reason="40 seconds: a policy is rebuilt in CI alone")
def test_a_rebuilt_policy_passes_the_gate_of_the_shipped_one():
    check_gate(error_breakdown(warm_start()))


def test_the_gate_rejects_what_would_learn_badly():
    check_gate({"right": 0.31, "inner carry": 0.36, "leading carry": 0.26, "column": 0.009})
    for breakdown in ({"right": 0.19}, {"right": 0.46}, {"right": 0.31, "column": 0.03}):
        with pytest.raises(ValueError, match="try another seed"):
            check_gate(breakdown)
