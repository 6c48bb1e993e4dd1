"""One row of several, and that one process needs none of it."""

import importlib.util
import math

import pytest
import torch
from conftest import assert_equal, random_model, small
from torch import distributed

import train
from logprobs import Policy, whole
from support.errors import InputError
from support.processes import Largest, Processes, combined

# ---- one row of several --------------------------------------------------------------------------


def test_rows_of_several_processes_are_one_row():
    """Counts add up, flags are 1 if any is, the largest counts, lists join, floats are averaged."""
    rows = [
        {"groups": 4, "groups_without_signal": 1, "skipped": False}
        | {"reward": 1.0, "logprob_gap": {"mean": 1e-6, "max": Largest(3e-6)}}
        | {"pass_rates": [0.5, 1.0]},
        {"groups": 4, "groups_without_signal": 3, "skipped": True}
        | {"reward": 0.5, "logprob_gap": {"mean": 3e-6, "max": Largest(2e-6)}}
        | {"pass_rates": [0.25, 0.0]},
    ]
    assert combined([row | {"seconds": {"update": i}} for i, row in zip((2.0, 4.0), rows)]) == {
        **{"groups": 8, "groups_without_signal": 4, "skipped": 1},
        **{"reward": 0.75, "logprob_gap": {"mean": 2e-6, "max": 3e-6}, "seconds": {"update": 3.0}},
        "pass_rates": [0.5, 1.0, 0.25, 0.0],
    }


def test_what_a_process_does_not_have_does_not_count():
    some, nothing = {"mean": 1e-6, "max": Largest(3e-6)}, {"mean": None, "max": None}
    assert combined([some, nothing]) == combined([nothing, some]) == some
    assert combined([nothing, nothing]) == nothing
    assert math.isnan(combined([{"grad_norm": 1.0}, {"grad_norm": math.nan}])["grad_norm"])


def test_the_row_of_one_process_is_its_own():
    row = {"groups": 4, "skipped": True, "reward": 0.5, "gap": {"max": Largest(2.0), "mean": None}}
    assert combined([row]) == row | {"skipped": 1}
    assert type(combined([row])["skipped"]) is int  # 0 or 1 in metrics.jsonl, not true


# ---- one process ---------------------------------------------------------------------------------


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
    tensor = torch.ones(2)
    assert whole(tensor) is tensor
    alone.leave()


def test_one_process_cannot_shard():
    with pytest.raises(InputError, match=r"--shard needs several processes: .* torchrun"):
        Processes().shard(Policy(random_model("qwen2")))


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
