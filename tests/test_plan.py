"""The plan counts the bytes that real models take, and says what fits. Tensors against tensors."""

import json

import pytest
import torch
import torch.distributed as dist
from conftest import random_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Model
from two_processes import allocated

import logprobs
from support import plan as planning
from support.adapters import add_lora
from support.errors import InputError
from support.models import CHECKPOINTING
from support.plan import IN_UPDATE, USABLE, Allocations, plan, sizes_of, update_bytes
from support.presets import LLAMA_3B, MACHINES, PRESETS, QWEN_3B, QWEN_7B, Machine
from support.processes import Processes
from support.settings import Config
from support.vllm import VLLMSampler

S, T, LAYERS = 64, 32, 2
WIDTHS = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS}
# kind of model, rank of the adapter, gradient checkpointing, dtype
CASES = [
    ("qwen2", 0, False, "float32"),
    ("qwen2", 0, True, "bfloat16"),
    ("qwen2", 4, False, "bfloat16"),
    ("qwen2", 4, True, "float32"),
    ("gpt2", 0, False, "bfloat16"),
    ("gpt2", 0, True, "float32"),
]


def small(kind="qwen2", rank=0, checkpointing=False, dtype="float32", **widths):
    """A real model as a run would prepare it, its shape, and its settings."""
    config = Config(lora_rank=rank, gradient_checkpointing=checkpointing, dtype=dtype)
    config.max_prompt_tokens, config.max_new_tokens, config.prompts_per_step = S - T, T, 2
    sizes = {"vocab_size": 300} | ({} if kind == "gpt2" else WIDTHS) | widths
    model = random_model(kind, **sizes)
    shape = model.config
    if rank:
        model = model.to(getattr(torch, dtype))
    if checkpointing:
        getattr(model, CHECKPOINTING)({"use_reentrant": False})
    return (add_lora(model, rank) if rank else model).train(), shape, config


def padded(b, prompts=2):
    """Token ids and attention mask of a micro-batch with padding and this many prompts."""
    mask = torch.ones(b, S, dtype=torch.long)
    mask[:, 0] = 0
    return (torch.arange(b) % prompts)[:, None].repeat(1, S), mask


def policy(model, config):
    return logprobs.Policy(model, getattr(torch, config.dtype))


# ---- counting ------------------------------------------------------------------------------------


def test_what_is_alive_at_once_is_counted_and_views_are_not():
    before = torch.zeros(25)  # used, so counted: 100 bytes
    with Allocations() as allocations:
        first = before + 1  # 100 more
        second = first.view(5, 5).exp()  # 100 more
        del first
        second[0].add_(1)
    assert (allocations.now, allocations.peak) == (200, 300)
    del second
    assert allocations.now == 100


@pytest.mark.parametrize(("kind", "rank", "checkpointing", "dtype"), CASES)
def test_an_update_is_planned_with_the_bytes_of_the_real_one_and_these_are_what_autograd_saves(
    kind, rank, checkpointing, dtype, monkeypatch
):
    # So few logits at once that small models need several chunks, too.
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 2**13)
    model, shape, config = small(kind, rank, checkpointing, dtype)
    inputs, saved, small_ones = padded(8), {}, list(model.buffers())
    there = [*model.parameters(), *inputs]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    own = {tensor.untyped_storage().data_ptr() for tensor in there + small_ones}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with Allocations() as allocations:
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            log_probs = policy(model, config)(*inputs, T)
        kept = allocations.now - sum(x.nbytes for x in there + trained) - log_probs.nbytes
        log_probs.sum().backward()
    planned = update_bytes(sizes_of(shape, config), config, 8)
    assert planned == pytest.approx(allocations.peak, rel=0.02)
    # Checkpointed layers hold the mask, positions and rotary angles, out of sight of the hooks.
    unseen = sum(tensor.nbytes for tensor in small_ones)
    unseen += 8 * S * (S + 8 + 2 * 16 * 4) if checkpointing else 0
    assert 0 <= kept - sum(n for pointer, n in saved.items() if pointer not in own) <= unseen


# ---- adding up -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [(QWEN_3B, 3_085_938_688), (QWEN_7B, 7_615_616_512), (LLAMA_3B, 3_212_749_824)],
)
def test_embedded_shapes_have_the_published_parameter_counts(name, count, tmp_path):
    adapter = json.dumps({"base_model_name_or_path": name})
    (tmp_path / "adapter_config.json").write_text(adapter)
    for shape in map(planning.architecture, (name, str(tmp_path))):
        assert sum(weight.numel() for weight in sizes_of(shape, Config()).parameters()) == count


@pytest.fixture
def folder(tmp_path):
    """The folder of a model, with no weights in it."""
    random_model("qwen2", vocab_size=300, **WIDTHS).config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(("shard", "kl"), [(False, True), (True, False)])
def test_what_is_always_there_is_16_bytes_a_trained_weight(folder, shard, kl):
    count = random_model("qwen2", vocab_size=300, **WIDTHS).num_parameters()
    config = Config(model=folder, n=4, m=2, shard=shard, beta=0.1 if kl else 0.0)
    parts = plan(config, Machine("M", 10**9, processes=4))
    always = [parts[name] for name in ("weights", "gradients", "AdamW's moments")]
    assert always == [x * count // (4 if shard else 1) for x in (4, 4, 8)]
    assert parts.get("KL's reference", 0) == (4 * count if kl else 0)


def test_an_adapter_is_trained_in_float32_and_the_rest_is_stored_as_computed(folder):
    model, _, config = small(rank=4, dtype="bfloat16")
    config.model, config.beta, config.sampler = folder, 0.1, "vllm"
    parts = plan(config, Machine("M", 10**9))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert parts["weights"] == sum(weight.nbytes for weight in model.parameters())
    assert parts["gradients"] == 4 * trained
    assert "KL's reference" not in parts  # it is the model with the adapter off
    assert parts["in generation"] == parts["weights"] + 12 * trained + 0.3 * 10**9


def test_what_fits_depends_on_the_memory(folder):
    config = Config(model=folder, n=8, m=4, prompts_per_step=2, micro_batch=4, sampler="vllm")
    config.max_prompt_tokens = config.max_new_tokens = 8

    def verdicts(size: float) -> list[bool]:
        lines = planning.dry_run(config, Machine("M", int(size / USABLE) + 1)).splitlines()
        return [line.endswith(": fits") for line in lines if line.startswith("  in the update")]

    found = plan(config, Machine("M", 0))
    assert verdicts(found[IN_UPDATE]) == [True, False]  # as it is, and with n = m
    assert verdicts(found[IN_UPDATE] - 10) == [False, False]


@pytest.mark.parametrize(
    ("given", "memory", "chosen", "sleeps"),
    [
        (None, lambda found: 10**9, 64, False),
        (None, lambda found: 1.02 * found, 4, True),
        (None, lambda found: 0, 1, True),
        (2, lambda found: 0, 2, True),  # what is given is left alone
    ],
)
def test_what_is_left_open_is_chosen_so_that_it_fits(folder, capsys, given, memory, chosen, sleeps):
    config = Config(model=folder, n=16, m=8, prompts_per_step=1, micro_batch=4, sampler="vllm")
    config.max_prompt_tokens = config.max_new_tokens = 8
    found = plan(config, Machine("M", 10**9))[IN_UPDATE]
    config.micro_batch = given
    assert planning.settle(config, Machine("M", int(memory(found) / USABLE))) == sleeps
    assert config.micro_batch == chosen
    assert f"--micro-batch {chosen}" in capsys.readouterr().err


def test_a_model_that_cannot_be_planned_is_trained_as_if_memory_were_scarce(
    folder, capsys, monkeypatch
):
    """What it computes depends on the content of a tensor, which a plan does not have."""
    forward = Qwen2Model.forward
    monkeypatch.setattr(
        Qwen2Model,
        "forward",
        lambda self, input_ids, **rest: input_ids.sum().item() and forward(self, input_ids, **rest),
    )
    config = Config(model=folder, n=4, m=2)
    config.micro_batch = None
    assert planning.settle(config, Machine("M", 10**9))
    assert config.micro_batch == 64
    assert "its memory is not known" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cpu", "gsm8k-qwen2.5-7b-a100"])
def test_presets_can_be_planned_without_weights_or_network(name):
    machine = MACHINES.get(name, Machine("this one", 10**9))
    parts = plan(Config(**PRESETS[name]), machine)
    assert max(parts["in generation"], parts["in the update"]) < USABLE * machine.memory


@pytest.fixture
def eight_processes():
    """The first of eight processes; the others are made up, and send nothing."""
    if VLLMSampler.running is not None:
        VLLMSampler.running.close()  # it has a process group of its own
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    processes = Processes()
    processes.count = 8
    yield processes
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_fsdp_gathers_is_what_the_allocator_gives(eight_processes, tmp_path, dtype):
    """Against a real FSDP2 of eight processes, in which seven eighths of each weight are absent."""
    widths = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    model, shape, config = small(checkpointing=True, dtype=dtype, vocab_size=4000, **widths)
    shape.save_pretrained(tmp_path)
    config.model, config.shard, config.m = str(tmp_path), True, 2
    parts = plan(config, Machine("M", 10**9, processes=8))
    planned = parts["micro-batch of 4 sequences"] + parts["gathered from other processes"]
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    sharded = eight_processes.shard(policy(model, config))

    def micro_batch() -> None:
        sharded(*padded(4), T).sum().backward()

    micro_batch()  # what is made only once is made now
    # Here a layer is sent for when it is needed, on a GPU while others are computed.
    assert planned - 4 * layer < allocated(micro_batch) < planned


# ---- where shapes come from ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nobody/unknown-model", "no-such-folder"])
def test_unknown_model_offline_is_one_line(name):
    with pytest.raises(InputError, match=f"--model {name}: its memory is not known: .+") as error:
        plan(Config(model=name), Machine("M", 10**9))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wanted", "expected"), [((512, None), (32, 31)), ((6, 20), (26, 20)), ((30, 20), (32, 20))]
)
def test_the_longest_sequence_stays_within_the_models_positions(wanted, expected):
    config = Config(max_prompt_tokens=wanted[0], max_new_tokens=wanted[1])
    assert planning.longest(planning.architecture(Config.model), config) == expected
