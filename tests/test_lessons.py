"""Notebook 0's loop is train.py's, notebooks survive being changed, exercises know the answer."""

import json
import re
import sys

import pytest
import torch
from conftest import ROOT, TASK, small

import train
from support import tasks
from support.models import load_model
from support.run import Run
from support.tasks import load_task

pytest.importorskip("IPython")
import matplotlib.pyplot as plt

from benches import lessons

FOLDER = ROOT / "notebooks"


class Notebook:
    """A notebook's code, run in this process: faster than a kernel, and its names can be seen."""

    def __init__(self, number: int) -> None:
        (self.path,) = FOLDER.glob(f"{number}_*.ipynb")
        self.cells = json.loads(self.path.read_text())["cells"]
        self.names: dict = {"__name__": "__main__"}

    def code(self) -> dict[str, str]:
        return {
            cell["id"]: "".join(cell["source"])
            for cell in self.cells
            if cell["cell_type"] == "code"
        }

    def run(self, *sources: str) -> dict:
        for source in sources:
            exec(compile(source, self.path.name, "exec"), self.names)
        return self.names

    def imports(self) -> dict:
        return self.run(*list(self.code().values())[:2])

    def answer(self, exercise: str) -> str:
        """The answer that is folded below an exercise."""
        below = next(i for i, cell in enumerate(self.cells) if cell["id"] == exercise) + 1
        text = "".join(self.cells[below]["source"])
        assert text.startswith("<details><summary>Answer</summary>")
        return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


@pytest.fixture(autouse=True)
def said(monkeypatch) -> list[str]:
    """What a notebook shows as text."""
    shown: list[str] = []
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(lessons, "SHORT", True)
    monkeypatch.setattr(lessons, "say", shown.append)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    # Rendering all sums takes longer than what is tested here.
    monkeypatch.setattr(tasks, "load_task", lambda name, split, source=None: load_task(TASK, split))
    return shown


# ---- the loop of notebook 0 ----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m", "rule"), [(16, 4, "max_variance"), (8, 8, "random")])
def test_the_loop_of_notebook_0_is_train_step(n, m, rule):
    notebook = Notebook(0)
    notebook.imports()
    policy, notebook.names["tokenizer"] = load_model("tiny_policy")
    code = notebook.code()
    names = notebook.run(code["loop-collect"], code["loop-update"])
    run = Run(small(n=n, m=m, rule=rule, prompts_per_step=names["P"], task="arithmetic"))
    optimizer = torch.optim.AdamW(policy.parameters(), 1.0, betas=(0.9, 0.95), weight_decay=0.0)
    assert (
        "AdamW(policy.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)" in code["loop-learn"]
    )
    start = [weight.detach().clone() for weight in policy.parameters()]
    for step in range(1, 7):  # beyond the warm-up of the learning rate
        row, _ = train.train_step(run, step)
        rewards, kept, advantages = names["collect"](policy, step, n, m, rule)
        loss = names["update"](policy, optimizer, step, kept, advantages, run.config.lr)
        assert rewards.mean().item() == pytest.approx(row["reward"], abs=1e-12)
        assert kept.mask.shape[:2] == (names["P"], m)
        assert loss == pytest.approx(row["loss"], abs=1e-5)
    pairs = zip(policy.parameters(), run.model.parameters(), strict=True)
    apart = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    moved = max((a - b).abs().max().item() for a, b in zip(policy.parameters(), start))
    assert apart < 0.02 * moved


# ---- changed by hand -----------------------------------------------------------------------------

CHANGES = [
    (1, {"rewards": "[0, 1, 1, 0, 0, 0, 1, 0, 0]", "m": "3", "n01, m01": "20, 5"}),
    (1, {"rewards": "[0.1, 1.2, 1.05, 0.2, 0.2, 1.2, 0.3, 0.025]", "m": "6", "n01, m01": "9, 9"}),
    (2, {"prompts": '["12+34="]', "n": "5", "many, m": "24, 6"}),
    (
        2,
        {
            "prompts": '["99+99=", "10+10=", "61+29=", "55+67="]',
            "n": "8",
            "weights": '{"accuracy": 1.0, "format": 0.0, "tag_count": 0.0}',
            "many, m": "32, 5",
        },
    ),
]


@pytest.mark.parametrize(("number", "changes"), CHANGES)
def test_a_notebook_runs_with_other_values(number, changes, said):
    notebook = Notebook(number)
    code = "\n# cell\n".join(notebook.code().values())
    for name, value in changes.items():
        line = re.compile(rf"^{re.escape(name)} = [^\n]*$", re.MULTILINE)
        assert len(line.findall(code)) == 1, f"{name} is not set in one place"
        code = line.sub(lambda _, new=f"{name} = {value}": new, code)
    notebook.run(*code.split("\n# cell\n"))
    assert sum("To do" in text for text in said) == 2


# ---- exercises -----------------------------------------------------------------------------------

EXERCISES = [  # notebook, cell, wrong answers
    (0, "exercise-idle", ["return (1 - p) ** n", "return 1 - p**n - (1 - p) ** n"]),
    (
        *(0, "exercise-half"),
        ["return rewards.argsort(-1)[..., -m:].sort(-1).values", "return rewards.sort(-1).indices"],
    ),
    (
        *(1, "exercise-split"),
        [
            "return sorted(rewards)[-m:]",
            "x = sorted(rewards); return x[: m // 2] + x[m // 2 - m :]",
        ],
    ),
    (1, "exercise-ones", ["return m // 2", "return min(u, (m + 1) // 2)"]),
    (
        *(2, "exercise-advantages"),
        ["return [r - sum(rewards) / len(rewards) for r in rewards]", "return rewards"],
    ),
    (
        *(2, "exercise-accumulate"),
        ["return [sum(map(sum, b)) / sum(map(len, b)) / len(batches) for b in batches]"],
    ),
    (
        *(3, "exercise-speedup"),
        ["top = max(a for _, a in baseline); return 1.0", "return pods[0][0] / baseline[0][0]"],
    ),
    (
        *(3, "exercise-account"),
        ["return steps * (base_generate + base_rest) / (generate + rest)", "return steps"],
    ),
    (5, "exercise-a", ["return min(right, m // 2)", "return round(m * best_share(v1, v0))"]),
    (5, "exercise-b", ["return 1 / (4 * p * (1 - p))", "return 1.0"]),
]


@pytest.mark.parametrize(("number", "cell", "wrong"), EXERCISES)
def test_an_exercise_tells_empty_right_and_wrong_apart(number, cell, wrong, said):
    notebook = Notebook(number)
    notebook.imports()
    if number == 1:
        notebook.run(next(code for code in notebook.code().values() if "def spread" in code))
    code = notebook.code()[cell]
    head, stub, check = re.fullmatch(r"(def .*?\n)(    \.\.\.\n)(.*)", code, re.DOTALL).groups()
    notebook.run(head + stub + check)
    assert "To do" in said[-1]
    notebook.run(notebook.answer(cell) + check)
    assert "Right" in said[-1]
    for line in wrong:
        with pytest.raises(AssertionError):
            notebook.run(f"{head}    {line}\n{check}")


def test_every_notebook_with_exercises_has_two_in_code():
    asked = [number for number, *_ in EXERCISES]
    assert all(asked.count(number) == 2 for number in asked)
    for number in set(asked):
        cells = [cell for cell in Notebook(number).code() if cell.startswith("exercise-")]
        assert cells == [cell for at, cell, _ in EXERCISES if at == number]
