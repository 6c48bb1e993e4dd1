"""Whether a run fits into memory, counted before it is begun: --dry-run.

    print(dry_run(config, machine))           # the memory of a process, as a table
    vllm_sleeps = settle(config, machine)     # chooses --micro-batch where it is left open

A micro-batch runs forward and backward on tensors that have sizes and no content (PyTorch's
FakeTensorMode), and the bytes of each tensor count for as long as it lives. That finds activations,
what checkpointing computes again, logits, bfloat16 copies of weights, and the second set of
gradients that the backward pass holds where prompts are read once. Left out: time; vLLM on a CPU.

Legend: S tokens of a sequence, of which T are the completion's, b sequences of a micro-batch.
"""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from logprobs import distinct_prompts, shared_prompts, target_log_probs, whole_rows
from support.adapters import add_lora
from support.errors import InputError, say
from support.models import CHECKPOINTING, EMBEDDED
from support.presets import Machine
from support.settings import Config

# What the config.json of the presets' models says, so that their plan needs no network.
SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text())
SIZES_ONLY = FakeTensorMode(allow_non_fake_inputs=True)
USABLE = 0.95  # the rest: CUDA's, scratch of kernels, gaps between the allocator's blocks
DEFAULT = 64  # sequences of a micro-batch
IN_GENERATION, IN_UPDATE, VLLM = "in generation", "in the update", "vLLM's share"


def architecture(name: str) -> PreTrainedConfig:
    """The layers, widths and vocabulary of `--model`; for an adapter, those of its base model."""
    if name in SHAPES:
        return AutoConfig.for_model(**SHAPES[name])
    adapter = Path(name, "adapter_config.json")
    if adapter.exists():
        return architecture(json.loads(adapter.read_text())["base_model_name_or_path"])
    return AutoConfig.from_pretrained(EMBEDDED.get(name, name))


def longest(shape: PreTrainedConfig, config: Config) -> tuple[int, int]:
    """S and T of the longest sequence: as asked for, or what the model's positions leave.

    InputError: --max-new-tokens leaves no position for a prompt.
    """
    T = config.max_new_tokens or 512
    S = config.max_prompt_tokens + T
    S = min(S, getattr(shape.get_text_config(), "max_position_embeddings", None) or S)
    if config.max_new_tokens and S <= T:
        reason = f"--max-new-tokens {T} and a prompt do not fit the model's {S} positions"
        raise InputError(f"{reason}: lower --max-new-tokens")
    return S, min(T, S - 1)


def sizes_of(shape: PreTrainedConfig, config: Config) -> nn.Module:
    """The model that `config` trains, with sizes alone."""
    # As in a run, what is trained is stored in float32, and the rest in the dtype of computation.
    stored = getattr(torch, config.dtype) if config.lora_rank else torch.float32
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(shape, dtype=stored).train()
        if config.gradient_checkpointing:
            getattr(base, CHECKPOINTING)({"use_reentrant": False})
        model = add_lora(base, config.lora_rank) if config.lora_rank else base
    with SIZES_ONLY:
        model.to_empty(device="cpu")  # on the meta device attention would make all S*S scores
        base.tie_weights()
    return model


class Allocations(TorchDispatchMode):
    """While it is entered, counts the bytes of all tensors that are used or made: now, and at most.

    (torch's MemTracker fails on frozen weights, and on a layer that is called twice in a pass.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self.alive:
            self.alive.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def update_bytes(model: nn.Module, config: Config, b: int) -> int:
    """The most bytes, weights and gradients among them, of b of the longest sequences at once."""
    S, T = longest(model.config, config)
    ids = (torch.arange(b) % config.prompts_per_step)[:, None].repeat(1, S)  # [b, S]
    mask = torch.ones_like(ids)  # [b, S]
    mask[:, 0] = 0  # most micro-batches have padding, and attention without a mask takes less
    inputs, bfloat16 = (model, ids, mask, T), config.dtype == "bfloat16"
    groups = distinct_prompts(*inputs)
    with SIZES_ONLY, Allocations() as allocations:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        # As logprobs.Policy computes.
        with torch.autocast("cpu", torch.bfloat16, bfloat16, cache_enabled=False):
            hidden = whole_rows(*inputs) if groups is None else shared_prompts(*inputs, *groups)
            layer = model.get_output_embeddings()
            log_probs, _ = target_log_probs(layer, hidden, ids[:, -T:], 1.0)  # [b, T]
        del hidden
        log_probs.sum().backward()
    return allocations.peak


def plan(config: Config, machine: Machine) -> dict[str, int]:
    """Bytes of a process, by what they are for; `in generation` and `in the update` are sums.

    InputError: no config.json can be had, or what is computed depends on the content.
    """
    b = min(config.prompts_per_step * config.m, config.micro_batch or DEFAULT)
    try:
        model = sizes_of(architecture(config.model).get_text_config(), config)
        counted = update_bytes(model, config, b)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"--model {config.model}: its memory is not known: {reason}") from error
    whole = sum(weight.nbytes for weight in model.parameters())
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    # A trained weight takes 16 bytes: itself, its gradient and two moments, all float32.
    always = {"weights": whole, "gradients": 4 * trained, "AdamW's moments": 8 * trained}
    update = {f"micro-batch of {b} sequences": counted - whole - 4 * trained}
    if config.shard:
        always = {part: size // machine.processes for part, size in always.items()}
        layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        layer = sum(weight.nbytes for weight in layers[0].parameters())
        # In the dtype of computation: all but the layers, until the backward pass ends; the layer
        # that is computed, the next, and a buffer. In float32: one layer's gradients on their way.
        gathered = (whole + (3 - len(layers)) * layer) // 4 * getattr(torch, config.dtype).itemsize
        update["gathered from other processes"] = gathered + layer
    if config.beta > 0 and not config.lora_rank:  # with an adapter it is the model without it
        always["KL's reference"] = whole
    share = int(config.gpu_memory_utilization * machine.memory)
    generation = {VLLM: share if config.sampler == "vllm" else 0}
    sums = [sum((always | more).values()) for more in (generation, update)]
    return always | generation | {IN_GENERATION: sums[0]} | update | {IN_UPDATE: sums[1]}


def settle(config: Config, machine: Machine) -> bool:
    """Choose `--micro-batch` where it is left open: 64, or the largest half of a half that fits.

    Returns whether vLLM must sleep during updates, because there is no memory for both.
    """
    given, usable = config.micro_batch, USABLE * machine.memory
    config.micro_batch = given or DEFAULT
    try:
        parts = plan(config, machine)
        while not given and config.micro_batch > 1 and parts[IN_UPDATE] > usable:
            config.micro_batch //= 2
            parts = plan(config, machine)
    except InputError as error:
        say(str(error))
        return True
    say(f"--micro-batch {config.micro_batch}, by the plan (--dry-run)")
    return parts[IN_UPDATE] + parts[VLLM] > usable


def dry_run(config: Config, machine: Machine) -> str:
    """The memory that a run needs, as a table."""
    n, usable, parts = config.n, USABLE * machine.memory, plan(config, machine)
    all_of_them = replace(config, m=n, micro_batch=n * config.prompts_per_step)
    parts[f"{IN_UPDATE}, m = n = {n}, in one piece"] = plan(all_of_them, machine)[IN_UPDATE]
    lines = [f"{usable / 1e9:.1f} GB can be counted on, {machine.processes} x {machine.name}"]
    for label, size in parts.items():
        lines.append(f"  {label:40} {size / 1e9:8,.2f} GB")
        if label.startswith("in "):
            lines[-1] += ": fits" if size <= usable else ": out of memory"
    if parts[IN_UPDATE] > usable:
        lines.append("try a lower --micro-batch, --gradient-checkpointing, --lora-rank or --shard")
    return "\n".join([*lines, "what kernels need for a moment is not counted"])
