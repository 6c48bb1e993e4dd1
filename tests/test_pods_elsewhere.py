"""The code of notebook 4, taken from its tagged cells: PODS inside TRL and verl, and in NumPy."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import train
from grpo import group_advantages, grpo_loss, token_log_probs
from pods import down_sample, max_variance
from rewards import score
from rollouts import eos_token_ids, pack
from support import tasks
from support.models import load_model

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "4_pods_elsewhere.ipynb"
needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs trl==1.16.0")


def cells(tag: str) -> SimpleNamespace:
    """What the notebook's cells with this tag define."""
    names = {"np": np, "torch": torch, "transformers": transformers, "tasks": tasks, "train": train}
    functions = (group_advantages, grpo_loss, token_log_probs, down_sample, max_variance)
    functions += (score, eos_token_ids, pack, load_model)
    names |= {function.__name__: function for function in functions}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if tag in cell["metadata"].get("tags", []):
            exec(compile("".join(cell["source"]), f"notebook 4, {cell['id']}", "exec"), names)
    return SimpleNamespace(**names)


# ---- TRL -----------------------------------------------------------------------------------------


@needs_trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_trl_updates_on_m_rows_a_prompt_with_our_gradient(tmp_path, loss_type):
    notebook, P, n, m = cells("trl"), 2, 12, 4
    settings = {"loss_type": loss_type, "temperature": 0.9, "max_grad_norm": 0.0, "seed": 3}
    settings |= {"per_device_train_batch_size": P * m // 2, "gradient_accumulation_steps": 2}
    trainer = notebook.watched_trainer(str(tmp_path), n, m, steps=2, learning_rate=1e-3, **settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()

    seen = trainer.seen
    assert seen["rows"] == [P * m // 2] * 4  # two steps of two passes: m rows a prompt, not n
    assert [len(shown["rewards"]) for shown in seen["shown"]] == [P * n] * 2
    for shown in seen["shown"]:  # the reward function saw each prompt n times, with its own answer
        assert [len(set(shown["prompt"][p * n : (p + 1) * n])) for p in range(P)] == [1] * P
    ours = notebook.our_gradient(seen["shown"][0], n, m, 0.9, loss_type)
    assert torch.cosine_similarity(seen["gradient"], ours, dim=0) > 0.99999
    assert ((seen["gradient"] - ours).norm() / ours.norm()).item() < 1e-4
    after = trainer.model.parameters()
    assert any(not torch.equal(a, b.cpu()) for a, b in zip(before, after, strict=True))


def stub(notebook, training: bool, **options) -> SimpleNamespace:
    """As much of a trainer as the rollout function looks at; a completion is its own number."""
    _, tokenizer = load_model("tiny_policy")
    notebook.generate_and_keep.__globals__["complete"] = lambda trainer, ids, n: [
        [i % 10] for i in range(len(ids) * n)
    ]
    return SimpleNamespace(
        model=SimpleNamespace(training=training), processing_class=tokenizer, num_generations=2,
        num_generations_eval=3, n=5, rule="max_variance",
        score_all=lambda completion_ids, **_: [float(row[0]) for row in completion_ids], **options,
    )  # fmt: skip


def test_trl_rollout_function_keeps_the_right_rows_of_texts_and_messages():
    notebook = cells("trl")
    texts = ["11+22=", "33+44="]
    messages = [[{"role": "user", "content": text}] for text in texts]
    for prompts in (texts, messages):
        columns = {str(prompt): {"prompt": prompt} for prompt in prompts}
        trainer = stub(notebook, training=True, columns=columns)
        result = notebook.generate_and_keep([p for p in prompts for _ in range(2)], trainer)
        assert result["reward"] == [0, 4, 5, 9]  # lowest and highest of 0..4 and of 5..9
        assert result["completion_ids"] == [[0], [4], [5], [9]]
        assert result["reward_of_all"] == [2, 2, 7, 7]
        ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        assert result["prompt_ids"] == [ids[0], ids[0], ids[1], ids[1]]


def test_trl_rollout_function_keeps_everything_in_an_evaluation():
    notebook = cells("trl")
    trainer = stub(notebook, training=False, columns={"11+22=": {"prompt": "11+22="}})
    assert notebook.generate_and_keep(["11+22="] * 3, trainer)["reward"] == [0, 1, 2]


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"], ["a", "a", "b"], ["a", "b", "b", "a"]])
def test_trl_rollout_function_refuses_parts_of_groups(prompts):
    notebook = cells("trl")
    with pytest.raises(ValueError, match="whole groups"):
        notebook.generate_and_keep(prompts, stub(notebook, training=True))


# ---- verl ----------------------------------------------------------------------------------------


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


# ---- NumPy ---------------------------------------------------------------------------------------


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
