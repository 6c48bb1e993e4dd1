"""Model folders, tokenizers and data that cannot be used are refused, or said, before step 0."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import edit, random_model, text_tokenizer
from safetensors.torch import load_file, save_file

import train
from support.errors import InputError
from support.models import check_stops, load_model
from support.tasks import SYSTEM_PROMPT, Problem, encode, load_task, render, say_shared
from support.tiny import TINY_POLICY, make_tokenizer

SHORT = ["--n", "4", "--m", "2", "--prompts-per-step", "2", "--steps", "2", "--eval-problems", "8"]


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A copy of the tiny policy's folder, to spoil."""
    return Path(shutil.copytree(TINY_POLICY, tmp_path / "tiny"))


@pytest.fixture
def sums(tmp_path) -> Path:
    """A small task that the tiny policy can read."""
    rows = [
        {"question": f"{a}+{b}=", "answer": f"{a + b}"} for a in (12, 34) for b in range(10, 30)
    ]
    return write(tmp_path / "sums.jsonl", rows)


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rewrite(folder: Path, change) -> None:
    """Replace the weights by what `change` makes of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def add_token(folder: Path, content: str) -> None:
    """A special token with the next id, for which the model has no embedding."""
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    new = {"id": 19, "content": content, "special": True} | flags
    edit(folder / "tokenizer.json", added_tokens=[*tokens, new])


def run(folder: Path, task: Path, out: Path, *more: str) -> int:
    flags = ["--model", str(folder), "--task", str(task), "--out", str(out), *SHORT, *more]
    return train.main(flags)


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_a_wrappers_prefix_is_named(tiny, prefix):
    rewrite(tiny, lambda weights: {prefix + name: w for name, w in weights.items()})
    with pytest.raises(InputError, match=f"missing.*20 tensors .*unknown.*without.*'{prefix}'"):
        load_model(str(tiny))


def without_a_layer(weights):
    return {name: w for name, w in weights.items() if ".layers.1." not in name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_layer, r"9 of 21 weights are missing.*such as model\.layers\.1\."),
        (lambda w: w | {"model.layers.0.extra": torch.ones(2)}, "1 tensors.*unknown.*0.extra"),
        (lambda w: w | {"model.norm.weight": torch.ones(64)}, "1 have another shape.*model.norm"),
        (lambda w: w | {"model.norm.weight": torch.full((128,), torch.nan)}, "1 of 20.*not finite"),
        (lambda w: w | {"model.norm.weight": torch.full((128,), torch.inf)}, "model.norm.weight"),
    ],
    ids=["a missing layer", "an unknown tensor", "another shape", "NaN", "infinity"],
)
def test_weights_that_are_not_the_models_are_refused(tiny, change, said):
    rewrite(tiny, change)
    with pytest.raises(InputError, match=said) as refused:
        load_model(str(tiny))
    assert str(tiny) in str(refused.value) and "--lr" not in str(refused.value)


def test_tied_weights_that_are_not_declared_are_refused(tiny):
    edit(tiny / "config.json", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"1 of 21 weights are missing.*lm_head\.weight"):
        load_model(str(tiny))


def test_an_adapters_weights_are_checked_like_a_models(tiny, tmp_path):
    pytest.importorskip("peft")
    from support.adapters import add_lora

    adapter = tmp_path / "adapter"
    model, tokenizer = load_model(str(tiny))
    add_lora(model, rank=2).save_pretrained(adapter)
    tokenizer.save_pretrained(adapter)
    load_model(str(adapter))
    file = adapter / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "qproj"): w for name, w in load_file(file).items()}, file)
    with pytest.raises(InputError, match=r"missing.*q_proj.*unknown.*qproj"):
        load_model(str(adapter))


def test_projections_that_a_model_lacks_are_named(capsys):
    pytest.importorskip("peft")
    from transformers import Phi3Config, Phi3ForCausalLM

    from support.adapters import add_lora

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    add_lora(Phi3ForCausalLM(Phi3Config(vocab_size=19, **sizes, **heads)), rank=4)
    said = capsys.readouterr().err
    assert "without q_proj, k_proj, v_proj, gate_proj, up_proj:" in said and "o_proj," not in said
    add_lora(random_model("llama"), rank=4)
    assert "without" not in capsys.readouterr().err


# ---- saving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"do_sample": False, "temperature": 0.6, "top_p": 0.9},
        {"temperature": 0.6},
        {"pad_token_id": -1},
    ],
)
def test_what_loads_can_be_saved(tiny, sums, tmp_path, capsys, changes):
    edit(tiny / "generation_config.json", **changes)
    assert run(tiny, sums, tmp_path / "out") == 0
    (name, *_) = changes.keys() - {"do_sample", "top_p"}
    assert name in capsys.readouterr().err
    saved, _ = load_model(str(tmp_path / "out" / "model"))
    assert saved.generation_config.eos_token_id == 17


def test_a_generation_config_without_faults_is_kept(tiny):
    edit(tiny / "generation_config.json", do_sample=True, temperature=0.6)
    assert load_model(str(tiny))[0].generation_config.temperature == 0.6


# ---- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["<pad>", None])
def test_the_padding_token_does_not_matter(tiny, sums, tmp_path, pad):
    """<pad> has an id that the model has no embedding for; padding is masked, any id will do."""
    add_token(tiny, "<pad>")
    edit(tiny / "tokenizer_config.json", pad_token=pad)
    assert run(tiny, sums, tmp_path / "other") == 0
    assert run(TINY_POLICY, sums, tmp_path / "own") == 0
    rows = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("other", "own")]
    assert rows[0] == rows[1]


def test_a_template_beyond_the_vocabulary_is_refused(tiny, sums, tmp_path, capsys):
    add_token(tiny, "<|user|>")
    (tiny / "chat_template.jinja").write_text("<|user|>{{ messages[-1]['content'] }}")
    assert run(tiny, sums, tmp_path / "out") == 2
    assert "token 19 '<|user|>'" in (said := capsys.readouterr().err)
    assert "vocabulary of 19" in said and said.count("\n") == said.count("dropped (answer") + 1


@pytest.mark.parametrize(("eos", "said"), [(None, "is given"), (40, "40.*beyond the vocabulary")])
def test_a_model_that_cannot_end_is_refused(tiny, sums, tmp_path, capsys, eos, said):
    edit(tiny / "tokenizer_config.json", eos_token=None)
    edit(tiny / "config.json", eos_token_id=eos)
    edit(tiny / "generation_config.json", eos_token_id=eos)
    assert run(tiny, sums, tmp_path / "out") == 2
    assert re.search(f"no end-of-sequence token.*{said}", capsys.readouterr().err)


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}assistant: "
)


@pytest.mark.parametrize(("eos", "hinted"), [("<|end|>", True), ("<|im_end|>", False)])
def test_a_turn_end_that_ends_nothing_is_hinted_at(capsys, eos, hinted):
    check_stops(random_model("llama", 300), text_tokenizer(CHAT, eos_token=eos))
    assert ("<|im_end|>, which is no stop token" in capsys.readouterr().err) == hinted


# ---- templates -----------------------------------------------------------------------------------


def prompt(template: str, question: str = "What is 2+2?") -> str:
    tokenizer = text_tokenizer(template)
    return tokenizer.decode(render(tokenizer, question))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}",
        "{{ messages[-1]['content'] }}",
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0]['content'] | trim }}",
        "{% if messages[0]['role'] == 'system' %}{{ 1 + 'a' }}{% endif %}"
        "{{ messages[0]['content'] }}",
    ],
)
def test_an_instruction_that_the_template_drops_goes_to_the_user(template):
    assert prompt(template) == f"{SYSTEM_PROMPT}\n\nWhat is 2+2?"


def test_a_template_with_a_system_role_says_it_once():
    assert prompt(CHAT).count(SYSTEM_PROMPT) == 1
    stripped = "{% for m in messages %}{{ m['content'] | trim }} {% endfor %}"
    assert prompt(stripped, "  What is\n2+2? ").count(SYSTEM_PROMPT) == 1


def test_a_tokenizer_that_cannot_read_the_instruction_is_not_given_it():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(render(tokenizer, "47+85=")) == "47+85="


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}"
         "{% endfor %}", "fails|drops the question"),
        ("{% for m in messages %}{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}"
         "{% endfor %}{% endfor %}", "drops the question"),
        ("{{ messages[0]['content'] }}{{ messages[-1]['content'][:5] }}", "drops the question"),
        ("assistant:", "drops the question"),
        ("{% for m in messages %}{{ m['content'] }}", "template fails"),
        ("{{ messages['content'].text }}", "template fails"),
        ("{{ raise_exception('never') }}", "template fails: never"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused(template, said):
    with pytest.raises(ValueError, match=said):
        prompt(template)


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strange", ["What is <|end|>?", "<|im_end|>", "is <unk> known? 3+4"])
def test_a_question_that_spells_a_special_token_costs_itself_alone(capsys, strange):
    problems = [Problem(question, "7") for question in ("3+4?", strange, "5+2?")]
    kept, ids = encode(problems, text_tokenizer(CHAT, unk_token="<unk>"))
    assert [problem.prompt for problem in kept] == ["3+4?", "5+2?"] and len(ids) == 2
    said = capsys.readouterr().err
    assert "1 of 3 prompts" in said and strange in said and "dropped" in said


def test_a_model_that_can_read_few_questions_is_refused():
    problems = [Problem("47+85=", "132"), Problem("a word", "1"), Problem("another", "1")]
    with pytest.raises(ValueError, match=r"cannot read 2 of 3 prompts.*'a word'"):
        encode(problems, make_tokenizer())


@pytest.mark.parametrize(
    ("tested", "said"),
    [
        (["What is 2+2?", "What is 3+3?"], "2 of 2 test questions of own"),
        (["what  is\n2+2?", "And 5+5?"], "1 of 2 test questions of own"),
        (["And 5+5?"], ""),
    ],
)
def test_questions_that_are_trained_on_and_tested_are_counted(capsys, tested, said):
    trained = [Problem(question, "4") for question in ("What is 2+2?", "What is 3+3?")]
    say_shared(trained, {"own": [Problem(question, "") for question in tested]})
    err = capsys.readouterr().err
    assert err.startswith(said) and bool(err) == bool(said)


def test_a_run_says_what_train_and_test_share(tmp_path, capsys):
    rows = [{"question": f"{a}+11=", "answer": f"{a + 11}"} for a in range(10, 50)]
    for split in ("train", "test"):
        write(tmp_path / "data" / f"{split}.jsonl", rows)
    assert run(TINY_POLICY, tmp_path / "data", tmp_path / "out", "--eval-problems", "0") == 0
    assert "40 of 40 test questions" in capsys.readouterr().err


def test_a_file_replaced_under_its_old_time_stamp_is_read_anew(tmp_path):
    for answer in ("7", "8"):
        row = {"question": "How much?", "answer": f"#### {answer}"}
        os.utime(write(tmp_path / "train.jsonl", [row]), (1_700_000_000, 1_700_000_000))
        assert load_task("gsm8k", "train", tmp_path) == [Problem("How much?", answer)]


@pytest.mark.parametrize("change", ["rows", "answers", "template", "nothing"])
def test_a_resumed_run_says_that_its_data_are_others(tiny, sums, tmp_path, capsys, change):
    assert run(tiny, sums, tmp_path / "out") == 0
    capsys.readouterr()
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    if change == "rows":
        write(sums, [*rows, {"question": "77+11=", "answer": "88"}])
    elif change == "answers":
        write(sums, [row | {"answer": "1"} for row in rows])
    elif change == "template":
        (tiny / "chat_template.jinja").write_text("1{{ messages[-1]['content'] }}")
    assert train.main(["--resume", "--out", str(tmp_path / "out"), "--steps", "3"]) == 0
    assert ("have changed since the run began" in capsys.readouterr().err) == (change != "nothing")
