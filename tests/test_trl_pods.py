"""The file for TRL, alone in a folder with pods.py, does what grpo.py does on the rollouts kept."""

import importlib.util
import os
import re
import shutil
import sys

import pytest
import torch
from conftest import ROOT, run_command

from grpo import group_advantages, grpo_loss
from logprobs import token_log_probs
from pods import max_variance
from rollouts import Rollouts, eos_token_ids, pack
from support.models import load_model
from support.tiny import TINY_POLICY

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="needs trl==1.16.0")
P, N, M, T = 3, 12, 4, 20


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What tests/trl_alone.py saw. One process: importing TRL takes longer than all else."""
    folder = tmp_path_factory.mktemp("alone")
    for path in (ROOT / "pods.py", ROOT / "integrations/trl_pods.py", ROOT / "tests/trl_alone.py"):
        shutil.copy(path, folder)
    readme = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n([^`]*PodsTrainer[^`]*)```", readme)[1]
    example = example.replace("max_steps=40", "max_steps=5")
    example = example.replace("support/tiny_policy", str(TINY_POLICY))
    (folder / "example.py").write_text(example)
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "trl_alone.py", TINY_POLICY, "found.pt"]
    done = run_command(command, cwd=folder, env=alone)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=True)


def kept_of(shown: dict, model, tokenizer) -> tuple[Rollouts, torch.Tensor]:
    """The rollouts that PODS keeps of what a reward function was shown, and their advantages."""
    prompts = tokenizer(shown["prompts"][::N])["input_ids"]
    none = [[0.0] * len(row) for row in shown["ids"]]  # log-probs that nobody looks at
    rollouts = pack(prompts, shown["ids"], none, eos_token_ids(model, tokenizer), tokenizer)
    rewards = torch.tensor(shown["rewards"], dtype=torch.float64).view(P, N)
    keep = max_variance(rewards, M)
    return rollouts.select(keep), group_advantages(rewards.gather(-1, keep)).flatten()


def expected_gradient(found: dict, step: int, **options) -> torch.Tensor:
    """grpo.py's gradient at a step's weights; the old policy and the reference are the first's."""
    (model, tokenizer), log_probs = load_model("tiny_policy"), []
    kept, advantages = kept_of(found["shown"][0], model, tokenizer)
    mask = kept.mask.flatten(0, 1)
    for weights in (found["weights"][0], found["weights"][step]):
        model.load_state_dict(weights)
        log_probs.append(token_log_probs(model, *kept.sequences(), mask.shape[1], 0.9))
    first, current = log_probs[0].detach(), log_probs[1]
    options |= {"ref_log_probs": first} if "beta" in options else {}
    loss = grpo_loss(current, first, advantages, mask, max_completion_length=T, **options)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def assert_close(gradient: torch.Tensor, expected: torch.Tensor) -> None:
    assert ((gradient - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_the_update_is_on_m_rows_a_prompt_with_our_gradient(found, loss_type):
    seen = found[loss_type]
    assert [len(rows) for rows in seen["passes"]] == [P * M // 2] * 2  # m rows a prompt, not n
    assert_close(seen["gradients"][0], expected_gradient(seen, 0, loss_type=loss_type))
    (shown,) = seen["shown"]  # all n were scored, once
    rewards = torch.tensor(shown["rewards"])
    assert seen["log"][0]["reward_of_all"] == pytest.approx(rewards.mean().item(), abs=1e-4)


def test_a_prompt_that_occurs_twice_keeps_its_two_answers_apart(found):
    (shown,) = found["grpo"]["shown"]
    pairs = list(zip(shown["prompts"], shown["answers"]))
    expected = {("11+22=", "33"), ("11+22=", "44"), ("5+6=", "11")}
    assert {(*pairs[i : i + N],) for i in range(0, P * N, N)} == {(pair,) * N for pair in expected}


def test_two_epochs_with_kl_are_two_of_our_steps_on_the_same_rollouts(found):
    seen = found["epochs"]
    assert len(seen["shown"]) == 1 and len(seen["gradients"]) == 2
    for step in (0, 1):
        expected = expected_gradient(seen, step, loss_type="grpo", beta=0.5, clip=0.2)
        assert_close(seen["gradients"][step], expected)
    # The second epoch is another one without the KL, and without the ratio.
    without = expected_gradient(seen, 1, loss_type="grpo")
    assert ((seen["gradients"][1] - without).norm() / without.norm()).item() > 0.01


def test_an_evaluation_scores_and_keeps_every_rollout_of_problems_never_seen(found):
    seen = found["evaluated"]
    trained, *evaluated = seen["shown"]
    assert len(trained["rewards"]) == P * N
    assert len(evaluated) == 2
    for shown in evaluated:
        assert sorted(shown["answers"]) == ["81"] * 3 + ["82"] * 3  # num_generations_eval
    mean = sum(evaluated[-1]["rewards"]) / 6
    assert seen["metrics"]["eval_reward"] == pytest.approx(mean, abs=1e-5)
    assert [len(rows) for rows in seen["passes"]] == [P * M, 6, 6]


@pytest.mark.parametrize("kind", ["texts", "messages", "thoughts", "thoughts the prompt opens"])
def test_reward_functions_are_shown_what_grpo_trainer_shows_them(found, kind):
    theirs, ours = found["both"][kind]
    assert ours == theirs and len(ours) == P * M
    if "thoughts" in kind:
        assert any("reasoning_content" in completion[0] for completion in ours)


def test_a_mean_of_nothing_is_left_out(found):
    assert "reward_of_all" not in found["unscored"][0]


def test_the_example_of_the_readme_runs_on_a_cpu_as_written(found):
    assert 0.1 < found["example"][0]["reward_of_all"] < 0.6


def test_several_reward_functions_are_weighted_and_may_not_apply(found):
    seen = found["several"]
    first, second = torch.tensor(seen["rewards"], dtype=torch.float64).view(2, P, N)
    total = 10 * first.nan_to_num() + 0.5 * second.nan_to_num()
    unscored = first.isnan() & second.isnan()
    assert unscored.sum(-1).tolist() == [0, 0, N // 2]
    mean = total[2][~unscored[2]].mean()
    kept = max_variance(total.masked_fill(unscored, mean), M)
    assert not unscored.gather(-1, kept).any()
    assert seen["kept"] == (kept + N * torch.arange(P)[:, None]).flatten().tolist()
    log, mean = seen["log"][0], total[~unscored].mean().item()
    assert log["reward_of_all"] == pytest.approx(mean, rel=1e-5) and log["asked"] == P * N
    assert seen["extra"]["number"] == seen["kept"]
    assert "rewards/length/mean" in log  # as TRL calls a partial: by what is in it


def test_what_cannot_work_is_said(found):
    words = {
        "part": "whole groups: make per_device_train_batch_size * steps_per_generation a multiple",
        "part in evaluation": "a multiple of 4, per_device_eval_batch_size of 4",
        "part of other data": "whole groups: make its batch a multiple of m=4",
        "n": "rollouts_per_prompt=3 is smaller than m=4",
        "async": "no plain function",
        "model": "no plain function",
        "short": "short returned 1 rewards for 36 completions",
        "processor": "pass the tokenizer",
        "tools": "leave out tools",
    }
    assert found["refused"].keys() == words.keys()
    for name, message in found["refused"].items():
        assert words[name] in message
