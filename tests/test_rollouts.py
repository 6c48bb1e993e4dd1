"""The sampler against the loss, brute force and exact sums."""

import bisect
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Words, random_model
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from logprobs import token_log_probs
from rollouts import Rollouts, TorchSampler, _one_token_attention, draw, eos_token_ids, pack

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]
ONE_LENGTH = [[3, 1, 4], [6, 5, 3]]


def generate(model, prompts=PROMPTS, n=4, max_new_tokens=10, temperature=1.0, seed=0) -> Rollouts:
    return TorchSampler(model, Words()).generate(prompts, n, max_new_tokens, temperature, seed)


def same(a: Rollouts, b: Rollouts) -> bool:
    return torch.equal(a.completion_ids, b.completion_ids) and torch.equal(a.log_probs, b.log_probs)


# ---- which distribution --------------------------------------------------------------------------


def assert_scored_alike(model, rollouts: Rollouts, temperature: float = 1.0) -> None:
    """The sampler's log-probs are those that the loss computes."""
    ids, attention = rollouts.sequences()
    scored = token_log_probs(model, ids, attention, rollouts.mask.shape[-1], temperature)
    difference = scored - rollouts.log_probs.flatten(0, 1)
    assert difference[rollouts.mask.flatten(0, 1)].abs().max() < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("prompts", [PROMPTS, ONE_LENGTH])
def test_its_log_probs_are_those_of_the_loss(model, prompts, temperature):
    """Padded and unpadded batches, rows that leave early, rotary and learned positions."""
    model.generation_config.eos_token_id = [0, 5]  # so that some finish early
    rollouts = generate(model, prompts, n=8, temperature=temperature)
    assert rollouts.finished.any()
    assert_scored_alike(model, rollouts, temperature)


@pytest.mark.parametrize("prompts", [PROMPTS, ONE_LENGTH])
def test_a_sliding_window_may_be_shorter_than_the_prompt(prompts):
    """The cache holds all keys; it is the mask that hides those outside the window."""
    model = random_model("qwen2", use_sliding_window=True, max_window_layers=0, sliding_window=3)
    assert set(model.config.layer_types) == {"sliding_attention"}
    assert_scored_alike(model, generate(model, prompts, n=8))


@pytest.mark.parametrize("masked", ["no", "alike for all heads", "for each head"])
@pytest.mark.parametrize("keys", [1, 2, 6])
@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_that_share_keys_attend_as_with_copies_of_them(tokens, keys, masked):
    torch.manual_seed(0)
    query, key, value = (torch.randn(4, heads, 5, 8) for heads in (6, keys, keys))
    query = query[:, :, :tokens]
    heads = {"no": None, "alike for all heads": 1, "for each head": 6}[masked]
    mask = None if heads is None else torch.rand(4, heads, tokens, 5) < 0.7
    if masked != "no":
        mask[..., 0] = True  # something is seen by every token
    copies = (states.repeat_interleave(6 // keys, dim=1) for states in (key, value))
    causal = masked == "no" and tokens > 1
    expected = scaled_dot_product_attention(query, *copies, mask, scale=0.3, is_causal=causal)
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // keys
    found, _ = _one_token_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def chi_square(counts: Counter, distribution: dict, draws: int) -> float:
    """How many standard deviations the statistic is above its mean; rare outcomes are one cell."""
    cells, rare = [], [0, 0.0]
    for outcome, probability in distribution.items():
        if probability * draws >= 5:
            cells.append((counts[outcome], probability * draws))
        else:
            rare = [rare[0] + counts[outcome], rare[1] + probability * draws]
    cells.append((rare[0], max(rare[1], 1.0)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def exact_distribution(model, prompt, length, temperature):
    """The probability of every completion of at most `length` tokens, by asking the model."""
    distribution, open_prefixes = {}, {(): 1.0}
    for t in range(length):
        going = {}
        for prefix, probability in open_prefixes.items():
            logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double()
            for token, p in enumerate((logits / temperature).softmax(-1).tolist()):
                ends = token == 0 or t + 1 == length
                (distribution if ends else going)[(*prefix, token)] = probability * p
        open_prefixes = going
    return distribution


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@torch.no_grad()
def test_completions_have_the_distribution_of_the_policy(model, temperature):
    """All completions of up to 3 tokens of 5 words, two prompts of different lengths."""
    model.resize_token_embeddings(5)
    prompts, draws = [[3, 1, 4, 2], [2, 1]], 4000
    rollouts = generate(model, prompts, draws, max_new_tokens=3, temperature=temperature)
    for p, prompt in enumerate(prompts):
        lengths = rollouts.mask[p].sum(-1).tolist()
        rows = zip(rollouts.completion_ids[p].tolist(), lengths)
        counts = Counter(tuple(row[:length]) for row, length in rows)
        distribution = exact_distribution(model, prompt, 3, temperature)
        assert set(counts) <= set(distribution)
        assert chi_square(counts, distribution, draws) < 4
        # The same rollouts are not what a policy a little warmer would have done.
        warmer = exact_distribution(model, prompt, 3, temperature * 1.3)
        assert chi_square(counts, warmer, draws) > 8


def test_nothing_leaks_from_the_generation_config(model):
    plain = generate(model, temperature=0.9)
    options = dict(do_sample=True, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9)
    options |= dict(repetition_penalty=5.0, no_repeat_ngram_size=1, max_new_tokens=2)
    options |= dict(suppress_tokens=[1, 2, 3], num_return_sequences=3, use_cache=False)
    model.generation_config = GenerationConfig(**options, eos_token_id=0)
    assert same(generate(model, temperature=0.9), plain)


# ---- one draw, and its seed ----------------------------------------------------------------------


def zipf(V: int, zeros: tuple[int, ...], seed: int) -> torch.Tensor:
    """Probabilities from a third to far below 2**-24, in no order, float32 [V]."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    weights = 1 / torch.arange(1, V + 1, dtype=torch.float64)[order] ** 2.5
    weights[list(zeros)] = 0
    return (weights / weights.sum()).float()


def test_the_token_is_the_first_whose_sum_exceeds_u(monkeypatch):
    """Against sums in whole numbers, just below and just above every token's own, in two rows."""
    zeros = [(), (0, 1, 700, 1998, 1999)]
    rows = torch.stack([zipf(2000, none, seed) for seed, none in enumerate(zeros)])
    asked, expected = [], []  # (u, row) and the token
    for row, probabilities in enumerate(rows.double().tolist()):
        units = [round(p * 2.0**52) for p in probabilities]
        sums = list(itertools.accumulate(units))
        edges = [(edge + side) / sums[-1] for edge in sums for side in (-0.5, 0.5)]
        edges = [u for u in (0.0, *edges, 1 - 2**-53) if 0 <= u < 1]
        asked += [(u, row) for u in edges]
        tokens = [bisect.bisect_right(sums, u * sums[-1]) for u in edges]
        assert set(tokens) == {i for i, unit in enumerate(units) if unit > 0}  # down to 1e-9
        assert not set(tokens) & set(zeros[row])
        expected += tokens
    order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(2))
    u, row = torch.tensor(asked, dtype=torch.float64)[order].T
    monkeypatch.setattr(torch, "rand", lambda *_, **__: u[:, None])
    token = draw(rows, row.long(), torch.Generator())
    assert torch.equal(token, torch.tensor(expected)[order])


def test_a_draw_takes_one_random_number_a_rollout_and_waits_for_nothing():
    """On a GPU, asking for a number's value or a mask's length would stop everything until then."""
    called = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **(kwargs or {}))

    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    with Watch():
        draw(torch.full((2, 1000), 1e-3), torch.tensor([0, 1, 1]), generator)
    assert not [name for name in called if "_local_scalar_dense" in name or "nonzero" in name]
    torch.rand(3, dtype=torch.float64, generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_the_seed_alone_decides(model):
    state = torch.get_rng_state()
    first = generate(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state), "drew from the global generator"
    torch.manual_seed(99)
    assert same(generate(model, seed=1), first)
    assert not same(generate(model, seed=2), first)


# ---- the work it does ----------------------------------------------------------------------------


def test_each_distinct_prefix_is_computed_once_and_finished_rows_leave_the_batch(model):
    model.generation_config.eos_token_id = [0, 5]  # so that some finish early
    shapes = []

    def watch(module, args, kwargs) -> None:
        assert not torch.is_grad_enabled()
        shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(watch, with_kwargs=True)
    rollouts = generate(model, n=16, temperature=1.3, seed=1)
    lengths = rollouts.mask.sum(-1).flatten()
    assert shapes[0] == (3, 7)  # P prompts, not P * n
    going = [int((lengths > t).sum()) for t in range(1, 10)]  # rollouts that go on after t tokens
    prompt = torch.arange(3)[:, None, None].expand(-1, 16, 1)
    rows = torch.cat([prompt, rollouts.completion_ids], dim=-1).flatten(0, 1)
    prefixes = [{(*row[: t + 1],) for row in rows[lengths > t].tolist()} for t in range(1, 10)]
    assert shapes[1:] == [(len(distinct), 1) for distinct in prefixes if distinct]
    assert going[-1] < going[0] < 3 * 16, "nothing finished early: this test shows nothing"
    assert len(prefixes[0]) < going[0], "all differ from the start: this test shows nothing"


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_train_mode_and_gradient_checkpointing_change_nothing(kind):
    """Dropout would change the policy, and checkpointing would switch the cache off."""
    names = {"gpt2": ("attn_pdrop", "embd_pdrop"), "qwen2": ("attention_dropout",)}
    model = random_model(kind, **dict.fromkeys(names[kind], 0.5)).eval()
    plain = generate(model)
    assert not model.training
    model.gradient_checkpointing_enable()
    model.train()
    attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert same(generate(model), plain)
    assert model.training and model.is_gradient_checkpointing
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model)
    assert model.training and ALL_ATTENTION_FUNCTIONS["sdpa"] is attention  # after an error, too


def test_two_samplers_work_side_by_side():
    """Their faster attention is the process's while they sample, whoever ends first."""
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]
    models = [random_model("llama", num_key_value_heads=1) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(generate, models * 4))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is usual
    for model, rollouts in zip(models * 4, found):
        assert_scored_alike(model, rollouts)


# ---- where a completion ends ---------------------------------------------------------------------


def test_the_stop_tokens_are_those_of_the_model_and_of_the_tokenizer():
    """Chat models often have two: end of turn and end of text."""
    model = random_model("qwen2")
    for eos, expected in ((None, [0]), (7, [0, 7]), ([7, 2], [0, 2, 7])):
        model.generation_config.eos_token_id = eos
        assert eos_token_ids(model, Words()) == expected


def test_masks_come_from_lengths_where_padding_is_eos():
    """The first EOS is trained, everything after it is not, whatever its value."""
    completions = [[5, 6, 0, 0, 0], [5, 6, 7, 8, 9], [0, 0, 0, 0, 0], [5, 0, 6, 0, 7]]
    log_probs = [[-1.0, -2.0, -3.0, -4.0, -5.0]] * 4
    rollouts = pack([[1, 2], [3]], completions, log_probs, [0], Words())
    masks = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert rollouts.mask.flatten(0, 1).int().tolist() == masks
    assert rollouts.finished.tolist() == [[True, False], [True, True]]
    assert rollouts.texts == [["5 6", "5 6 7 8 9"], ["", "5"]]
    assert torch.equal(rollouts.log_probs, torch.tensor(log_probs).view(2, 2, 5) * rollouts.mask)
    assert rollouts.prompt_ids.tolist() == [[1, 2], [0, 3]]
    assert rollouts.prompt_mask.tolist() == [[True, True], [False, True]]


def test_empty_completions_are_packed():
    rollouts = pack([[1], [2]], [[], [5], [], []], [[], [-1.0], [], []], [0], Words())
    assert rollouts.mask.tolist() == [[[False], [True]], [[False], [False]]]
    assert not rollouts.finished.any()
    nothing = pack([[1]], [[], []], [[], []], [0], Words())
    assert nothing.completion_ids.shape == nothing.mask.shape == (1, 2, 0)
    assert nothing.select(torch.tensor([[0, 1]])).finished.tolist() == [[False, False]]


# ---- the record ----------------------------------------------------------------------------------


def numbered(P=2, n=4) -> Rollouts:
    """Rollouts whose every value says which one it is: prompt, rollout, token."""
    lengths = torch.tensor([[3, 7, 5, 9], [1, 2, 8, 4]])
    ids = 1000 * torch.arange(P)[:, None, None] + 100 * torch.arange(n)[:, None] + torch.arange(9)
    return Rollouts(
        prompt_ids=torch.tensor([[0, 91], [92, 93]]),
        prompt_mask=torch.tensor([[False, True], [True, True]]),
        completion_ids=ids,
        mask=torch.arange(9) < lengths[..., None],
        log_probs=-ids.float() / 7,
        finished=lengths % 2 == 1,
        texts=[[f"text {p} {i}" for i in range(n)] for p in range(P)],
    )


@pytest.mark.parametrize(
    "keep", [[[1, 3], [0, 2]], [[2, 0], [3, 0]], [[0, 2], [0, 3]], [[0, 1, 2, 3]] * 2]
)
def test_select_takes_every_field_from_the_same_rows(keep):
    everything, kept = numbered(), numbered().select(torch.tensor(keep))
    T = max(everything.mask[p, i].sum().item() for p, row in enumerate(keep) for i in row)
    assert kept.completion_ids.shape == kept.mask.shape == (2, len(keep[0]), T)
    for p, row in enumerate(keep):
        for j, i in enumerate(row):
            for field in ("completion_ids", "mask", "log_probs"):
                original = getattr(everything, field)[p, i]
                assert torch.equal(getattr(kept, field)[p, j], original[:T]), field
            assert kept.finished[p, j] == everything.finished[p, i]
            assert kept.texts[p][j] == f"text {p} {i}"
    assert torch.equal(kept.prompt_ids, everything.prompt_ids)
    assert torch.equal(kept.prompt_mask, everything.prompt_mask)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_what_does_not_fit_the_positions_is_refused(kind):
    """Beyond 64 positions GPT-2 would crash and rotary models would babble."""
    model = random_model(kind)
    with pytest.raises(ValueError, match=r"7.*58.*64 positions"):
        generate(model, max_new_tokens=58)
    assert generate(model, max_new_tokens=57).mask.shape[-1] <= 57


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompts": [[1, 2], []]}, "empty prompt"),
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_what_makes_no_policy_is_refused(request_, words):
    with pytest.raises(ValueError, match=words):
        generate(random_model("qwen2"), **request_)


def test_a_policy_without_finite_logits_cannot_be_sampled():
    model = random_model("qwen2")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        generate(model)
