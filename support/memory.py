"""The memory that a run needs, counted before it is begun.

    shape = architecture("Qwen/Qwen2.5-3B-Instruct")         # known here, or from a config.json
    update_bytes(shape, config)(16)                          # of a micro-batch of 16 sequences
    standing_bytes(*parameter_counts(shape, config), config)     # weights, gradients, moments

Memory is what an update is dear in, and why PODS trains on m of n rollouts. It is counted, not
guessed: a micro-batch runs forward and backward on tensors that have sizes and no content
(PyTorch's FakeTensorMode), and whatever it allocates is added up for as long as it lives. That
finds activations, what checkpointing computes again, logits, and bfloat16 copies of weights alike;
it takes seconds, no weights and no network.

Left out: vLLM's settings on a CPU. The forward pass of the KL's reference.

Legend: P prompts a process and step, n rollouts a prompt, m kept, S tokens of a sequence, of which
T are the completion's, N processes.
"""

import copy
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from logprobs import keeps_prompts, shared_prompts, target_log_probs, whole_rows
from support.adapters import add_lora
from support.errors import InputError
from support.presets import LLAMA_3B, QWEN_3B, QWEN_7B, Machine
from support.settings import Config

# ---- the model, without weights ------------------------------------------------------------------

SHAPE_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings"),
)
SHAPES = {  # from the config.json of the presets' models
    QWEN_3B: ("qwen2", 2048, 36, 16, 2, 11008, 151936, True, 32768),
    QWEN_7B: ("qwen2", 3584, 28, 28, 4, 18944, 152064, False, 32768),
    LLAMA_3B: ("llama", 3072, 28, 24, 8, 8192, 128256, True, 131072),
}


def architecture(name: str) -> PreTrainedConfig:
    """The configuration of a model: layers, widths, vocabulary.

    Args:
        name: `--model`: a folder of a model or an adapter, or a hub name. The presets' models are
            known here; the config.json of another is fetched, or taken from the hub's cache.

    Raises:
        InputError: it cannot be had.
    """
    if name in SHAPES:
        kind, *shape = SHAPES[name]
        return AutoConfig.for_model(kind, **dict(zip(SHAPE_FIELDS, shape, strict=True)))
    # The embedded policy's folder is beside this file, wherever the command is given.
    path = Path(name) if Path(name).is_dir() else Path(__file__).parent / name
    adapter = path / "adapter_config.json"
    if adapter.exists():
        return architecture(json.loads(adapter.read_text())["base_model_name_or_path"])
    try:
        return AutoConfig.from_pretrained(path if path.is_dir() else name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--model {name}: no config.json can be read there or fetched from the hub: give a "
            f"model's folder, fetch it once with a network, or take one of {', '.join(SHAPES)}"
        ) from error


def empty_model(shape: PreTrainedConfig, config: Config, layers: int | None = None) -> nn.Module:
    """The model that `config` trains, on the meta device: sizes and no content.

    Args:
        shape: from `architecture`.
        config: dtype, lora_rank and gradient_checkpointing are used.
        layers: how many, instead of the shape's own number.
    """
    shape = copy.deepcopy(shape)
    if layers is not None:
        shape.num_hidden_layers = layers
    # As in train.py: what is trained is stored in float32, what is not as it is computed with.
    stored = getattr(torch, config.dtype) if config.lora_rank else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=stored)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.lora_rank:
            model = add_lora(model, config.lora_rank)
    return model.train()


def fake_model(shape: PreTrainedConfig, config: Config, layers: int) -> nn.Module:
    """`empty_model` as one on a CPU, for all that PyTorch's operations can tell.

    They choose other kernels on the meta device: attention would make all S*S scores.
    """
    model = empty_model(shape, config, layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        (model.get_base_model() if config.lora_rank else model).tie_weights()
    return model


def longest(shape: PreTrainedConfig, config: Config) -> tuple[int, int]:
    """S and T of the longest sequence: as asked for, or what the model's positions leave."""
    T = config.max_new_tokens or 512
    S = config.max_prompt_tokens + T
    limit = getattr(shape.get_text_config(), "max_position_embeddings", None) or S
    if config.max_new_tokens and limit <= T:
        raise InputError(f"--max-new-tokens {T} does not fit the model's {limit} positions")
    S = min(S, limit)
    return S, min(T, S - 1)


# ---- counting ------------------------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Bytes of the tensors made while it is entered: of those alive `now`, and at the `peak`.

    Args:
        known: tensors from before, not to be counted when an operation returns a view of them.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def restart(self) -> int:
        """The peak since the last restart."""
        peak, self.peak = self.peak, self.now
        return peak

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.now += size
        self.peak = max(self.peak, self.now)

        def freed(_) -> None:
            self.now -= size
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, freed)


def micro_batch_bytes(
    model: nn.Module, prompts: int, sequences: int, S: int, T: int, bfloat16: bool
) -> tuple[int, list[int]]:
    """What a micro-batch allocates besides weights and gradients, which are there already.

    Args:
        model: from `fake_model`, or a real one; only its gradients are changed, to None.
        prompts, sequences, S, T: how many sequences there are and how many distinct prompts they
            have; all have S tokens, T of them the completion's.
        bfloat16: compute in it, as train.py does with `--dtype bfloat16`.

    Returns:
        Bytes kept between the forward and the backward pass; and the peaks of three phases, the
        layers' forward pass, the logits', the backward pass.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    with getattr(trained[0], "fake_mode", nullcontext()):
        input_ids = torch.zeros(sequences, S, dtype=torch.long)
        # Padded, as most micro-batches are: attention without a mask takes less memory.
        attention_mask = torch.ones(sequences, S, dtype=torch.long)
        attention_mask[:, 0] = 0

        def hidden_states() -> torch.Tensor:
            if not keeps_prompts(model, S):
                return whole_rows(model, input_ids, attention_mask, T)
            # `token_log_probs` would find these in the ids, which have no content here.
            distinct = torch.zeros(prompts, S - T, dtype=torch.long)
            distinct[:, 0] = -1
            row = torch.arange(sequences) % prompts
            return shared_prompts(model, input_ids, attention_mask, T, distinct, row)

        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        known = [*model.parameters(), *model.buffers(), *(weight.grad for weight in trained)]
        peaks = []
        with Allocations([*known, input_ids, attention_mask]) as allocations:
            # As `logprobs.Policy` computes.
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16, cache_enabled=False):
                hidden = hidden_states()  # [b, T, hidden]
                peaks.append(allocations.restart())
                log_probs, _ = target_log_probs(
                    model.get_output_embeddings(), hidden, input_ids[:, -T:], 1.0
                )
            peaks.append(allocations.restart())
            del hidden
            kept = allocations.now
            log_probs.sum().backward()
            peaks.append(allocations.restart())
    model.zero_grad()
    return kept, peaks


def update_bytes(shape: PreTrainedConfig, config: Config) -> Callable[[int], int]:
    """A function: sequences of a micro-batch -> bytes it allocates besides weights and gradients.

    Each phase's peak grows by the same bytes with every layer: two and three layers are counted,
    and the others added. (One layer is the first and the last at once, unlike any other.) Powers of
    two up to 32 sequences are counted; straight lines go between them, where they cannot be too
    low, and beyond. A micro-batch is taken to have as many of the step's prompts as it can.
    """
    models = [fake_model(shape, config, layers) for layers in (2, 3)]
    more = shape.get_text_config().num_hidden_layers - 3
    S, T = longest(shape, config)
    P, bfloat16 = config.prompts_per_step, config.dtype == "bfloat16"

    @lru_cache
    def counted(prompts: int, sequences: int) -> int:
        sizes = prompts, sequences, S, T, bfloat16
        (_, two), (_, three) = [micro_batch_bytes(model, *sizes) for model in models]
        return max(b + more * (b - a) for a, b in zip(two, three))

    def needed(sequences: int) -> int:
        power = min(32, 1 << (sequences - 1).bit_length())  # the next one
        # One line as long as every sequence may bring its own prompt, another from there on.
        high = counted(P if sequences > P else power, power)
        if sequences == power:
            return high
        low = counted(P if sequences > P else power // 2, power // 2)
        return high + round((high - low) / (power // 2) * (sequences - power))

    return needed


def cache_bytes(shape: PreTrainedConfig, config: Config) -> tuple[int, int]:
    """Bytes of a token's keys and values in all layers: in `TorchSampler`, and in vLLM."""
    model = fake_model(shape, config, layers=1).eval()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16")
    with next(model.parameters()).fake_mode, torch.no_grad(), autocast:
        token = torch.zeros(1, 1, dtype=torch.long)
        (layer,) = model(input_ids=token, use_cache=True).past_key_values.layers
    cache = layer.keys, layer.values
    layers = shape.get_text_config().num_hidden_layers
    in_torch, numbers = sum(part.nbytes for part in cache), sum(part.numel() for part in cache)
    return layers * in_torch, layers * numbers * width(config)


def width(config: Config) -> int:
    """Bytes of a number in the dtype of computation."""
    return getattr(torch, config.dtype).itemsize


def parameter_counts(shape: PreTrainedConfig, config: Config) -> tuple[int, int]:
    """How many parameters the model has, without an adapter, and how many are trained."""
    weights = list(empty_model(shape, config).parameters())
    count = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return count - trained if config.lora_rank else count, trained


WEIGHTS, GRADIENTS, MOMENTS, REFERENCE = "weights", "gradients", "AdamW's moments", "KL's reference"


def standing_bytes(count: int, trained: int, config: Config) -> dict[str, int]:
    """Bytes that are there for the whole run, undivided, by what they are for.

    A trained weight takes 16: itself, its gradient and two moments, all float32.
    """
    frozen = width(config) * count if config.lora_rank else 0
    parts = {WEIGHTS: frozen + 4 * trained, GRADIENTS: 4 * trained, MOMENTS: 8 * trained}
    if config.beta > 0 and not config.lora_rank:  # with an adapter it is the model without it
        parts[REFERENCE] = 4 * count
    return parts


def gathered_bytes(shape: PreTrainedConfig, config: Config) -> tuple[int, int]:
    """Bytes of the whole weights that FSDP gathers: of all but the layers, and of four layers.

    The outermost weights (embedding, output layer) are gathered at the start of a forward pass and
    stay for the backward pass. Of the layers there are the one that is computed, the next one on
    its way, the buffer through which weights come, and the one in which gradients leave.
    """
    one, two = [
        sum(weight.nbytes for weight in empty_model(shape, config, layers).parameters())
        for layers in (1, 2)
    ]
    return one - (two - one), 4 * (two - one)


GRAPHS = 10**9  # of CUDA, for some fifty batch sizes: assumed; vLLM's own log says it


def engine_bytes(shape: PreTrainedConfig, config: Config, machine: Machine) -> int:
    """What vLLM 0.32 takes of its share on a GPU before the rest becomes its cache.

    It measures that at its start, with as many tokens and sequences as it may ever compute at once;
    here it is counted from the same numbers, its defaults. The layers' activations are largest
    between the feed-forward block's two projections; the sampler holds several tables [., V].
    """
    text = shape.get_text_config()
    large = machine.memory >= 70 * 2**30 and "a100" not in machine.name.lower()
    tokens, sequences = (16384, 1024) if large else (8192, 256)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    # Gate and up, their product; states before and after the block, and the residual.
    activations = width(config) * tokens * (3 * inner + 3 * text.hidden_size)
    # Logits as computed and in float32; sorted, with their int64 indices; probabilities.
    tables = (width(config) + 4 + 4 + 8 + 4) * sequences * text.vocab_size
    return max(activations, tables) + GRAPHS


def generation_bytes(
    shape: PreTrainedConfig, config: Config, count: int, machine: Machine
) -> dict[str, int]:
    """Bytes that generation takes besides, by what they are for.

    Args:
        count: the model's parameters.
        machine: whose processes generate.
    """
    rollouts, (S, _) = config.prompts_per_step * config.n, longest(shape, config)
    in_torch, in_vllm = (S * bytes_ for bytes_ in cache_bytes(shape, config))  # for one rollout
    if config.sampler == "torch":
        # Logits and probabilities; their sums in float64, by prefix and a row for each rollout.
        logits = (4 + 4 + 8 + 8) * rollouts * shape.get_text_config().vocab_size
        return {f"cache of {rollouts} rollouts": rollouts * in_torch, "logits": logits}
    weights, buffers = width(config) * count, engine_bytes(shape, config, machine)
    share = round(config.gpu_memory_utilization * machine.memory)
    cache = max(0, share - weights - buffers)
    at_once = min(rollouts, cache // in_vllm)  # the others wait
    parts = {"vLLM weights": weights, "vLLM buffers, CUDA graphs": buffers}
    return parts | {f"vLLM cache: {at_once}/{rollouts} rollouts": cache}
