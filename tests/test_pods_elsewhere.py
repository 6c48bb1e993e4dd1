"""The code of notebook 4, taken from its tagged cells: PODS inside verl, and in NumPy."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo import group_advantages, grpo_loss
from pods import max_variance

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "4_pods_elsewhere.ipynb"


def cells(tag: str) -> SimpleNamespace:
    """What the notebook's cells with this tag define."""
    names = dict(np=np, torch=torch, max_variance=max_variance, group_advantages=group_advantages)
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if tag in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), f"notebook 4, {cell['id']}", "exec"), names)
    return SimpleNamespace(**names)


def test_verl_advantages_give_the_gradient_of_the_kept_rows():
    P, n, m, T = 3, 8, 3, 4
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(P, n, generator=generator, dtype=torch.float64)
    length = torch.randint(1, T + 1, (P * n, 1), generator=generator)
    mask = (torch.arange(T) < length).double()  # [P*n, T]
    token_rewards = torch.zeros(P * n, T, dtype=torch.float64)
    token_rewards[torch.arange(P * n), length[:, 0] - 1] = reward.flatten()
    order = torch.randperm(P * n, generator=generator)
    index = np.repeat(["a", "b", "c"], n)

    advantages = torch.zeros(P * n, T, dtype=torch.float64)
    advantages[order], _ = cells("verl").pods_advantage(
        token_level_rewards=token_rewards[order], response_mask=mask[order],
        index=index[order.numpy()], config={"pods_m": m},
    )  # fmt: skip
    log_probs = torch.randn(P * n, T, generator=generator, dtype=torch.float64, requires_grad=True)
    ratio = (log_probs - log_probs.detach()).exp()
    loss = -(ratio * advantages * mask).sum() / mask.sum()  # verl's "token-mean"
    (theirs,) = torch.autograd.grad(loss, log_probs)

    keep = max_variance(reward, m)
    rows = (keep + n * torch.arange(P)[:, None]).flatten()
    kept_advantages = group_advantages(reward.gather(-1, keep)).flatten()
    kept = log_probs[rows]
    loss = grpo_loss(kept, kept.detach(), kept_advantages, mask[rows], loss_type="dapo")
    (ours,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(theirs, ours)


@pytest.mark.filterwarnings("ignore")
def test_verl_replay_buffer_lets_m_rows_a_prompt_out():
    pytest.importorskip("verl", reason="needs verl==0.9.1")
    rewards = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    keys, left = cells("verl").sample_from(rewards, 4)
    rows = max_variance(rewards, 4).tolist()
    expected = [f"prompt{p}_{i}_0" for p, row in enumerate(rows) for i in row]
    assert keys == expected and set(left) == set(expected)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (5, 3), (16, 4), (64, 16)])
def test_numpy_version_agrees(n, m):
    in_numpy = cells("numpy").max_variance_numpy
    generator = torch.Generator().manual_seed(n)
    distinct = torch.randn(200, n, generator=generator, dtype=torch.float64)
    assert np.array_equal(in_numpy(distinct.numpy(), m), max_variance(distinct, m).numpy())
    assert np.array_equal(in_numpy(1e6 + distinct.numpy(), m), max_variance(1e6 + distinct, m))
    tied = torch.randint(0, 3, (200, n), generator=generator).double()
    for rewards in (tied, 0.1 * tied):
        rows = np.take_along_axis(rewards.numpy(), in_numpy(rewards.numpy(), m), -1)
        expected = rewards.gather(-1, max_variance(rewards, m)).sort(-1).values
        assert np.array_equal(np.sort(rows, -1), expected.numpy())


@pytest.mark.parametrize(("rewards", "m"), [([[0, 1]], 3), ([[0, 1]], 1), ([[0, np.nan]], 2)])
def test_numpy_version_refuses_what_makes_no_sense(rewards, m):
    with pytest.raises(ValueError, match="finite rewards"):
        cells("numpy").max_variance_numpy(rewards, m)
