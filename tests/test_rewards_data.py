"""Real data: every reference is gradable and right, and its neighbours are wrong."""

import json
import re
from pathlib import Path

import pytest

import rewards
from rewards import score

SHARED = Path(__file__).parents[2] / "shared"


def rows(path: str) -> list[dict]:
    """The rows of a JSONL file beside the repository, or a skip that says what is missing."""
    file = SHARED / path
    if not file.exists():
        pytest.skip(f"needs ../shared/{path}")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def check_references(golds: list[str]) -> list[tuple[str, str]]:
    """Every reference parses and equals itself; returns the pairs that equal the next row's."""
    texts, following = [f"<answer>{gold}</answer>" for gold in golds], golds[1:] + golds[:1]
    assert all(rewards.are_gradable(golds))
    assert score(texts, golds)["accuracy"] == [1.0] * len(golds)
    equal = score(texts, following)["accuracy"]
    pairs = zip(golds, following, equal, strict=True)
    return [(gold, after) for gold, after, same in pairs if same and gold != after]


def test_every_reference_and_solution_of_gsm8k():
    data = rows("data/gsm8k/train.jsonl") + rows("data/gsm8k/test.jsonl")
    golds = [row["answer"].rpartition("####")[2].strip() for row in data]
    assert check_references(golds) == []
    assert score([row["answer"] for row in data], golds)["accuracy"] == [1.0] * 8792


def test_every_reference_and_solution_of_math500():
    data = rows("data/math500/test.jsonl")
    golds = [row["answer"] for row in data]
    assert check_references(golds) == [("5", "x=5")]
    assert score([row["solution"] for row in data], golds)["accuracy"] == [1.0] * 500


def test_every_reference_of_sciknoweval():
    data = rows("data/sciknoweval/chemistry_mcq.jsonl")
    assert check_references([row["answerKey"] for row in data]) == []


def test_no_neighbour_of_a_reference_of_math500_is_right():
    """A digit, a sign or a bracket changed, a letter added, an item dropped: other answers."""
    golds = dict.fromkeys(row["answer"] for row in rows("data/math500/test.jsonl"))
    pairs = []
    for gold in golds:
        if r"\text" in gold:
            continue  # of which a part says nothing
        changed = {re.sub(r"\d", lambda d: str((int(d[0]) + 1) % 10), gold, count=1)}
        changed |= {gold.replace("+", "-"), "-" + gold, gold + "+1", "2" + gold, gold + "b"}
        changed |= {re.sub(r"^\(", "[", gold), re.sub(r",[^,]*(?=\)$)", "", gold)}
        same = {gold, "-0", "0b", gold.removesuffix(" 0") + " 0b"}  # 0b is 0
        pairs += [(text, gold) for text in sorted(changed - same)]
    right = score([f"<answer>{text}</answer>" for text, _ in pairs], [gold for _, gold in pairs])
    wrong = [pair for pair, verdict in zip(pairs, right["accuracy"], strict=True) if verdict]
    assert wrong == []


def test_handed_answers_are_judged_as_a_mathematician_would():
    for case in rows("cases/answers.jsonl"):
        assert rewards.is_gradable(case["gold"]), case
        if "accuracy" in case:
            assert rewards.accuracy(case["completion"], case["gold"]) == case["accuracy"], case
