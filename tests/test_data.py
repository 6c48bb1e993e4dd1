"""Questions as a model is shown them: templates, what it cannot read, what is in two splits."""

import os
import re
import shutil

import pytest
from conftest import flags, text_tokenizer, write_sums
from tokenizers import processors
from transformers import AutoTokenizer

import train
from rewards import TAGS
from support.data import say_shared
from support.tasks import SYSTEM_PROMPT, Problem, encode, opens_think, render
from support.tiny import TINY_POLICY, make_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def chat_tokenizer(template=CHAT, bos="<bos>"):
    """One token a byte, and a tokenizer call that adds a BOS of its own, as Llama's does."""
    tokenizer = text_tokenizer(template, bos_token=bos)
    if bos:
        special = [(bos, tokenizer.bos_token_id)]
        adds = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = adds
    return tokenizer


def test_a_prompt_is_what_the_chat_template_makes_of_it():
    tokenizer = chat_tokenizer()
    ids = render(tokenizer, "What is 6*7?")
    system = {"role": "system", "content": SYSTEM_PROMPT}
    user = {"role": "user", "content": "What is 6*7?"}
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    assert ids == tokenizer.apply_chat_template([system, user], **options)
    text = tokenizer.decode(ids)
    # The trap itself: the rendered text has one BOS, tokenised again it has two.
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer(text)["input_ids"].count(tokenizer.bos_token_id) == 2
    without = CHAT.removeprefix("{{ bos_token }}")
    assert tokenizer.bos_token_id not in render(chat_tokenizer(without), "6*7?")


def test_the_system_prompt_shows_every_tag_once_and_in_order():
    assert re.findall(r"</?\w+>", SYSTEM_PROMPT) == list(TAGS)


@pytest.mark.parametrize("bos", ["<bos>", None])
def test_a_base_model_gets_the_plain_template(bos):
    tokenizer = chat_tokenizer(template=None, bos=bos)
    text = tokenizer.decode(render(tokenizer, "What is {6}*7?"))
    assert text == f"{bos or ''}{SYSTEM_PROMPT}\n\nProblem: What is {{6}}*7?\n\nSolution:"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}",
        "{{ messages[-1]['content'] }}",
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0]['content'] | trim }}",
        "{% if messages[0]['role'] == 'system' %}{{ 1 + 'a' }}{% endif %}"
        "{{ messages[0]['content'] }}",
    ],
)
def test_an_instruction_that_the_template_drops_goes_to_the_user(template):
    tokenizer = text_tokenizer(template)
    text = tokenizer.decode(render(tokenizer, "What is 2+2?"))
    assert text == f"{SYSTEM_PROMPT}\n\nWhat is 2+2?"


def test_a_tokenizer_that_cannot_read_the_instruction_is_not_given_it():
    tokenizer = make_tokenizer()
    assert tokenizer.decode(render(tokenizer, "47+85=")) == "47+85="


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{% for p in m['content'] if p['type'] == 'text' %}{{ p['text'] }}"
         "{% endfor %}{% endfor %}", "drops the question"),
        ("{{ messages[0]['content'] }}{{ messages[-1]['content'][:5] }}", "drops the question"),
        ("{% for m in messages %}{{ m['content'] }}", "template fails"),
        ("{{ raise_exception('never') }}", "template fails: never"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused(template, said):
    with pytest.raises(ValueError, match=said):
        render(text_tokenizer(template), "What is 2+2?")


@pytest.mark.parametrize(  # the last: thinking switched off
    ("ending", "opens"),
    [("", False), ("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)],
)
def test_an_open_thought_is_seen_in_the_prompt(ending, opens):
    tokenizer = chat_tokenizer(CHAT.replace("<|assistant|>", "<|assistant|>" + ending))
    assert opens_think(tokenizer, render(tokenizer, "Write <think>")) is opens


@pytest.mark.skipif(
    not os.environ.get("SMOLLM2"), reason="SMOLLM2 does not name a SmolLM2 model folder"
)
def test_smollm2_sees_a_question_through_its_own_template():
    tokenizer = AutoTokenizer.from_pretrained(os.environ["SMOLLM2"])
    _, (ids,) = encode([Problem("How much is 6*7?", "42")], tokenizer)
    assert tokenizer.decode(ids) == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\nHow much is 6*7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not opens_think(tokenizer, ids)


def test_a_long_prompt_is_dropped_and_said_and_never_cut(capsys):
    tokenizer = chat_tokenizer()
    problems = [Problem(f"{i}" + "x" * (i % 3), str(i)) for i in range(10, 40)]
    lengths = [len(render(tokenizer, p.prompt)) for p in problems]
    limit = min(lengths) + 1
    kept, ids = encode(problems, tokenizer, max_prompt_tokens=limit)
    assert kept == [p for p, length in zip(problems, lengths, strict=True) if length <= limit]
    assert ids == [render(tokenizer, p.prompt) for p in kept]
    assert max(map(len, ids)) == limit  # exactly at the limit is kept
    assert capsys.readouterr().err == f"10 of 30 prompts are longer than {limit} tokens: dropped\n"
    assert len(encode(problems, tokenizer, max_prompt_tokens=max(lengths))[0]) == 30
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="30 of 30 prompts are longer than 5 tokens"):
        encode(problems, tokenizer, max_prompt_tokens=5)


@pytest.mark.parametrize("strange", ["What is <|end|>?", "<|im_end|>", "is <unk> known? 3+4"])
def test_a_question_that_spells_a_special_token_costs_itself_alone(capsys, strange):
    problems = [Problem(question, "7") for question in ("3+4?", strange, "5+2?")]
    kept, ids = encode(problems, chat_tokenizer(bos=None))
    assert kept == [problems[0], problems[2]] and len(ids) == 2
    said = capsys.readouterr().err
    assert "1 of 3 prompts" in said and strange in said and "dropped" in said


def test_a_model_that_can_read_few_questions_is_refused():
    """The tiny policy knows no letters; training on <unknown> would only waste the night."""
    problems = [Problem("47+85=", "132"), Problem("a word", "1"), Problem("another", "1")]
    with pytest.raises(ValueError, match=r"cannot read 2 of 3 prompts.*'a word'"):
        encode(problems, make_tokenizer())


def test_a_template_beyond_the_vocabulary_is_refused():
    """The tiny policy has embeddings for 19 tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    tokenizer.chat_template = "<|user|>{{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match=r"token 19 '<\|user\|>'.*vocabulary of 19"):
        encode([Problem("47+85=", "132")], tokenizer, 100, 19)


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
    say_shared("own", [Problem(question, "") for question in tested], trained)
    err = capsys.readouterr().err
    assert err.startswith(said) and bool(err) == bool(said)


@pytest.mark.parametrize("change", ["answers", "template", "nothing"])
def test_a_resumed_run_says_what_is_shared_and_that_data_are_others(tmp_path, capsys, change):
    model = shutil.copytree(TINY_POLICY, tmp_path / "tiny")
    questions = [f"{a}+11=" for a in range(10, 40)]
    for split in ("train", "test"):
        write_sums(tmp_path / f"{split}.jsonl", [(question, "1") for question in questions])
    out = tmp_path / "out"
    assert train.main(flags(task=tmp_path, model=model, out=out, steps=1, eval_problems=0)) == 0
    assert "30 of 30 test questions" in capsys.readouterr().err
    if change == "answers":
        write_sums(tmp_path / "train.jsonl", [(question, "2") for question in questions])
    elif change == "template":
        (model / "chat_template.jinja").write_text("1{{ messages[-1]['content'] }}")
    assert train.main(["--resume", "--out", str(out), "--steps", "2"]) == 0
    assert ("have changed since the run began" in capsys.readouterr().err) == (change != "nothing")
