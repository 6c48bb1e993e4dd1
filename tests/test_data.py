"""Questions as a model is shown them: templates, what it cannot read, what is in two splits."""

import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import text_tokenizer

import train
from support.data import say_shared
from support.settings import flag
from support.tasks import SYSTEM_PROMPT, Problem, encode, load_task, render
from support.tiny import TINY_POLICY, make_tokenizer

CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|im_end|>\n{% endfor %}assistant: "
)


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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


def test_a_template_beyond_the_vocabulary_is_refused():
    """The tiny policy has embeddings for 19 tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "<|user|>{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match=r"token 19 '<\|user\|>'.*vocabulary of 19"):
        encode([Problem("47+85=", "132")], tokenizer, 100, 19)


def test_a_file_replaced_under_its_old_time_stamp_is_read_anew(tmp_path):
    for answer in ("7", "8"):
        row = {"question": "How much?", "answer": f"#### {answer}"}
        os.utime(write(tmp_path / "train.jsonl", [row]), (1_700_000_000, 1_700_000_000))
        assert load_task("gsm8k", "train", tmp_path) == [Problem("How much?", answer)]


@pytest.mark.parametrize("change", ["answers", "template", "nothing"])
def test_a_resumed_run_says_what_train_and_test_share_and_that_data_are_others(
    tmp_path, capsys, change
):
    model = shutil.copytree(TINY_POLICY, tmp_path / "tiny")
    rows = [{"question": f"{a}+11=", "answer": f"{a + 11}"} for a in range(10, 40)]
    for split in ("train", "test"):
        write(tmp_path / "data" / f"{split}.jsonl", rows)
    sizes = {"n": 4, "m": 2, "prompts_per_step": 2, "steps": 1, "eval_problems": 0}
    sizes |= {"model": model, "task": tmp_path / "data", "out": tmp_path / "out"}
    flags = [part for name, value in sizes.items() for part in (flag(name), str(value))]
    assert train.main(flags) == 0
    assert "30 of 30 test questions" in capsys.readouterr().err
    if change == "answers":
        write(tmp_path / "data" / "train.jsonl", [row | {"answer": "1"} for row in rows])
    elif change == "template":
        (model / "chat_template.jinja").write_text("1{{ messages[-1]['content'] }}")
    assert train.main(["--resume", "--out", str(tmp_path / "out"), "--steps", "2"]) == 0
    assert ("have changed since the run began" in capsys.readouterr().err) == (change != "nothing")
