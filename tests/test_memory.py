"""Counted memory against what PyTorch really allocates."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import random_model
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import logprobs
from support import memory
from support.adapters import add_lora
from support.presets import LLAMA_3B, MACHINES, PRESETS, QWEN_3B, QWEN_7B, Machine
from support.processes import Processes
from support.settings import Config
from support.vllm import VLLMSampler

S, T = 64, 32
LAYERS = 4
WIDTHS = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": LAYERS}
GPT2_WIDTHS = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4}
# kind of model, rank of the adapter, gradient checkpointing, dtype
CASES = [
    (kind, rank, checkpointing, dtype)
    for kind in ("qwen2", "gpt2")
    for rank in (0, 4)
    for checkpointing in (False, True)
    for dtype in ("float32", "bfloat16")
    if not (kind == "gpt2" and rank)  # it has none of the seven projections
]


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch):
    """So few logits at once that small models need several chunks, too."""
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 2**13)


def small(kind="qwen2", rank=0, checkpointing=False, dtype="float32"):
    """A real model as a run would prepare it, its shape, and its settings."""
    config = Config(
        lora_rank=rank,
        gradient_checkpointing=checkpointing,
        dtype=dtype,
        max_prompt_tokens=S - T,
        max_new_tokens=T,
        prompts_per_step=2,
    )
    widths = GPT2_WIDTHS if kind == "gpt2" else WIDTHS
    model = random_model(kind, vocab_size=300, **widths)
    shape = model.config
    if rank:
        model = model.to(getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        model = add_lora(model, rank)
    return model.train(), shape, config


def padded(sequences, prompts=2):
    """Token ids and attention mask of a micro-batch with padding and this many prompts."""
    attention_mask = torch.ones(sequences, S, dtype=torch.long)
    attention_mask[:, 0] = 0
    return (torch.arange(sequences) % prompts)[:, None].expand(-1, S).clone(), attention_mask


def forward(model, inputs, dtype):
    """The log-probs of a micro-batch, as an update computes them."""
    return logprobs.Policy(model, getattr(torch, dtype))(*inputs, T)


def allocated(work) -> int:
    """The most bytes that were there at once, by torch's allocator, besides those of before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, now)
    return most


# ---- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rank", "checkpointing", "dtype"), CASES)
def test_counts_are_those_of_the_real_model(kind, rank, checkpointing, dtype):
    real, shape, config = small(kind, rank, checkpointing, dtype)
    sizes = (2, 4, S, T, dtype == "bfloat16")
    counts = memory.micro_batch_bytes(real, *sizes)
    assert memory.micro_batch_bytes(memory.fake_model(shape, config, LAYERS), *sizes) == counts
    # From two and three layers to four: nothing is lost.
    assert memory.update_bytes(shape, config)(4) == max(counts[1])


@pytest.mark.parametrize(("kind", "rank", "checkpointing", "dtype"), CASES)
def test_counts_are_what_autograd_saves_and_the_allocator_gives(kind, rank, checkpointing, dtype):
    model, _, _ = small(kind, rank, checkpointing, dtype)
    kept, peaks = memory.micro_batch_bytes(model, 2, 8, S, T, dtype == "bfloat16")

    inputs = padded(8)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *inputs]}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        log_probs = forward(model, inputs, dtype)
    bytes_saved = sum(count for pointer, count in saved.items() if pointer not in own)
    # Checkpointed layers hold the mask, positions and rotary angles, out of sight of the hooks.
    unseen = 8 * S * (S + 8 + 2 * 16 * 4) if checkpointing else 0
    assert 0 <= kept - bytes_saved - log_probs.nbytes <= unseen

    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    forward(model, inputs, dtype).sum().backward()  # what is made only once is made now
    most = allocated(lambda: forward(model, inputs, dtype).sum().backward())
    # Kernels have scratch memory of their own, in bfloat16 more; it does not grow with the model.
    assert max(peaks) == pytest.approx(most, rel=0.02 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_kept_is_linear_in_the_micro_batch(checkpointing):
    model, _, _ = small(checkpointing=checkpointing)
    kept = {b: memory.micro_batch_bytes(model, 2, b, S, T, False)[0] for b in (2, 3, 5, 8)}
    each = kept[3] - kept[2]
    assert each > 0
    assert kept == {b: kept[2] + (b - 2) * each for b in kept}


@pytest.mark.parametrize("P", [1, 6, 1000])
def test_between_and_beyond_the_counted_sizes_estimates_are_close_and_not_too_low(P):
    model, shape, config = small()
    config.prompts_per_step = P
    estimate = memory.update_bytes(shape, config)
    for sequences in (3, 5, 6, 7, 11, 24, 40, 100):
        _, peaks = memory.micro_batch_bytes(model, min(P, sequences), sequences, S, T, False)
        peak = max(peaks)
        assert peak <= estimate(sequences) * 1.001
        assert estimate(sequences) == pytest.approx(peak, rel=0.05)


def test_checkpointed_layers_keep_no_bfloat16_weights():
    """Autocast keeps the copy that it makes of a weight, in case it is used again, to the end."""
    _, shape, config = small(checkpointing=True, dtype="bfloat16")
    models = [memory.fake_model(shape, config, layers) for layers in (2, 3)]
    (kept, (first, *_)), (more_kept, (last, *_)) = [
        memory.micro_batch_bytes(model, 2, 4, S, T, True) for model in models
    ]
    layer = sum(weight.numel() for weight in models[0].model.layers[0].parameters())
    assert last - first == more_kept - kept < 2 * layer


def test_a_prompt_that_is_read_once_needs_memory_once():
    """With 16 rollouts a prompt, and half of each row its prompt, hardly more than half."""
    model, _, _ = small()
    kept = {Q: memory.micro_batch_bytes(model, Q, 32, S, T, False)[0] for Q in (2, 32)}
    assert kept[2] < 0.66 * kept[32]


def test_checkpointing_needs_less():
    _, shape, config = small()
    checkpointed = memory.update_bytes(shape, small(checkpointing=True)[2])
    assert checkpointed(16) < 0.7 * memory.update_bytes(shape, config)(16)


@pytest.mark.parametrize(("kind", "rank", "checkpointing", "dtype"), CASES[::3])
def test_parameters_and_what_is_always_there_are_the_real_ones(kind, rank, checkpointing, dtype):
    model, shape, config = small(kind, rank, checkpointing, dtype)
    count, trained = memory.parameter_counts(shape, config)
    base = random_model(kind, 300, **(GPT2_WIDTHS if kind == "gpt2" else WIDTHS))
    assert count == base.num_parameters()
    assert trained == sum(w.numel() for w in model.parameters() if w.requires_grad)

    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad])
    forward(model, padded(2), dtype).sum().backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in state if key != "step"]
    real = {
        "weights": sum(weight.nbytes for weight in model.parameters()),
        "gradients": sum(w.grad.nbytes for w in model.parameters() if w.grad is not None),
        "AdamW's moments": sum(moment.nbytes for moment in moments),
    }
    assert memory.standing_bytes(count, trained, config) == real


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


@pytest.mark.parametrize(("several", "tied"), [(True, False), (False, True)])
def test_what_fsdp_gathers_is_what_the_allocator_gives(eight_processes, several, tied):
    """Against a real FSDP2 of eight processes, in which seven eighths of each weight are absent."""
    widths = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    model = random_model("qwen2", vocab_size=4000, tie_word_embeddings=tied, **widths)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    config = Config(gradient_checkpointing=True)
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    whole = sum(weight.nbytes for weight in model.parameters())
    root = whole - 6 * layer
    assert memory.gathered_bytes(model.config, config) == (root, 4 * layer)

    _, peaks = memory.micro_batch_bytes(model.train(), 2, 4, S, T, False)
    policy = eight_processes.wrap(logprobs.Policy(model), shard=True)
    planned = max(peaks) + root + 4 * layer + (0 if several else whole // 8)

    def micro_batch(last: bool) -> None:
        with eight_processes.gradients_sent(policy, last):
            policy(*padded(4), T).sum().backward()

    micro_batch(last=True)  # what is made only once is made now
    policy.zero_grad()
    if several:
        micro_batch(last=False)  # its gradients are there, and whole
    found = allocated(lambda: micro_batch(last=True))
    # Here a layer is sent for when it is needed, on a GPU while others are computed.
    assert planned - 4 * layer < found < planned


def test_the_kl_needs_a_second_model_unless_there_is_an_adapter():
    for rank, copied in ((0, True), (4, False)):
        _, shape, config = small(rank=rank, dtype="bfloat16")
        counts = memory.parameter_counts(shape, config)
        without = memory.standing_bytes(*counts, config)
        config.beta = 0.04
        added = sum(memory.standing_bytes(*counts, config).values()) - sum(without.values())
        assert added == (4 * counts[0] if copied else 0)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        (QWEN_3B, 3_085_938_688),
        (QWEN_7B, 7_615_616_512),
        (LLAMA_3B, 3_212_749_824),
    ],
)
def test_embedded_shapes_have_the_published_parameter_counts(name, count):
    shape = memory.architecture(name)
    assert memory.parameter_counts(shape, Config()) == (count, count)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_are_those_of_a_real_cache(kind, dtype):
    model, shape, config = small(kind, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        ids = torch.zeros(3, 10, dtype=torch.long)
        cache = model.eval()(input_ids=ids, use_cache=True).past_key_values
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    in_torch, in_vllm = memory.cache_bytes(shape, config)
    assert 3 * 10 * in_torch == sum(tensor.nbytes for tensor in tensors)
    width = 2 if dtype == "bfloat16" else 4
    assert 3 * 10 * in_vllm == sum(tensor.numel() * width for tensor in tensors)


@pytest.fixture
def folder(tmp_path):
    """The folder of a model, with no weights in it."""
    random_model("qwen2", vocab_size=300, **WIDTHS).config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_generation_by_vllm_is_bounded_by_its_share(folder):
    config = Config(model=folder, sampler="vllm", gpu_memory_utilization=0.5, n=64, m=4)
    shape = memory.architecture(folder)
    count, _ = memory.parameter_counts(shape, config)
    cache = 2 * LAYERS * 2 * 16 * 4 * 64  # keys and values, layers, heads, width, bytes, tokens
    # 8192 tokens between 64 and 176 wide are more than 256 sequences' tables of 300 logits.
    buffers = 4 * 8192 * (3 * 176 + 3 * 64) + 10**9
    room = 2 * (4 * count + buffers + 10 * cache)
    parts = memory.generation_bytes(shape, config, count, Machine("M", room))
    whole = {"vLLM weights": 4 * count, "vLLM buffers, CUDA graphs": buffers}
    assert parts == whole | {"vLLM cache: 10/256 rollouts": 10 * cache}
    parts = memory.generation_bytes(shape, config, count, Machine("M", 100 * room))
    assert "vLLM cache: 256/256 rollouts" in parts
    config.sampler = "torch"
    parts = memory.generation_bytes(shape, config, count, Machine("M", room))
    assert parts == {"cache of 256 rollouts": 256 * cache, "logits": 24 * 256 * 300}


def test_the_engines_buffers_on_the_papers_machines():
    """By hand: on an H100, 1,024 sequences' logits; on the others, of 256, or activations."""
    for name, expected in (
        ("gsm8k-qwen2.5-3b-h100", 1024 * 151_936 * 22),
        ("gsm8k-qwen2.5-7b-a100", 8192 * 3 * (18_944 + 3_584) * 2),
        ("gsm8k-qwen2.5-3b-l40s", 256 * 151_936 * 22),
    ):
        config, machine = Config(**PRESETS[name]), MACHINES[name]
        shape = memory.architecture(config.model)
        assert memory.engine_bytes(shape, config, machine) == expected + 10**9


def test_what_fsdp_gathers_of_the_largest_preset_by_hand():
    hidden, inner, heads, V = 3584, 18_944, 512, 152_064  # heads: the width of all keys
    attention = 2 * hidden * hidden + hidden + 2 * (hidden * heads + heads)
    layer = attention + 3 * hidden * inner + 2 * hidden
    config = Config(**PRESETS["gsm8k-qwen2.5-7b-a100"])
    found = memory.gathered_bytes(memory.architecture(config.model), config)
    assert found == (4 * (2 * V * hidden + hidden), 4 * 4 * layer)


# ---- where shapes come from ----------------------------------------------------------------------


def test_shape_of_a_folder_and_of_an_adapter(folder, tmp_path):
    assert memory.architecture(folder).num_hidden_layers == LAYERS
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{folder}"}}')
    assert memory.architecture(str(adapter)).num_hidden_layers == LAYERS


def test_the_embedded_policy_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert memory.architecture(Config.model).hidden_size == 128


@pytest.mark.parametrize("name", ["nobody/unknown-model", "no-such-folder"])
def test_unknown_model_offline_is_a_clear_error(name):
    with pytest.raises(ValueError, match=rf"--model {name}: no config.json .*give a model's"):
        memory.architecture(name)


def test_longest_sequence_stays_within_the_models_positions():
    shape = memory.architecture(Config.model)
    assert memory.longest(shape, Config()) == (32, 31)
    config = SimpleNamespace(max_prompt_tokens=6, max_new_tokens=20)
    assert memory.longest(shape, config) == (26, 20)
