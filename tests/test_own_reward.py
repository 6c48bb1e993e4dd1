"""A reward of one's own: what it is given, where its part appears, how bad ones end."""

import json

import pytest
from conftest import TASK, flags, metrics, small, without_times

import train
from support.errors import InputError
from support.own_reward import load
from support.run import Run
from support.settings import TAKEN
from support.tasks import Problem

BREVITY = """
def brevity(completions, **others):
    return [1 / (1 + len(text)) for text in completions]
"""


@pytest.fixture
def mine(tmp_path):
    """Writes a file with a function and returns the setting that weighs it."""

    def write(code: str, name: str = "brevity") -> str:
        (tmp_path / "mine.py").write_text(code)
        return f"{tmp_path / 'mine.py'}:{name}=0.5"

    return write


SEEN = """
calls = []
def seen(**given):
    calls.append(given)
    return [0] * len(given["completions"])
"""


def test_it_is_called_once_a_step_with_all_of_it_and_the_rows_other_columns(mine, tmp_path):
    rows = [{"question": f"{i}+11=", "answer": str(i + 11), "level": i} for i in range(10, 40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = Run(small(task=str(tmp_path / "sums.jsonl"), reward=mine(SEEN, "seen")))
    calls = run.own_rewards[0].function.__globals__["calls"]
    calls.clear()
    train.train_step(run, 1)
    problems = [problem for problem in run.prompts(1)[0] for _ in range(8)]
    (given,) = calls
    assert given["answers"] == [problem.answer for problem in problems]
    assert given["prompts"] == [problem.prompt for problem in problems]
    assert given["level"] == [int(prompt[:2]) for prompt in given["prompts"]]
    assert list(map(type, given["completions"])) == [str] * 16


def test_a_column_that_a_row_lacks_is_none_there(mine):
    own = load(mine(SEEN, "seen").rpartition("=")[0], 1.0)
    assert own([Problem("a", "1", {"hint": "x"}), Problem("b", "2")], ["c", "d"]) == [0.0, 0.0]
    assert own.function.__globals__["calls"][0]["hint"] == ["x", None]


def test_its_part_has_its_weight_and_none_changes_nothing(mine):
    problems = [Problem("1+1=", "2")] * 3
    completions = ["", "<think>so</think><answer>2</answer>", "2" * 99]
    own = Run(small(reward=mine(BREVITY)), train=False).score(problems, completions)
    plain = Run(small(), train=False).score(problems, completions)
    brevity = [1.0, 1 / 36, 1 / 100]
    total = [t + 0.5 * b for t, b in zip(plain["total"], brevity)]
    assert own == plain | {"brevity": brevity, "total": total}


def test_its_part_is_logged_evaluated_and_may_be_what_the_rule_sees(mine, tmp_path):
    settings = {"reward": mine(BREVITY), "select_by": "brevity", "rule": "max_reward", "steps": 1}
    rows = train.train(small(**settings), tmp_path / "run")
    for group in metrics(tmp_path / "run", "groups.jsonl"):
        brevity = group["parts"]["brevity"]
        assert sorted(brevity)[-4:] == sorted(brevity[i] for i in group["kept"])
    parts = set(rows[1]["rewards"])
    assert 0 < rows[1]["rewards"]["brevity"] < 1 and 0 < rows[1]["eval"][TASK]["brevity"] < 1
    assert rows[1]["eval"][TASK].keys() <= TAKEN | parts | {"pass@1"}
    for name in ("rollouts.jsonl", "evaluation.jsonl"):
        for row in metrics(tmp_path / "run", name):
            expected = 1 / (1 + len(row["completion"]))
            assert row["brevity"] == pytest.approx(expected, abs=1e-4)
            assert row.keys() <= TAKEN | parts


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("[1 / len(text) for text in completions]", "fails on completion 1: ZeroDivisionError"),
        ("[None if text else 1 for text in completions]", "gives None for completion 2"),
        ("['good' for text in completions]", "gives 'good' for completion 1"),
        ("[float('nan') if text else 0 for text in completions]", "gives nan for completion 2"),
        ("[10**400 for text in completions]", "gives 1000.* for completion 1: need a finite"),
        ("[1.0]", r"gives 1 values \[1.0\] for 2 completions"),
        ("None", "gives None for 2 completions"),
        ("{text: 1 for text in completions}", "gives {.*} for 2 completions"),
        ("exit('done')", "fails on completion 1: SystemExit"),
        ("len(completions) > 1 and no_such_name", "fails: NameError"),
        ("others['no_such_column']", "fails on completion 1: KeyError"),
        # The file itself:
        ("(", "cannot be loaded: SyntaxError"),
        ("1\nimport nowhere_to_be_found", "cannot be loaded: ModuleNotFoundError"),
        ("1\ndel brevity", "cannot be loaded: AttributeError"),
    ],
)
def test_a_bad_function_ends_in_one_line_before_the_first_step(mine, tmp_path, body, words):
    settings = small(reward=mine(f"def brevity(completions, **others):\n    return {body}\n"))
    with pytest.raises(InputError, match=rf"--reward .*mine.py:brevity {words}") as error:
        train.train(settings, tmp_path / "run")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("numbers", ["torch.ones(2)", "numpy.ones(2, 'f4')", "(True,) * 2"])
def test_arrays_tensors_and_truth_values_are_numbers(mine, numbers):
    code = f"import numpy, torch\ndef brevity(completions, **others):\n    return {numbers}\n"
    own = load(mine(code).rpartition("=")[0], 1.0)
    assert own([Problem("", "1")] * 2, ["1", "2"]) == [1.0, 1.0]


def test_a_function_that_fails_later_ends_the_run_in_one_line(mine, tmp_path, capsys):
    code = "def brevity(completions, **others):\n    return [1, 1, 1][: len(completions)]\n"
    assert train.main(flags(reward=mine(code), out=tmp_path / "run")) == 2
    assert "gives 3 values [1, 1, 1] for 16 completions" in capsys.readouterr().err


def test_a_resumed_run_says_if_the_file_has_changed_and_repeats_it_if_not(mine, tmp_path, capsys):
    settings = {"reward": mine(BREVITY), "eval_problems": 4}
    train.train(small(**settings, steps=4), tmp_path / "whole")
    train.train(small(**settings, steps=2), tmp_path / "run")
    capsys.readouterr()
    train.train(small(**settings, steps=4), tmp_path / "run", resume=True)
    assert "changed" not in capsys.readouterr().err
    assert without_times(tmp_path / "run")[-1] == without_times(tmp_path / "whole")[-1]
    mine(BREVITY + "# another file\n")
    train.train(small(**settings, steps=5), tmp_path / "run", resume=True)
    assert "code (" in (said := capsys.readouterr().err) and "mine.py:brevity) have changed" in said
