"""The house: who may import whom, no circles, and no room that is too large to be read."""

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FIRST_CIRCLE = ("pods", "grpo", "logprobs", "train", "rewards", "rollouts", "bench")
SUPPORT = tuple(f"support.{path.stem}" for path in (ROOT / "support").glob("[!_]*.py"))
GRADING = tuple(f"grading.{path.stem}" for path in (ROOT / "grading").glob("[!_]*.py"))
BENCHES = tuple(f"benches.{path.stem}" for path in (ROOT / "benches").glob("[!_]*.py"))
MODULES = FIRST_CIRCLE + GRADING + SUPPORT + BENCHES
# Files to copy, with pods.py and nothing else of this house.
INTEGRATIONS = tuple(f"integrations.{path.stem}" for path in (ROOT / "integrations").glob("*.py"))
MOST_LINES = 350


def path_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def imported(module: str) -> set[str]:
    """Everything that a module imports, also inside functions, by its full name."""
    names = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            # `from support import tasks` imports a module, `from support.tasks import Problem` too.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & set(MODULES) or {node.module}
    return names


GRAPH = {module: imported(module) & set(MODULES) for module in MODULES}


def test_the_first_circle_is_all_there_is_at_the_top():
    assert {path.stem for path in ROOT.glob("*.py")} == set(FIRST_CIRCLE)
    assert SUPPORT


@pytest.mark.parametrize("module", ["pods", "grpo"])
def test_the_algorithm_knows_torch_alone(module):
    packages = {name.partition(".")[0] for name in imported(module)}
    assert packages <= {"torch"} | sys.stdlib_module_names


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_a_file_to_copy_knows_pods_and_its_trainer_alone(module):
    packages = {name.partition(".")[0] for name in imported(module)}
    trainer = module.partition(".")[2].partition("_")[0]  # integrations/trl_pods.py is for trl
    assert {"pods", trainer} <= packages
    assert packages <= {"pods", "torch", trainer} | sys.stdlib_module_names


def test_no_import_runs_upwards():
    assert not [module for module in MODULES if imported(module) & {*INTEGRATIONS, "integrations"}]
    core = ("pods", "grpo", "logprobs", "rewards", "rollouts")
    for modules, may_know in (
        (GRADING, GRADING),
        (core, core + GRADING),
        ((*SUPPORT, "train"), core + GRADING + SUPPORT),
        (BENCHES, set(MODULES) - {"bench"}),
    ):
        for module in modules:
            assert GRAPH[module] <= set(may_know), module


def test_there_is_no_circle():
    left = dict(GRAPH)
    while left:
        free = [module for module, needs in left.items() if not needs & left.keys()]
        assert free, f"a circle among {sorted(left)}"
        left = {module: needs for module, needs in left.items() if module not in free}


@pytest.mark.parametrize("module", MODULES + INTEGRATIONS)
def test_no_room_is_too_large_to_be_read(module):
    lines = path_of(module).read_text().count("\n")
    assert lines <= MOST_LINES


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_imports_names_that_exist(path):
    """Notebooks themselves are run only where IPython is installed."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    nodes = [node for c in cells for node in ast.walk(ast.parse("".join(c["source"])))]
    ours = [node for node in nodes if getattr(node, "module", None) in MODULES]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module)
        assert not [name.name for name in node.names if not hasattr(module, name.name)]


def test_the_map_of_support_names_its_rooms():
    listed = ast.get_docstring(ast.parse((ROOT / "support/__init__.py").read_text()))
    rooms = {module.partition(".")[2] for module in SUPPORT}
    assert {word for line in listed.split("\n")[2:-2] for word in line[16:].split()} == rooms
