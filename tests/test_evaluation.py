"""Evaluation against a loop over completions; summary and curves of known rows."""

import itertools
import json
import math
import re

import pytest
from conftest import SMALL, metrics, small, write_sums

import train
from rewards import accuracy, extract_answer, format, lenient_accuracy, tag_count
from support import evaluation
from support.evaluation import evaluate, numbers_of, pass_at_k, save_completions, summary
from support.run import Run, derived_seed
from support.tasks import Problem, sums


def test_pass_at_k_equals_all_draws():
    for samples, correct in [(4, 0), (4, 1), (5, 2), (6, 6), (8, 3)]:
        results = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(results, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(samples, correct, k) == pytest.approx(share)


def test_what_was_written_is_what_the_sampler_gave_and_the_reward_said():
    run = Run(small(eval_problems=16, eval_samples=8, temperature=0.9), train=False)
    (data,) = run.eval_data.values()
    _, rows = evaluate(run)
    seed = derived_seed(0, "evaluation", 0)
    rollouts = run.sampler.generate(data.prompt_ids, 8, run.max_new_tokens, 0.9, seed)
    assert [row["completion"] for row in rows] == [text for row in rollouts.texts for text in row]
    assert [row["length"] for row in rows] == rollouts.mask.sum(-1).flatten().tolist()
    assert [row["finished"] for row in rows] == rollouts.finished.flatten().tolist()
    for i, row in enumerate(rows):
        assert (row["task"], row["problem"]) == (SMALL["task"], i // 8)
        assert Problem(row["prompt"], row["answer"]) == data.problems[i // 8]
        text, answer = row["completion"], row["answer"]
        assert (row["format"], row["tag_count"]) == (format(text), tag_count(text))
        assert (row["read"], row["accuracy"]) == (extract_answer(text), accuracy(text, answer))
        assert row["lenient_accuracy"] == lenient_accuracy(text, answer)


def a_row_of(right: int, finished: int = 1, form: float = 1.0, **parts) -> dict:
    row = {"finished": bool(finished), "length": 7, "accuracy": float(right), "format": form}
    return row | parts


def test_numbers_are_those_of_a_count_by_hand():
    """Two problems, four completions each: one right of four, three right of four."""
    rows = [
        *(a_row_of(1), a_row_of(0), a_row_of(0, finished=0, form=0.0), a_row_of(0)),
        *(a_row_of(1, form=0.0), a_row_of(1, finished=0), a_row_of(1), a_row_of(0)),
    ]
    rows = [row | {"brevity": i / 7} for i, row in enumerate(rows)]  # a reward of the user's own
    assert numbers_of(rows, 4) == {
        "accuracy": 0.5,
        "accuracy_se": pytest.approx(math.sqrt(2 * 0.25**2 / 1 / 2)),  # of the means 1/4 and 3/4
        "pass@1": 0.5,
        "pass@4": 1.0,
        "format": 0.75,
        "brevity": pytest.approx(0.5),
        "formed_accuracy": 3 / 8,
        "finished_accuracy": 3 / 6,
        "truncated": 2 / 8,
        "completion_length": 7.0,
        "problems": 2,
        "samples": 4,
    }
    assert numbers_of([a_row_of(0, finished=0)], 1)["finished_accuracy"] is None
    # One problem, eight samples: there is no spread over problems to speak of.
    assert numbers_of([a_row_of(i % 2) for i in range(8)], 8)["accuracy_se"] == 0.0


@pytest.mark.parametrize(
    ("sampler", "count", "expected"),
    [("torch", 1, [16, 14]), ("vllm", 1, [30]), ("vllm", 4, [8]), ("vllm", 40, [1])],
)
def test_an_engine_gets_all_prompts_of_a_process_at_once(sampler, count, expected):
    run = Run(small(eval_problems=30, eval_samples=8), train=False)
    run.config.sampler, run.processes.count, generate = sampler, count, run.sampler.generate
    run.processes.gather = lambda thing: [thing]
    calls = []

    def counting(prompts, *args):
        calls.append(len(prompts))
        return generate(prompts, *args)

    run.sampler.generate = counting
    evaluate(run)
    assert calls == expected


def test_train_on_one_task_evaluate_on_others(tmp_path):
    tasks = tuple(
        write_sums(tmp_path / f"{name}.jsonl", sums()[first : first + 20])
        for name, first in (("a", 100), ("b=1", 200))  # a file may have = in its name
    )
    rows = train.train(small(steps=1, eval_task=tasks), tmp_path / "run")
    assert list(rows[0]["eval"]) == list(tasks)
    assert rows[0]["eval_accuracy"] == rows[0]["eval"][tasks[0]]["accuracy"]
    written = metrics(tmp_path / "run", "evaluation.jsonl")
    assert list(dict.fromkeys(row["task"] for row in written)) == list(tasks)
    for task, numbers in rows[-1]["eval"].items():
        right = [row["accuracy"] for row in written if row["task"] == task]
        assert len(right) == numbers["problems"]
        assert numbers["accuracy"] == pytest.approx(sum(right) / len(right))


# ---- what is written and shown -------------------------------------------------------------------


def test_all_rows_are_written_and_one_right_and_two_wrong_ones_shown(tmp_path):
    run = Run(small(eval_problems=8), train=False)
    for right, shown in (([1, 0, 1, 0, 0], [0, 1, 3]), ([1] * 4, [0])):
        rows = [{"problem": i, "accuracy": float(it)} for i, it in enumerate(right)]
        lines = save_completions(run, rows, tmp_path).splitlines()
        assert metrics(tmp_path, "evaluation.jsonl") == rows
        assert [json.loads(line)["problem"] for line in lines] == shown


def test_the_rows_of_all_processes_are_in_the_order_of_problems():
    """The samples of a problem stay in theirs."""
    run = Run(small(eval_problems=4, eval_samples=2), train=False)

    def with_another(mine: list[dict]) -> list[list[dict]]:
        assert [row["problem"] for row in mine] == [0, 0, 1, 1, 2, 2, 3, 3]
        return [mine[:2] + mine[4:6], mine[2:4] + mine[6:]]

    _, expected = evaluate(run)
    run.processes.gather = with_another
    assert evaluate(run)[1] == expected


def a_row(step: int, **changes) -> dict:
    seconds = dict(generate=0.5, score=0.1, select=0.1, update=0.3, sync=0.0)
    row = {"step": step, "seconds": seconds, "groups": 4, "groups_without_signal": 1}
    return row | {"grad_norm": 1.0} | changes


def evaluated(accuracy: float) -> dict:
    return {"sums": {"accuracy": accuracy, "accuracy_se": 0.01, "problems": 16, "samples": 2}}


def test_the_summary_says_where_the_time_went_and_what_was_learned(tmp_path):
    first = {"step": 0, "time": 0.0, "eval": evaluated(0.25)}
    rows = [first, a_row(1), a_row(2, grad_norm=None, eval=evaluated(0.75))]
    text = summary(rows, tmp_path)
    assert re.search(r"generate +1.00 +0.5000 +50.0%", text)
    assert re.search(r"total +2.00 +1.0000  over 2 steps", text)
    assert "held-out accuracy on sums: 0.250 at step 0, 0.750 +- 0.010 at step 2" in text
    assert "groups without signal: 2 of 8" in text and "not finite: 1" in text
    assert "not finite" not in summary([first, a_row(1, eval=evaluated(0.5))], tmp_path)
    assert "no step was done" in summary([first], tmp_path)


def test_curves_are_drawn_of_a_run_and_not_of_nothing(finished, tmp_path):
    idle = [row | {"entropy": None} for row in metrics(finished)]  # steps without an update
    evaluation.draw_curves(idle, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    evaluation.draw_curves(idle[:1], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
