"""Whole groups in the log: every reward and what was kept, and the texts that show it."""

import pytest
import torch
from conftest import Words, metrics

from grpo import group_advantages
from pods import RULES
from rollouts import pack
from support import page
from support.page import logged, steps_between, telling
from support.tasks import Problem

# rewards, kept -> best and worst kept, best and worst left out; of equal ones the first is best.
TELLING = [
    ([0, 1, 2, 3, 4, 5], [0, 1, 5], [5, 0, 4, 2]),
    ([0, 1, 0, 1, 0, 1], [0, 1, 3], [1, 0, 5, 4]),
    ([7, 7, 7, 7], [0, 1], [0, 1, 2, 3]),
    ([0, 1, 2], [0, 2], [2, 0, 1]),
    ([-1, -2], [0, 1], [0, 1]),
]


@pytest.mark.parametrize("rewards, kept, shown", TELLING)
def test_the_texts_are_those_at_the_ends_of_what_was_kept_and_left_out(rewards, kept, shown):
    assert telling(rewards, kept) == shown


class Second:
    """The second of two processes. Here both have logged the same."""

    rank = 1

    def gather(self, thing):
        return [thing, thing]


def one_step(step: int = 3) -> dict[str, list[dict]]:
    """What is logged by two processes, each of which has two groups of four rollouts."""
    completions = [[1, 0], [2], [3, 3, 0], [4, 0], [5, 0], [6, 0], [7, 0], [8, 0]]
    log_probs = [[0.0] * len(tokens) for tokens in completions]
    rollouts = pack([[9], [9, 9]], completions, log_probs, [0], Words())
    parts = {"mine": [0, 1, 0.123456, 1.0] * 2, "total": [0.0, 1.5, 0.123456, 1.5] * 2}
    keep = torch.tensor([[0, 1], [0, 3]])
    problems = [Problem("1+1=", "2"), Problem("2+2=", "4")]
    advantages = torch.tensor([[-1.0, 1.0], [-0.70710678, 0.70710678]])
    return logged(Second(), step, problems, rollouts, parts, keep, advantages)


def test_a_group_is_logged_with_all_rewards_and_its_texts_with_their_parts():
    rows, texts = one_step().values()
    assert rows[0] == {
        "step": 3, "group": 2, "prompt": "1+1=", "answer": "2",
        "rewards": [0, 1.5, 0.1235, 1.5], "parts": {"mine": [0, 1, 0.1235, 1]},
        "lengths": [2, 1, 3, 2], "finished": [1, 0, 1, 1],
        "kept": [0, 1], "advantages": [-1, 1],
    }  # fmt: skip
    assert rows[1]["advantages"] == [-0.7071, 0.7071]
    assert [row["group"] for row in rows] == [2, 3] * 2  # counted over the processes
    assert [(row["group"], row["index"], row["kept"]) for row in texts[:4]] == [
        (2, 1, True), (2, 0, True), (2, 3, False), (2, 2, False),
    ]  # fmt: skip
    assert texts[0] == {
        "step": 3, "group": 2, "index": 1, "prompt": "1+1=", "answer": "2", "completion": "2",
        "finished": False, "mine": 1, "total": 1.5, "kept": True,
    }  # fmt: skip
    assert [row["group"] for row in texts[::4]] == [2, 3] * 2


def test_a_long_run_writes_its_texts_ever_more_rarely(monkeypatch):
    text = [{"completion": "x" * 1000}]
    written = {step: steps_between(step, text) for step in range(1, 1_000_001, 99)}
    assert written[1] == 1 and max(written.values()) == 32
    bytes_of_all = sum(99 * 1020 / every for every in written.values())
    assert bytes_of_all < 4 * page.TEXT_BYTES
    monkeypatch.setattr(page, "TEXT_BYTES", 100)
    assert one_step()["rollouts"] == [] and one_step()["groups"]


def test_a_run_logs_the_groups_that_it_trained_on(finished):
    rows, steps = metrics(finished, "groups.jsonl"), metrics(finished)[1:]
    expected = [(s, g) for s in range(1, 7) for g in (0, 1)]
    assert [(row["step"], row["group"]) for row in rows] == expected
    for row in rows:
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        assert row["kept"] == RULES["max_variance"](rewards, 4).tolist()
        advantages = torch.tensor(row["advantages"], dtype=torch.float32)
        assert torch.allclose(group_advantages(rewards[row["kept"]]), advantages, atol=2e-3)
        own = zip(*(row["parts"][name] for name in ("accuracy", "format", "tag_count")))
        assert row["rewards"] == pytest.approx([a + 0.1 * f + 0.1 * t for a, f, t in own])
    for step, first, second in zip(steps, rows[::2], rows[1::2], strict=True):
        both = first["rewards"] + second["rewards"]
        assert sum(both) / len(both) == pytest.approx(step["reward"], abs=1e-4)
    for text in metrics(finished, "rollouts.jsonl"):
        (group,) = [r for r in rows if (r["step"], r["group"]) == (text["step"], text["group"])]
        assert text["total"] == pytest.approx(group["rewards"][text["index"]], abs=1e-4)
        assert text["kept"] == (text["index"] in group["kept"])
