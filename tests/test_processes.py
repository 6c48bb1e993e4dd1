"""One row of several, and that one process needs none of it."""

import importlib.util
import math

import pytest
from conftest import assert_equal, random_model, small
from torch import distributed

import train
from support.processes import Largest, Processes, combined


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4, 4], 8),
        ([False, True], 1),
        ([True], 1),
        ([1.0, 0.5], 0.75),
        ([{"mean": 1e-6, "max": Largest(3e-6)}, {"mean": 3e-6, "max": Largest(2e-6)}],
         {"mean": 2e-6, "max": 3e-6}),
        ([[0.5, 1.0], [0.25, 0.0]], [0.5, 1.0, 0.25, 0.0]),
        # What a process does not have does not count.
        ([{"max": Largest(2.0)}, {"max": None}], {"max": 2.0}),
        ([None, 1e-6], 1e-6),
        ([None, None], None),
    ],
)  # fmt: skip
def test_numbers_of_several_processes_are_one(values, expected):
    found = combined([{"it": value} for value in values])["it"]
    assert found == expected
    assert type(found) is not bool  # 0 or 1 in metrics.jsonl, not true


def test_what_is_not_finite_in_one_process_is_not_in_all():
    assert math.isnan(combined([{"grad_norm": 1.0}, {"grad_norm": math.nan}])["grad_norm"])


def test_one_process_needs_nobody():
    alone = Processes()
    assert (alone.rank, alone.count, alone.first) == (0, 1, True)
    assert alone.gather({"reward": 1.0}) == [{"reward": 1.0}]
    assert alone.on_first(lambda: "done") == alone.on_first(lambda: "done", send=False) == "done"
    with pytest.raises(ZeroDivisionError):
        alone.on_first(lambda: 1 / 0)
    model = random_model("qwen2")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    alone.equalise(model)
    alone.average_gradients(model.parameters())
    assert all(weight.grad is None for weight in model.parameters())
    assert_equal(model.state_dict(), weights)


def test_a_clusters_rank_alone_starts_no_group(monkeypatch):
    """Schedulers set RANK or WORLD_SIZE for programs that know nothing of each other."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    spec = importlib.util.find_spec("support.errors")
    anew = importlib.util.module_from_spec(spec)  # a copy: the variables are read at import
    spec.loader.exec_module(anew)
    alone = Processes()
    assert (anew.LAUNCHED, anew.RANK, alone.rank, alone.count) == (False, 0, 0, 1)


def test_the_end_of_a_run_leaves_a_process_group_that_it_did_not_make(tmp_path):
    """vLLM makes one even for a single process, and its engine lives on."""
    ours = not distributed.is_initialized()  # unless an engine's test has left one
    if ours:
        store = f"file://{tmp_path / 'store'}"
        distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        train.train(small(steps=1, eval_every=0), tmp_path / "run")
        Processes().leave()
        assert distributed.is_initialized()
    finally:
        if ours:
            distributed.destroy_process_group()
