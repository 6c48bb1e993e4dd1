"""Problems are what they claim, splits never move, and what cannot be read is one clear line."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import datasets
import pytest

from rewards import accuracy
from support.tasks import Problem, carries, load_task

DATA = Path(__file__).parents[2] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA}")


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_sums_are_right_and_a_tenth_is_held_out_for_ever():
    train, test = load_task("arithmetic", "train"), load_task("arithmetic", "test")
    assert (len(train), len(test)) == (7290, 810)
    assert len({p.prompt for p in train + test}) == 8100
    for problem in train + test:
        a, b = re.fullmatch(r"([1-9]\d)\+([1-9]\d)=", problem.prompt).groups()
        assert problem.answer == str(int(a) + int(b))
    # Written down: a split that moves would train a shipped policy on its own test.
    assert [p.prompt for p in test[:5]] == ["10+20=", "10+25=", "10+39=", "10+62=", "10+84="]
    assert max(Counter(p.prompt[:2] for p in test).values()) < 25  # 9 of each on average


def test_carries_are_the_sums_in_which_both_columns_carry():
    counted = {prompt: carries(prompt) for prompt in ("12+34=", "47+35=", "81+41=", "47+85=")}
    assert list(counted.values()) == [0, 1, 1, 2]
    assert carries("19+81=") == 2  # the second column carries only because the first does
    for split, count in (("train", 2167), ("test", 218)):
        both = [p for p in load_task("arithmetic", split) if carries(p.prompt) == 2]
        assert load_task("carries", split) == both and len(both) == count


def gsm8k_row(question, answer="He pays 3*4=<<3*4=12>>12 dollars.\n#### 12"):
    return {"question": question, "answer": answer}


def math_row(solution):
    return {"problem": "q", "level": "Level 1", "type": "Algebra", "solution": solution}


def chemistry_row(question, key="B", domain="Chemistry", kind="mcq-4-choices"):
    choices = {"text": ["lead", "tin", "gold", "iron"], "label": ["A", "B", "C", "D"]}
    instruction = {"default": "Please directly give the answer without any explanation."}
    row = {"prompt": instruction, "question": question, "choices": choices, "answerKey": key}
    return row | {"type": kind, "domain": domain, "details": {"level": "L1"}, "answer": ""}


@pytest.mark.parametrize(
    ("task", "row", "gold"),
    [
        ("gsm8k", gsm8k_row("q", "#### 1,234,567.5"), "1234567.5"),
        ("gsm8k", gsm8k_row("q", "#### $2,000"), "$2000"),
        ("gsm8k", gsm8k_row("q", "first #### 7, no:\n#### -8"), "-8"),
        ("math", math_row(r"hence the odds are $\boxed{\frac{3}{8}}$ as claimed"), r"\frac{3}{8}"),
        ("math", math_row(r"$\boxed{1}$, then $\boxed{\left\{1\right\}}$"), r"\left\{1\right\}"),
        ("math", math_row(r"so $\boxed{15\frac{1}{2}}$ or $\fbox{\frac{31}{2}}$"), r"\frac{31}{2}"),
    ],
)  # fmt: skip
def test_the_gold_answer_is_what_the_dataset_marks_last(tmp_path, task, row, gold):
    """From a folder named after the task: one folder can serve several."""
    write(tmp_path / task / "test.jsonl", [row])
    assert load_task(task, "test", tmp_path) == [Problem("q", gold)]


def test_a_file_replaced_under_its_old_time_stamp_is_read_anew(tmp_path):
    for answer in ("7", "8"):
        path = write(tmp_path / "train.jsonl", [gsm8k_row("How much?", f"#### {answer}")])
        os.utime(path, (1_700_000_000, 1_700_000_000))
        assert load_task("gsm8k", "train", tmp_path) == [Problem("How much?", answer)]


def test_an_ungradable_gold_answer_is_dropped_and_said(tmp_path, capsys):
    rows = [gsm8k_row("a"), gsm8k_row("b", "no hashes here"), gsm8k_row("c", "####  ")]
    write(tmp_path / "train.jsonl", rows)
    assert [p.prompt for p in load_task("gsm8k", "train", str(tmp_path))] == ["a"]
    said = "gsm8k train: 1 problems, 2 dropped (answer does not parse)\n"
    assert capsys.readouterr() == ("", said)


def test_chemistry_shows_its_choices_and_asks_for_a_letter(tmp_path):
    write(tmp_path / "any.jsonl", [chemistry_row("Which?"), chemistry_row("And which?", "D")])
    both = load_task("sciknoweval", "train", tmp_path) + load_task("sciknoweval", "test", tmp_path)
    answers = {p.prompt: p.answer for p in both}
    end = "\n\nA) lead\nB) tin\nC) gold\nD) iron\n\nAnswer with the letter of the right choice."
    assert answers == {f"Which?{end}": "B", f"And which?{end}": "D"}


def test_a_key_that_labels_no_choice_is_dropped_not_guessed(tmp_path, capsys):
    rows = [chemistry_row(f"q{i}", key) for i, key in enumerate(["E", "", "b", None] + ["B"] * 16)]
    write(tmp_path / "any.jsonl", rows)
    kept = load_task("sciknoweval", "train", tmp_path) + load_task("sciknoweval", "test", tmp_path)
    assert {p.columns["question"] for p in kept} == {f"q{i}" for i in range(4, 20)}
    assert sum(map(int, re.findall(r"(\d+) dropped", capsys.readouterr().err))) == 4


def test_the_chemistry_split_ignores_row_order_and_other_rows(tmp_path):
    rows = [chemistry_row(f"question {i}") for i in range(200)]
    rows += [chemistry_row(f"question {i}", "C") for i in range(0, 200, 2)]  # other keys, same text
    mixed = rows + [chemistry_row(f"question {i}", domain="Physics") for i in range(300)]
    mixed += [chemistry_row(f"open {i}", kind="open-ended-qa") for i in range(50)]
    random.Random(1).shuffle(mixed)
    write(tmp_path / "plain" / "rows.jsonl", rows)
    write(tmp_path / "mixed" / "a.jsonl", mixed[:300])
    write(tmp_path / "mixed" / "b.jsonl", mixed[300:])
    plain, shuffled = (
        [load_task("sciknoweval", split, tmp_path / folder) for split in ("train", "test")]
        for folder in ("plain", "mixed")
    )
    assert list(map(Counter, plain)) == list(map(Counter, shuffled))
    train, test = ({p.columns["question"] for p in problems} for problems in plain)
    assert not train & test and len(test) == 20 and len(plain[0] + plain[1]) == 300


def test_an_own_file_holds_out_a_tenth_of_its_questions(tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": i + 1} for i in range(40)]
    path = write(tmp_path / "sums.jsonl", rows + rows[:10])
    write(tmp_path / "test.jsonl", rows[:1])  # is not this file's
    train, test = load_task(str(path), "train"), load_task(str(path), "test")
    assert len(train) + len(test) == 50 and len(set(test)) == 4 and not set(train) & set(test)
    assert all(int(p.prompt.split()[0]) + 1 == int(p.answer) for p in train + test)
    write(path, reversed(rows))
    assert set(load_task(str(path), "test")) == set(test)


@pytest.mark.parametrize("name", ["", "train.jsonl", "test.jsonl"])
def test_a_file_beside_it_is_the_other_split_and_other_columns_are_kept(tmp_path, name):
    answers = {"1999-12-31": "1999-12-31", " 3/4 ": "3/4", "so 2\n#### 1,000": "1000", 7: "7"}
    answers |= {"(1,200)": "(1,200)", 0.5: "0.5"}
    rows = [{"question": f"q{i}", "answer": answer, "i": i} for i, answer in enumerate(answers)]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", [{"question": "held out", "answer": "2"}])
    problems = load_task(str(tmp_path / name), "train")
    assert [p.answer for p in problems] == list(answers.values())
    assert [p.columns for p in problems] == [{"i": i} for i in range(6)]
    assert load_task(str(tmp_path / name), "test") == [Problem("held out", "2")]


GOOD = '{"question": "q", "answer": "1"}\n'
EMPTY = GOOD.replace("1", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "\n" + "not json\n", "line 3 is not a JSON object"),
        (GOOD + "[1, 2]\n", "line 2 is not a JSON object"),
        ("[" * 100_000 + "\n", "line 1 is not a JSON object"),
        (b"PAR1\x15\x04\xff\xfe\x00\n", "line 1 is not a JSON object"),
        ("", "is empty"),
        (GOOD + '{"question": "q2"}\n', "row 2: the field 'answer'"),
        ('{"prompt": "q", "answer": "1"}\n', "row 1: the field 'question'"),
        (GOOD + '{"question": "q", "answer": true}\n', "row 2: the field 'answer'"),
        (GOOD + '{"question": "q", "answer": NaN}\n', "row 2: the field 'answer'"),
        (EMPTY + EMPTY.replace('"q"', '"p"'), "none of 1 train .* can be graded"),
        # The one question that there is is held out.
        (GOOD, "none of 0 train problems is left: give 2 questions"),
    ],
)
def test_a_bad_own_file_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "own.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_task(str(path), "train")
    assert "own.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "split", "source", "message"),
    [
        ("gsm9k", "train", None, "unknown task 'gsm9k'.*arithmetic, carries, gsm8k, math, math500"),
        ("gsm8k", "validation", None, "unknown split 'validation'"),
        ("nowhere/own.jsonl", "train", None, "nowhere/own.jsonl: No such file"),
        ("gsm8k", "train", "nowhere", "no train.jsonl in the folder nowhere"),
        ("sciknoweval", "train", "nowhere", r"no \*.jsonl in the folder nowhere"),
        ("math500", "train", None, "train on math"),
        ("arithmetic", "train", "nowhere", "arithmetic reads no data"),
        ("own.jsonl", "train", "nowhere", "own.jsonl reads no data"),
    ],
)
def test_a_wrong_request_is_one_clear_line(name, split, source, message):
    with pytest.raises(ValueError, match=message):
        load_task(name, split, source)


def test_a_bad_row_of_a_named_task_is_one_clear_line(tmp_path):
    choices = {"text": ["lead", "tin", "gold"], "label": ["A", "B"]}
    write(tmp_path / "any.jsonl", [chemistry_row("Which?") | {"choices": choices}])
    with pytest.raises(ValueError, match="sciknoweval, train row 1"):
        load_task("sciknoweval", "train", tmp_path)
    write(tmp_path / "train.jsonl", [{"problem": "q", "answer": "1"}])
    with pytest.raises(ValueError, match=r"gsm8k, train row 1: the field 'question'.*problem"):
        load_task("gsm8k", "train", tmp_path)


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the dataset\non the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"openai/gsm8k.*--data") as caught:
        load_task("gsm8k", "train")
    assert "\n" not in str(caught.value)


def test_what_is_asked_of_the_hub(monkeypatch):
    asked = []
    rows = {
        "openai/gsm8k": [gsm8k_row("q")],
        "EleutherAI/hendrycks_math": [math_row(r"$\boxed{2}$")],
        "HuggingFaceH4/MATH-500": [{"problem": "q", "answer": "2", "solution": ""}],
        "hicai-zju/SciKnowEval": [chemistry_row(f"{i}") for i in range(20)],
    }

    def stand_in(hub, configuration, split):
        asked.append((hub, configuration, split))
        return datasets.Dataset.from_list(rows[hub])

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    assert load_task("gsm8k", "train") == [Problem("q", "12")]
    assert load_task("math500", "test") == [Problem("q", "2")]
    assert len(load_task("sciknoweval", "train")) == 18
    assert len(load_task("sciknoweval", "test")) == 2
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("hicai-zju/SciKnowEval", None, "test"),  # all it has: both splits are made from it
        ("hicai-zju/SciKnowEval", None, "test"),
    ]
    asked.clear()
    assert len(load_task("math", "train")) == 7  # one of each subject
    assert {split for _, _, split in asked} == {"train"}
    subjects = "algebra counting_and_probability geometry intermediate_algebra number_theory"
    assert [c for _, c, _ in asked] == [*subjects.split(), "prealgebra", "precalculus"]


@real_data
def test_all_of_gsm8k_and_math500_loads(tmp_path, capsys):
    for split, count in (("train", 7473), ("test", 1319)):
        problems = load_task("gsm8k", split, DATA)
        assert f"gsm8k {split}: {count} problems, 0 dropped" in capsys.readouterr().err
        assert all(re.fullmatch(r"-?\d+(\.\d+)?", p.answer) for p in problems)
    problems = load_task("math500", "test", DATA)
    assert len(problems) == 500
    lines = (DATA / "math500" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["solution"] for line in lines]
    write(tmp_path / "test.jsonl", map(math_row, solutions))
    boxes = load_task("math", "test", tmp_path)
    # One has two boxes: "\\boxed{15\\frac{39}{40}}, or \\boxed{\\frac{639}{40}}".
    pairs = [(box.answer, problem.answer) for box, problem in zip(boxes, problems, strict=True)]
    assert [pair for pair in pairs if not accuracy(f"<answer>{pair[0]}</answer>", pair[1])] == []


@real_data
def test_all_of_chemistry_loads_and_no_question_is_on_both_sides():
    splits = {s: load_task("sciknoweval", s, DATA / "sciknoweval") for s in ("train", "test")}
    assert {s: len(problems) for s, problems in splits.items()} == {"train": 5645, "test": 618}
    assert {p.answer for p in splits["train"] + splits["test"]} == set("ABCD")
    questions = {s: {p.columns["question"] for p in splits[s]} for s in splits}
    assert len(questions["train"]) + len(questions["test"]) == 6170
    assert not questions["train"] & questions["test"]
