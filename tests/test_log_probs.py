"""Log-probs of tokens against full softmaxes, by any number of chunks, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from conftest import batch, full_log_probs, random_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

import logprobs
from logprobs import token_log_probs


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_log_probs_equal_the_full_softmax_of_each_row_without_padding(model, temperature):
    """Left padding would shift learned positions, and a missing mask would be attended to."""
    ids, attention, mask = batch()
    log_probs = token_log_probs(model, ids, attention, mask.shape[1], temperature)
    assert log_probs.shape == mask.shape and log_probs.dtype == torch.float32
    expected = full_log_probs(model, ids, attention, mask.shape[1], temperature)
    assert (log_probs - expected)[mask].abs().max() < 1e-5


class TableModel(nn.Module):
    """A model with known probabilities: the logits after token i are row i of a table [H, V]."""

    def __init__(self, table: torch.Tensor):
        super().__init__()
        self.output = nn.Linear(*table.shape, bias=False, dtype=table.dtype)
        self.output.weight.data = table.T.clone()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="table"))

    def get_output_embeddings(self):
        return self.output

    def get_decoder(self):
        weight = self.output.weight

        def decoder(input_ids, **_):
            hidden = nn.functional.one_hot(input_ids, weight.shape[1]).to(weight.dtype)
            return SimpleNamespace(last_hidden_state=hidden)

        return decoder


def test_bfloat16_logits_are_softmaxed_in_float32():
    """In bfloat16 the error is 0.07: a third of the clip range."""
    table = (torch.randn(64, 32_000, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    ids = torch.arange(64)[None]
    log_probs = token_log_probs(TableModel(table), ids, torch.ones_like(ids), 63)
    exact = table.double().log_softmax(-1)[torch.arange(63), torch.arange(1, 64)]
    assert (log_probs[0] - exact).abs().max() < 1e-3


class LargestLogits(TorchDispatchMode):
    """Records the most tokens in a tensor [..., V] but the weight, forward and backward."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight_shape, self.tokens = weight.T.shape, 0  # [hidden, V]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            shape = tensor.shape if isinstance(tensor, torch.Tensor) else ()
            if shape[-1:] == self.weight_shape[-1:] and shape != self.weight_shape:
                self.tokens = max(self.tokens, tensor.numel() // shape[-1])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_the_memory_and_nothing_else(model, dtype, monkeypatch):
    """Never more logits than a chunk, in neither pass, and none is kept for the backward pass."""
    V, tokens = 19, 4
    model = model.to(dtype)
    ids, attention, mask = batch()
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    results, kept = [], []  # kept: the shapes of what autograd stores
    storing = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append((*x.shape,)) or x, lambda x: x
    )
    for limit, largest in ((2**25, mask.numel()), (tokens * V + V - 1, tokens), (1, 1)):
        monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", limit)
        model.zero_grad()
        kept.clear()
        with LargestLogits(model.get_output_embeddings().weight) as logits:
            with storing:
                log_probs = token_log_probs(model, ids, attention, mask.shape[1], 0.9)
            (log_probs * weights)[mask].sum().backward()
        assert logits.tokens == largest
        # [tokens, V], and not the weight [hidden, V].
        assert any(shape[1:] == (V,) and shape[0] != 32 for shape in kept) == (limit == 2**25)
        results.append([log_probs.detach(), *(p.grad.float() for p in model.parameters())])
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for direct, *chunked in zip(*results):
        for other in chunked:
            assert (direct - other).abs().max() <= tolerance * direct.abs().max()


class FixedStates(TableModel):
    """A model whose hidden states [B, L, H] are given: only the output layer is trained."""

    def __init__(self, hidden: torch.Tensor, vocabulary: int):
        super().__init__(torch.randn(hidden.shape[-1], vocabulary) * 0.2)
        self.hidden = hidden

    def get_decoder(self):
        return lambda input_ids, **_: SimpleNamespace(last_hidden_state=self.hidden)


def test_the_output_layers_gradient_is_added_up_in_float32(monkeypatch):
    """Autocast's cache would hand all 148 chunks one bfloat16 weight, with a bfloat16 gradient."""
    B, T, V, H, tokens = 16, 74, 256, 64, 8
    torch.manual_seed(5)
    model = FixedStates(torch.randn(B, T, H), V)
    ids = torch.randint(V, (B, T + 1))
    advantages = torch.tensor([1.0, -1.0]).repeat(B // 2)
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", tokens * V // 4)

    def gradient(score) -> torch.Tensor:
        model.zero_grad()
        (score(ids, torch.ones_like(ids), T) * advantages[:, None]).sum().backward()
        return model.output.weight.grad.double()

    def cached(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return token_log_probs(model, *inputs)

    found, with_cache = gradient(logprobs.Policy(model, torch.bfloat16)), gradient(cached)
    model.double()
    model.hidden = model.hidden.double()
    exact = gradient(logprobs.Policy(model))
    assert (found - exact).norm() < 0.004 * exact.norm()
    assert (with_cache - exact).norm() > 0.01 * exact.norm()  # what it is about


def test_no_completion_tokens_no_log_probs():
    ids = torch.ones(2, 3, dtype=torch.long)
    assert token_log_probs(random_model("qwen2"), ids, torch.ones_like(ids), 0).shape == (2, 0)


def test_models_that_change_their_logits_are_refused():
    """Their log-probs would be of another policy than the sampler's."""
    size = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    ids = torch.ones(1, 4, dtype=torch.long)
    for model, name in (
        (Gemma2ForCausalLM(Gemma2Config(**size, head_dim=8)), "final_logit_softcapping"),
        (CohereForCausalLM(CohereConfig(**size)), "logit_scale"),
    ):
        with pytest.raises(ValueError, match=name):
            token_log_probs(model, ids, torch.ones_like(ids), 2)
