"""The notebooks are stored as a reader should find them, run, and survive a learner's hands.

Each is run once, in this process: that is faster than a kernel, and its names can be looked at.
What a learner changes is run again from there, and no further than it reaches.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small

import train
from pods import RULES
from support.models import load_model
from support.run import Run

pytest.importorskip("IPython")
import matplotlib.pyplot as plt

from notebooks import lessons

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


# ---- stored --------------------------------------------------------------------------------------


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_stored_small_and_executed_from_top_to_bottom(path):
    assert path.stat().st_size < 600_000
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert "display_data" in kinds and "error" not in kinds
    # Notebook 4 shows other trainers' classes and functions, each in one piece.
    longest = 35 if path.stem == "4_pods_elsewhere" else 20  # what can be read at once
    assert max(len(cell["source"]) for cell in cells) <= longest


def test_all_are_set_up_alike():
    first = {"".join(code_cells(one)[0]["source"]).partition("\nwarnings.")[0] for one in NOTEBOOKS}
    assert len(first) == 1


def test_outputs_name_no_folder_of_the_machine_that_made_them(path):
    for cell in code_cells(path):
        for output in cell["outputs"]:
            assert output.get("name") != "stderr", "".join(output["text"])
            text = json.dumps({k: v for k, v in output.get("data", {}).items() if "text" in k})
            text += "".join(output.get("text", []))
            assert not re.search("/(home|root|tmp|work|Users)/|site-packages", text)


# ---- run -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def _rules_are_left_as_they_were():
    """A notebook adds a rule of its own, in this process."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


class Notebook:
    """A notebook that has been run from top to bottom; `said` is what it shows as text."""

    def __init__(self, number: int, said: list[str]) -> None:
        (self.path,) = FOLDER.glob(f"{number}_*.ipynb")
        self.cells = json.loads(self.path.read_text())["cells"]
        code = {cell["id"]: cell for cell in code_cells(self.path)}
        self.code = {name: "".join(cell["source"]) for name, cell in code.items()}
        self.said, self.names = said, {"__name__": "__main__"}
        for source in self.code.values():
            self.run(source, self.names)

    def run(self, source: str, names: dict) -> None:
        exec(compile(source, self.path.name, "exec"), names)

    def changed(self, first: str, last: str, changes: dict[str, str]) -> str:
        """What is said if these texts of the cells from the first to the last are replaced."""
        cells = list(self.code)
        source = "\n".join(
            self.code[cell] for cell in cells[cells.index(first) : cells.index(last) + 1]
        )
        for old, new in changes.items():
            assert source.count(old) == 1, f"{old} is not there once"
            source = source.replace(old, new)
        self.said.clear()
        self.run(source, dict(self.names))
        return "\n".join(self.said)

    def answer(self, exercise: str) -> str:
        """The answer that is folded below an exercise."""
        below = next(i for i, cell in enumerate(self.cells) if cell["id"] == exercise) + 1
        text = "".join(self.cells[below]["source"])
        assert text.startswith("<details><summary>Answer</summary>")
        return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


@pytest.fixture(scope="module")
def notebook():
    """A function that gives the notebook with this number, run when it is first asked for."""
    ran: dict[int, Notebook] = {}
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(lessons, "SHORT", True)
        patch.setattr(lessons, "say", said.append)
        patch.setattr(plt, "show", lambda: plt.close("all"))

        def get(number: int) -> Notebook:
            if number not in ran:
                ran[number] = Notebook(number, said)
            return ran[number]

        yield get


@pytest.mark.parametrize(("n", "m", "rule"), [(16, 4, "max_variance"), (8, 8, "random")])
def test_the_loop_of_notebook_0_is_train_step(n, m, rule, notebook):
    names, learn = notebook(0).names, notebook(0).code["loop-learn"]
    policy, _ = load_model("tiny_policy")
    run = Run(small(n=n, m=m, rule=rule, prompts_per_step=names["P"], task="arithmetic"))
    optimizer = torch.optim.AdamW(policy.parameters(), 1.0, betas=(0.9, 0.95), weight_decay=0.0)
    assert "AdamW(policy.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)" in learn
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

GROUP = "rewards = [6, 4, 9, 0, 6, 7, 8, 2, 5, 7]"
CHANGES = [  # notebook, from which cell to which, what is replaced, what is said then
    (0, "cell-05", "cell-05", {'"32", "122"]': '"32", "122", "132"]'}, ""),
    (0, "cell-05", "cell-05", {'"132", "122", "32", "122"]': '"0", "0"]'}, ""),
    (1, "cell-05", "cell-20", {GROUP: "rewards = [0, 1] * 4", "m = 4": "m = 8"}, "m = 8 of n = 8"),
    (1, "cell-05", "cell-20", {GROUP: "rewards = [-i / 4 for i in range(12)]"}, "of n = 12"),
    (1, "cell-05", "cell-20", {GROUP: "rewards = list(range(16))", "m = 4": "m = 6"}, "8008 ways"),
    (1, "cell-22", "cell-22", {"wide, few = 1000, 12, 5": "wide, few = 100, 9, 4"}, "of n = 9"),
    (1, "cell-24", "cell-25", {"n01, m01 = 64, 16": "n01, m01 = 9, 9"}, "except for the odd one"),
    (1, "cell-27", "cell-27", {"2, 3, 20]": "2, 3, 4]"}, "half and half is here just as good"),
    (1, "cell-29", "cell-29", {"[1.0] * 6 + [0.0] * 10": "[1.0] * 3 + [0.0] * 13"}, ""),
    (2, "cell-04", "cell-08", {'"38+54=", ': '"123+45=", ', "n = 16": "n = 4"}, "B = 12"),
    (2, "cell-04", "cell-07", {'"format": 0.1, "tag_count": 0.1': ""}, "B = 48"),
    (2, "cell-22", "cell-23", {"many, m = 64, 16": "many, m = 24, 6"}, "n = 24 rollouts, m = 6"),
    (3, "cell-08", "cell-08", {'"grpo-ga", "pods"': '"pods", "grpo"'}, "of GRPO over PODS"),
    (3, "cell-28", "cell-29", {'["grpo-ga", "pods"]': '["grpo", "32x8"]'}, "step of GRPO takes"),
    (4, "cell-17", "cell-18", {"n, m, T = 3, 8, 4, 5": "n, m, T = 1, 2, 2, 5"}, "2 of 2 rows"),
    (5, "cell-07", "cell-10b", {'"19+91="': '"47+85="'}, "47+85="),
    (5, "cell-08", "cell-08b", {"m, rows = 16": "m, rows = 4"}, "k of 4"),
    (5, "cell-12", "cell-12", {"p=0.1, gap=1.0": "p=0.02, gap=3.0"}, "max_reward"),
    (5, "cell-28", "cell-29", {"P = [0.002, ": "P = [*(i / 64 for i in range(1, 17)), "}, "n/m"),
]


@pytest.mark.parametrize(("number", "first", "last", "changes", "words"), CHANGES)
def test_it_survives_a_learners_hands(number, first, last, changes, words, notebook):
    assert words in notebook(number).changed(first, last, changes)


def test_more_subsets_than_can_be_tried_are_refused(notebook):
    changes = {GROUP: "rewards = [*range(40)]", "m = 4": "m = 20"}
    with pytest.raises(ValueError, match=r"n = 40, m = 20: need .* at most 200,000 subsets"):
        notebook(1).changed("cell-05", "cell-05", changes)


# ---- exercises -----------------------------------------------------------------------------------

EXERCISES = {  # notebook and cell: wrong answers
    (0, "exercise-idle"): ["return (1 - p) ** n", "return 1 - p**n - (1 - p) ** n"],
    (0, "exercise-half"): [
        "return rewards.argsort(-1)[..., -m:].sort(-1).values",
        "return rewards.sort(-1).indices",
    ],
    (1, "exercise-split"): [
        "return sorted(rewards)[-m:]",
        "x = sorted(rewards); return x[: m // 2] + x[m // 2 - m :]",
    ],
    (1, "exercise-ones"): ["return m // 2", "return min(u, (m + 1) // 2)"],
    (2, "exercise-advantages"): [
        "return [r - sum(rewards) / len(rewards) for r in rewards]",
        "return rewards",
    ],
    (2, "exercise-accumulate"): [
        "return [sum(map(sum, b)) / sum(map(len, b)) / len(batches) for b in batches]"
    ],
    (3, "exercise-speedup"): [
        "top = max(a for _, a in baseline); return 1.0",
        "return pods[0][0] / baseline[0][0]",
    ],
    (3, "exercise-account"): [
        "return steps * (base_generate + base_rest) / (generate + rest)",
        "return steps",
    ],
    (5, "exercise-a"): ["return min(right, m // 2)", "return round(m * best_share(v1, v0))"],
    (5, "exercise-b"): ["return 1 / (4 * p * (1 - p))", "return 1.0"],
}


@pytest.mark.parametrize(("number", "cell"), EXERCISES)
def test_an_exercise_tells_empty_right_and_wrong_apart(number, cell, notebook):
    one = notebook(number)
    parts = re.fullmatch(r"(def .*?\n)(    \.\.\.\n)(.*)", one.code[cell], re.DOTALL)
    head, stub, check = parts.groups()
    names = dict(one.names)
    one.run(head + stub + check, names)
    assert "To do" in one.said[-1]
    one.run(one.answer(cell) + check, names)
    assert "Right" in one.said[-1]
    for line in EXERCISES[number, cell]:
        with pytest.raises(AssertionError):
            one.run(f"{head}    {line}\n{check}", names)


def test_every_exercise_in_code_is_tried():
    found = [
        (int(path.name[0]), cell["id"])
        for path in NOTEBOOKS
        for cell in code_cells(path)
        if cell["id"].startswith("exercise-")
    ]
    assert found == list(EXERCISES)
