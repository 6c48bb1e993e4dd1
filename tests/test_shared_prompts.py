"""Prompts read once against rows read whole: values, gradients, and when it is not done."""

import pytest
import torch
from conftest import adapted, full_log_probs, random_model
from test_log_probs import TableModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import logprobs
from logprobs import Policy, target_log_probs, token_log_probs, whole_rows


def groups(prompts=(3, 7, 1), lengths=((6, 2, 4), (1, 5, 5), (3, 6, 0))):
    """Rollouts of prompts of these lengths, in no order: ids, attention mask, completion mask."""
    generator = torch.Generator().manual_seed(0)
    L, T = max(prompts), max(max(row) for row in lengths)
    rows = []
    for p, row in zip(prompts, lengths, strict=True):
        prompt = torch.randint(1, 19, (L,), generator=generator)
        for t in row:
            ids = torch.randint(1, 19, (L + T,), generator=generator)
            ids[L - p : L] = prompt[L - p :]  # what is under the padding differs from row to row
            column = torch.arange(L + T)
            rows.append((ids, (column >= L - p) & (column < L + t)))
    order = torch.randperm(len(rows), generator=generator)
    ids, attention = (torch.stack(part)[order] for part in zip(*rows))
    return ids, attention, attention[:, L:]


def by_whole_rows(model, ids, attention, T):
    """`token_log_probs` as it is where prompts are not shared."""
    hidden = whole_rows(model, ids, attention, T)
    return target_log_probs(model.get_output_embeddings(), hidden, ids[:, -T:], 1.0)[0]


def gradient(model, log_probs, mask):
    """Of a random weighted sum over the tokens, by every trained weight, as one vector."""
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad((log_probs * weights)[mask].sum(), trained)
    return nn.utils.parameters_to_vector(part.float() for part in found)


def assert_same_gradient(gradient, expected):
    assert expected.norm() > 0
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


def assert_same_policy(model, mask, log_probs, whole) -> None:
    """Log-probs and gradient, of the tokens that count, are those of whole rows."""
    assert (log_probs - whole)[mask].abs().max() < 1e-5
    assert_same_gradient(gradient(model, log_probs, mask), gradient(model, whole, mask))


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int]]:
    """The shape of what the decoder reads, pass by pass."""
    shapes, original = [], logprobs.read

    def watched(model, input_ids, *args, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return original(model, input_ids, *args, **kwargs)

    monkeypatch.setattr(logprobs, "read", watched)
    monkeypatch.setattr(logprobs, "WORTH_A_PASS", 1)  # the rows of tests are short
    return shapes


# ---- the same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_and_gradient_are_those_of_whole_rows(model, temperature, read, monkeypatch):
    """Padded prompts, ragged completions and an empty one, learned and rotary positions."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 4 * 19)
    ids, attention, mask = groups()
    T = mask.shape[1]
    log_probs = token_log_probs(model, ids, attention, T, temperature)
    assert read == [(3, 7), (9, T - 1)]  # each prompt once, and the last token not at all
    assert log_probs.shape == mask.shape and log_probs.dtype == torch.float32
    expected = full_log_probs(model, ids, attention, T, temperature)
    assert_same_policy(model, mask, log_probs, expected)


def test_a_completion_of_one_token_is_scored_by_the_prompt_alone(model, read):
    ids, attention, mask = groups(lengths=((1, 1), (1, 1), (1, 1)))
    log_probs = token_log_probs(model, ids, attention, 1)
    assert read == [(3, 7), (6, 1)]
    assert_same_policy(model, mask, log_probs, full_log_probs(model, ids, attention, 1, 1.0))


def test_prompts_are_told_apart_by_their_tokens_and_their_padding(read):
    """[_, 5, 6] is one prompt whatever is under its padding, and another one than [9, 5, 6]."""
    model = random_model("qwen2")
    ids = torch.tensor([[9, 5, 6, 1, 2], [4, 5, 6, 3, 4], [9, 5, 6, 1, 2], [9, 5, 6, 7, 8]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1] * 5, [1] * 5])
    log_probs = token_log_probs(model, ids, attention, 2)
    assert read == [(2, 3), (4, 1)]
    assert not torch.equal(log_probs[0], log_probs[2])
    expected = full_log_probs(model, ids, attention.bool(), 2, 1.0)
    assert (log_probs - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_with_an_adapter(kind, read):
    """It is in the layers, so both passes have it; the base model has no gradient."""
    plain, model = adapted(kind)
    ids, attention, mask = groups()
    T = mask.shape[1]
    log_probs = token_log_probs(model, ids, attention, T)
    assert len(read) == 2
    assert_same_policy(model, mask, log_probs, by_whole_rows(model, ids, attention, T))
    read.clear()
    with model.disable_adapter():  # the KL's reference
        reference = token_log_probs(model, ids, attention, T)
    assert len(read) == 2
    assert (reference - full_log_probs(plain, ids, attention, T, 1.0))[mask].abs().max() < 1e-5
    assert (reference - log_probs)[mask].abs().max() > 0.1


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_in_bfloat16_it_is_as_far_from_float32_as_whole_rows_are(model, stored, read):
    """Another order of roundings, not more of them."""
    ids, attention, mask = groups()
    T = mask.shape[1]

    def with_gradient(log_probs) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probs.detach()[mask], gradient(model, log_probs, mask)

    exact = with_gradient(by_whole_rows(model, ids, attention, T))
    model.to(stored)
    with torch.autocast("cpu", torch.bfloat16):
        whole = with_gradient(by_whole_rows(model, ids, attention, T))
    read.clear()
    shared = with_gradient(Policy(model, torch.bfloat16)(ids, attention, T, 1.0))
    assert len(read) == 2 and shared[0].dtype == torch.float32
    assert (shared[0] - exact[0]).abs().max() < 2 * (whole[0] - exact[0]).abs().max()
    far = (whole[1] - exact[1]).norm()
    assert far > 1e-3 * exact[1].norm()  # it is in bfloat16
    assert (shared[1] - exact[1]).norm() < 1.5 * far


# ---- when rows are read whole --------------------------------------------------------------------


def test_prompts_are_read_once_where_that_saves_enough_tokens(model, read, monkeypatch):
    ids = torch.randint(1, 19, (1, 12)).repeat(5, 1)
    for worth, passes in ((4 * 7, 2), (4 * 7 + 1, 1)):  # four prompts of 7 tokens are saved
        monkeypatch.setattr(logprobs, "WORTH_A_PASS", worth)
        read.clear()
        token_log_probs(model, ids, torch.ones_like(ids), 5)
        assert len(read) == passes


def test_checkpointed_layers_read_rows_whole(model, read):
    """In train mode they drop the cache: the completions would not see their prompts."""
    ids, attention, mask = groups()
    T = mask.shape[1]
    expected = gradient(model, by_whole_rows(model, ids, attention, T), mask)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for training, passes in ((True, 1), (False, 2)):
        model.train(training)
        read.clear()
        found = gradient(model, token_log_probs(model, ids, attention, T), mask)
        assert len(read) == passes
        assert_same_gradient(found, expected)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
HEADS |= {"initializer_range": 0.2}
TWO_KINDS = HEADS | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
EQUALLY_LONG = {"prompts": (7, 7, 7), "lengths": ((6, 6), (6, 6), (6, 6))}  # without padding
ONE_ROW_EACH = {"lengths": ((6,), (5,), (4,))}


@pytest.mark.parametrize(
    ("kind", "options", "rows", "passes"),
    [
        ("qwen2", HEADS, ONE_ROW_EACH, 1),
        # Rows of 13 tokens: a shorter window forgets a part of the prompt on the way.
        ("mistral", HEADS | {"sliding_window": 3}, {}, 1),
        ("mistral", HEADS | {"sliding_window": 12}, {}, 1),
        ("mistral", HEADS | {"sliding_window": 13}, {}, 2),
        ("mistral", HEADS | {"sliding_window": None}, {}, 2),
        ("qwen2", TWO_KINDS, {}, 1),
        # What a layer without keys and values remembers of the prompt is not handed on.
        ("rwkv", {}, EQUALLY_LONG, 1),  # its configuration does not say that it is recurrent
        ("mamba", {"state_size": 4, "initializer_range": 0.2}, EQUALLY_LONG, 1),
        ("lfm2", HEADS | {"layer_types": ["conv", "full_attention"]}, EQUALLY_LONG, 1),
    ],
)
def test_rows_are_read_whole_where_keys_and_values_would_not_do(kind, options, rows, passes, read):
    torch.manual_seed(0)
    size = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **size, **options))
    ids, attention, mask = groups(**rows)
    T = mask.shape[1]
    log_probs = token_log_probs(model, ids, attention, T)
    assert len(read) == passes
    assert_same_policy(model, mask, log_probs, full_log_probs(model, ids, attention, T, 1.0))


def test_a_model_that_knows_no_cache_reads_rows_whole(read):
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[10, 11, 5, 6], [10, 11, 6, 2]])
    log_probs = token_log_probs(TableModel(table), ids, torch.ones_like(ids), 2)
    assert read == [(2, 3)]
    p = table.log_softmax(-1)
    expected = torch.stack([p[[11, 5], [5, 6]], p[[11, 6], [6, 2]]])
    assert (log_probs - expected).abs().max() < 1e-6
