"""The other ways to select are right, or comparing times with them would say nothing."""

import argparse
import itertools

import pytest
import torch

import bench
from benches.selection import authors_way, brute_force, each_group, group_size, select
from pods import max_variance


@pytest.mark.parametrize("kind", ["normal", "0/1", "few values", "outlier"])
def test_the_authors_way_and_brute_force_find_the_same_variance(kind):
    generator = torch.Generator().manual_seed(0)
    for n, m in itertools.product((2, 5, 9), (2, 3, 5)):
        if m > n:
            continue
        rewards = torch.randn(n, dtype=torch.float64, generator=generator)
        if kind == "0/1":
            rewards = (rewards > 0).double()
        elif kind == "few values":
            rewards = rewards.round()
        elif kind == "outlier":
            rewards[0] = 100.0
        variances = {
            function.__name__: rewards[function(rewards, m)].var(correction=0).item()
            for function in (max_variance, authors_way, brute_force)
        }
        assert max(variances.values()) == pytest.approx(min(variances.values()), abs=1e-12)


def test_each_group_is_chosen_from_by_itself():
    groups = torch.tensor([[0.0, 1.0, 5.0], [5.0, 1.0, 0.0]])
    assert each_group(authors_way, groups, 2).tolist() == [[0, 2], [0, 2]]
    assert each_group(brute_force, groups + 1, 2).tolist() == [[0, 2], [0, 2]]


def test_sizes_are_groups_and_rollouts():
    assert group_size("512x1024") == (512, 1024)
    with pytest.raises(ValueError):
        group_size("512")


def test_what_would_take_too_long_is_left_out(tmp_path, capsys):
    arguments = argparse.Namespace(sizes=[(2, 16)], rounds=1, patience=1e-9, out=tmp_path)
    (row,) = select(arguments)["rows"]
    assert row["authors ms"] is row["brute / max_variance"] is None and row["max_variance ms"] > 0
    arguments.patience = 60.0
    (row,) = select(arguments)["rows"]
    assert row["authors ms"] > 0 and len(row["brute / max_variance"]) == 3


@pytest.mark.parametrize("size", ["1x16", "4x16"])
def test_sizes_of_one_kind_are_drawn_too(size, tmp_path):
    flags = ["--rounds", "1", "--patience", "0.1", "--out", str(tmp_path), "--sizes", size]
    assert bench.main(["select", *flags]) == 0
    assert (tmp_path / "select.json").exists() and (tmp_path / "select.png").exists()
