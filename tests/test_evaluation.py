"""Evaluation against a loop over completions; examples, summary and curves of known rows."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import SMALL, metrics, small, write_sums

import train
from rewards import accuracy, format, tag_count
from support.evaluation import (
    draw_curves,
    evaluate,
    evaluation,
    not_finite,
    pass_at_k,
    save_completions,
    summary,
)
from support.processes import Processes
from support.run import Run, derived_seed
from support.tasks import Problem, sums


def test_pass_at_k_equals_all_draws():
    for samples, correct in [(4, 0), (4, 1), (5, 2), (6, 6), (8, 3)]:
        results = [i < correct for i in range(samples)]
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(results, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(samples, correct, k) == pytest.approx(share)


def test_evaluation_numbers_are_those_of_a_loop_over_completions():
    run = Run(small(eval_problems=16, eval_samples=8, temperature=0.9), train=False)
    data = run.eval_data[SMALL["task"]]
    result, rows = evaluate(run, data)
    seed = derived_seed(0, "evaluation", 0)
    rollouts = run.sampler.generate(data.prompt_ids, 8, run.max_new_tokens, 0.9, seed)
    right = [
        [text.endswith(f"<answer>{problem.answer}</answer>") for text in texts]
        for problem, texts in zip(data.problems, rollouts.texts)
    ]
    means = [sum(row) / 8 for row in right]
    mean = sum(means) / 16
    spread = math.sqrt(sum((value - mean) ** 2 for value in means) / 15 / 16)
    assert result["accuracy"] == result["pass@1"] == pytest.approx(mean, abs=0.03)
    assert result["accuracy_se"] == pytest.approx(spread, rel=0.2)
    assert result["pass@8"] == pytest.approx(sum(map(any, right)) / 16, abs=0.06)
    assert result["pass@1"] <= result["pass@4"] <= result["pass@8"]
    lengths = rollouts.mask.sum(-1).double()
    assert result["completion_length"] == pytest.approx(lengths.mean().item())
    assert result["truncated"] == pytest.approx(1 - rollouts.finished.double().mean().item())
    assert (result["problems"], result["samples"]) == (16, 8)

    assert [row["completion"] for row in rows] == [text for row in rollouts.texts for text in row]
    assert [row["length"] for row in rows] == lengths.flatten().tolist()
    assert [row["finished"] for row in rows] == rollouts.finished.flatten().tolist()
    for i, row in enumerate(rows):
        assert Problem(row["prompt"], row["answer"]) == data.problems[i // 8]
        for name, function in (("format", format), ("tag_count", tag_count)):
            assert row[name] == function(row["completion"])
        assert row["accuracy"] == accuracy(row["completion"], row["answer"])


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
    evaluate(run, run.eval_data[SMALL["task"]])
    assert calls == expected


def test_repeats_of_one_problem_are_no_new_evidence():
    """One problem, eight samples: there is no spread over problems to speak of."""
    run = Run(small(eval_problems=1, eval_samples=8), train=False)
    assert evaluation(run)[SMALL["task"]]["accuracy_se"] == 0.0


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


# ---- what was written, to read -------------------------------------------------------------------


def a_completion(problem: int, right: bool, completion: str = "so <answer>5</answer>") -> dict:
    row = {"task": "sums", "problem": problem, "prompt": "2+3=", "answer": "5" if right else "6"}
    row |= {"completion": completion, "finished": right, "length": 7}
    return row | {"accuracy": float(right), "format": 0.0, "tag_count": 0.5}


def holding(completions: list[dict], others: list[dict] = ()) -> SimpleNamespace:
    """As much of a run as matters here, with another process beside it."""
    processes = Processes()
    processes.gather = lambda mine: [mine, list(others)]
    return SimpleNamespace(
        processes=processes, completions=completions, eval_data={"sums": None}, opens_think=False
    )


@pytest.mark.parametrize(
    ("right", "shown"), [([1, 0, 1, 0, 0], [0, 1, 3]), ([1] * 4, [0, 1, 2]), ([0, 0], [0, 1])]
)
def test_one_right_and_two_wrong_completions_are_shown_as_far_as_there_are_such(
    tmp_path, right, shown
):
    rows = [a_completion(i, bool(it), f"text {i}") for i, it in enumerate(right)]
    text = save_completions(holding(rows), tmp_path)
    assert [i for i in range(len(rows)) if f"'text {i}'" in text] == shown
    assert text.count("right: ") == sum(right[i] for i in shown)


def test_what_is_shown_says_why(tmp_path):
    text = save_completions(holding([a_completion(0, False, "It is\n\x1b[2J\x9b2J")]), tmp_path)
    assert text == (
        "wrong: '2+3='\n  'It is\\n\\x1b[2J\\x9b2J'\n"
        "  answer '6', read '\\x1b[2J\\x9b2J'; accuracy 0, format 0, tag_count 0.5; 7 tokens"
        ", cut off before EOS"
    )
    assert "read None;" in save_completions(holding([a_completion(0, False, "<think>5")]), tmp_path)
    long = save_completions(holding([a_completion(0, True, "a" * 9999 + "the end")]), tmp_path)
    assert "the end'" in long and len(long) < 1000


def test_the_files_rows_are_those_of_all_processes_in_order(tmp_path):
    """The samples of a problem stay in theirs; without an evaluation the file stays as it is."""
    mine = [a_completion(0, True, "a"), a_completion(0, False, "b"), a_completion(2, True, "c")]
    save_completions(holding(mine, [a_completion(1, True, "d")]), tmp_path)
    assert save_completions(holding([]), tmp_path) == ""
    rows = metrics(tmp_path, "evaluation.jsonl")
    assert [row["completion"] for row in rows] == ["a", "b", "d", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.jsonl"]


# ---- what a run shows of itself ------------------------------------------------------------------


def test_examples_are_kept_ones_and_ones_that_were_not():
    _, shown = train.train_step(Run(small()), 1)
    assert [row["kept"] for row in shown] == [True, True, False, False]
    assert len({row["prompt"] for row in shown}) == 1
    for row in shown:
        assert row["finished"] in (True, False) and row["step"] == 1
    _, shown = train.train_step(Run(small(m=8)), 1)
    assert [row["kept"] for row in shown] == [True, True]  # nothing else is there


def a_row(step: int, **changes) -> dict:
    seconds = dict(generate=0.5, score=0.1, select=0.1, update=0.3, sync=0.0)
    row = {"step": step, "time": float(step), "seconds": seconds, "groups": 4, "reward": 0.5}
    row |= {"groups_without_signal": 1, "grad_norm": 1.0, "accuracy": 0.4, "reward_kept": 0.45}
    return row | changes


def evaluated(accuracy: float) -> dict:
    return {"accuracy": accuracy, "accuracy_se": 0.01, "problems": 16, "samples": 2}


def test_the_summary_says_where_the_time_went_and_what_was_learned(tmp_path):
    first = {"step": 0, "time": 0.0, "eval": {"sums": evaluated(0.25)}}
    rows = [first, a_row(1), a_row(2, grad_norm=None, eval={"sums": evaluated(0.75)})]
    text = summary(rows, tmp_path)
    assert "generate        1.00   0.5000  50.0%" in text
    assert "update          0.60   0.3000  30.0%" in text
    assert "total           2.00   1.0000  over 2 steps" in text
    assert "held-out accuracy on sums: 0.250 at step 0, 0.750 +- 0.010 at step 2" in text
    assert "(16 problems, 2 sample(s) each)" in text
    assert "groups without signal: 2 of 8" in text
    assert "steps without an update, because the gradient was not finite: 1" in text
    assert "not finite" not in summary([first, a_row(1, eval={"sums": evaluated(0.5)})], tmp_path)
    assert "no step was done" in summary([first], tmp_path)


@pytest.mark.parametrize(
    ("norm", "bad"), [(0.0, False), (1e9, False), (None, True), (math.nan, True), (math.inf, True)]
)
def test_a_gradient_that_was_not_finite_is_known_from_its_row(norm, bad):
    assert not_finite({"grad_norm": norm}) is bad


def test_curves_are_drawn_of_a_run_and_not_of_nothing(finished, tmp_path):
    draw_curves(metrics(finished), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw_curves(metrics(finished)[:1], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_evaluation_leaves_the_random_state_of_a_run_alone():
    """Else evaluating more often would change what is learned."""
    run = Run(small())
    before = torch.get_rng_state()
    evaluation(run)
    assert torch.equal(torch.get_rng_state(), before)
