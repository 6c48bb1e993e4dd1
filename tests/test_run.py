"""What a run holds: data in an order that follows from the step, seeds, lengths."""

import pytest
import torch
from conftest import SMALL, small, write_sums

from support.data import derived_seed
from support.errors import InputError
from support.run import Run
from support.tasks import sums


def test_every_problem_once_in_each_pass_and_passes_differ(tmp_path):
    task = write_sums(tmp_path / "sums.jsonl", sums()[:30])
    run = Run(small(task=task, prompts_per_step=3))
    count = len(run.train_data.problems)
    order = [p.prompt for step in range(1, count + 1) for p in run.prompts(step)[0]]  # three passes
    passes = [order[i * count : (i + 1) * count] for i in range(3)]
    assert len(set(passes[0])) == count
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]
    problems, prompt_ids = run.prompts(7)
    assert [run.tokenizer.decode(ids) for ids in prompt_ids] == [p.prompt for p in problems]


def test_a_seed_orders_what_is_trained_on_and_not_what_is_evaluated():
    runs = [Run(small(seed=seed, eval_problems=9)) for seed in (0, 0, 1)]
    orders = [[problem.prompt for problem in run.prompts(1)[0]] for run in runs]
    assert orders[0] == orders[1] != orders[2]
    first, second = (
        [problem.prompt for problem in run.eval_data[SMALL["task"]].problems] for run in runs[1:]
    )
    assert first == second and len(set(first)) == 9
    assert not set(first) & {problem.prompt for problem in runs[0].train_data.problems}
    every = Run(small(eval_problems=0), train=False).eval_data[SMALL["task"]].problems
    assert set(first) < {problem.prompt for problem in every}


def test_an_evaluation_task_may_have_a_folder_of_its_own(tmp_path):
    questions = {"a": [f"{i}+11=" for i in range(10, 20)], "b": [f"{i}+11=" for i in range(40, 50)]}
    for folder, prompts in questions.items():
        (tmp_path / folder).mkdir()
        for split in ("train", "test"):
            rows = [(prompt, "#### 1") for prompt in prompts]
            write_sums(tmp_path / folder / f"{split}.jsonl", rows)
    config = small(task="gsm8k", data=str(tmp_path / "a"), eval_task=f"gsm8k={tmp_path / 'b'}")
    run = Run(config)
    assert [problem.prompt for problem in run.train_data.problems] == questions["a"]
    assert {problem.prompt for problem in run.eval_data["gsm8k"].problems} == set(questions["b"])


def test_a_seed_depends_on_purpose_step_and_the_runs_seed():
    run, other = Run(small()), Run(small(seed=1))
    asked = [("rollouts", 1), ("rollouts", 2), ("rule", 1), ("rule", 2)]
    seeds = [which.seed(*question) for which in (run, other) for question in asked]
    assert len(set(seeds)) == 8
    # Written down once: a resumed run may be on another machine.
    assert seeds[0] == 8_160_322_513_835_027
    assert derived_seed(1, 23) != derived_seed(12, 3)


def test_a_completion_is_as_long_as_the_positions_allow_at_most():
    assert Run(small()).max_new_tokens == 32 - 6
    assert Run(small(max_new_tokens=12)).max_new_tokens == 12
    with pytest.raises(InputError, match=r"--max-new-tokens 27 and a prompt of 6 .* 32 positions"):
        Run(small(max_new_tokens=27))
    with pytest.raises(InputError, match=r"--model tiny_policy, .* longer than 3 tokens"):
        Run(small(max_prompt_tokens=3))


def test_small_models_have_one_thread_unless_told():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        Run(small(), train=False)
        assert torch.get_num_threads() == 1
        Run(small(threads=2), train=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_description_counts_what_is_trained_kept_and_held_out():
    text = Run(small(lora_rank=4, eval_problems=0)).description()
    trained = int(text.split(" trained")[0].rpartition(" ")[2].replace(",", ""))
    assert 0 < trained < 50_000 and "281,600 parameters" in text
    assert "270 problems, 2 a step, n=8 rollouts each, m=4 kept by max_variance" in text
    assert text.endswith(f"held-out problems: 30 of {SMALL['task']}")
    text = Run(small(m=8)).description()
    assert "281,600 trained" in text and "n=m=8" in text
