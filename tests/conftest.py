"""Shared by all tests: no network, one thread (the fastest for tiny models), and what many need."""

import json
import multiprocessing
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# For the programs that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONFAULTHANDLER"] = "1"  # where a crashed one was
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

import train
from grpo import group_advantages
from logprobs import token_log_probs
from rollouts import Rollouts
from support.adapters import add_lora
from support.run import Run
from support.settings import Config, flag
from support.tasks import sums

torch.set_num_threads(1)
# Started in the background or by nohup, a process ignores these signals, and so do the programs
# that it starts: train.py would rightly ignore what the tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ROOT = Path(__file__).parents[1]


# ---- models --------------------------------------------------------------------------------------

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
SIZES_OF = {
    "gpt2": SIZES | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": SIZES | dict(intermediate_size=64, num_key_value_heads=2),
    "qwen2": SIZES | dict(intermediate_size=64, num_key_value_heads=2),
}


def random_model(kind: str, vocab_size: int = 19, seed: int = 0, **options) -> PreTrainedModel:
    """A tiny untrained model, without dropout, whose predictions are far from uniform."""
    torch.manual_seed(seed)
    tokens = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 0}
    options = SIZES_OF[kind] | {"initializer_range": 0.2} | options
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **tokens, **options))


def adapted(kind: str, seed: int = 0, **options):
    """A random model, and the same one with an adapter that has learned something."""
    plain, wrapped = random_model(kind, **options), add_lora(random_model(kind, **options), 4, seed)
    learned_something(wrapped, seed)
    return plain, wrapped


@torch.no_grad()
def learned_something(model, seed: int = 0) -> None:
    """Fill an adapter's B, which is 0 at first."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.1, generator=generator)


def log_probs(model) -> torch.Tensor:
    """Log-probs of two fixed sequences: equal for two models, if they are the same policy."""
    ids = torch.randint(1, 19, (2, 12), generator=torch.Generator().manual_seed(1))
    return token_log_probs(model, ids, torch.ones_like(ids), 7)


def batch(lengths=((3, 6), (7, 2), (1, 4)), vocab_size=19):
    """Sequences of (prompt, completion) tokens: ids, attention mask, completion mask."""
    L, T = map(max, zip(*lengths))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab_size, (len(lengths), L + T), generator=generator)
    column = torch.arange(L + T)
    attention = torch.stack([(column >= L - p) & (column < L + t) for p, t in lengths])
    return ids, attention, attention[:, L:]


def full_log_probs(model, ids, attention, T, temperature):
    """The obvious way: all logits of every row without its padding, softmaxed, then picked."""
    result = torch.zeros(len(ids), T)
    for row in range(len(ids)):
        real = ids[row][attention[row]]
        log_probs = (model(real[None]).logits[0].float() / temperature).log_softmax(-1)
        scores = log_probs[:-1].gather(-1, real[1:, None])[:, 0]  # the logit at t scores t + 1
        completion = int(attention[row, -T:].sum())
        result[row, :completion] = scores[-completion:]
    return result


def trained_weights(model) -> dict[str, torch.Tensor]:
    return {name: w.detach() for name, w in model.named_parameters() if w.requires_grad}


class Words:
    """The least of a tokenizer: token 0 ends and pads, text is the ids in a row."""

    eos_token_id = pad_token_id = 0

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture(params=["qwen2", "llama", "gpt2"])
def model(request) -> PreTrainedModel:
    """Rotary positions with and without biases and tied embeddings, and learned ones."""
    return random_model(request.param)


# ---- small runs ----------------------------------------------------------------------------------


def write_sums(path: Path, problems: Iterable[tuple[str, str]]) -> str:
    """A task file of these prompts and answers; returns its name."""
    rows = [{"question": prompt, "answer": answer} for prompt, answer in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# A part of the default task: rendering all of it takes longer than a small run.
FOLDER = tempfile.TemporaryDirectory()
TASK = write_sums(Path(FOLDER.name, "sums.jsonl"), sums()[::27])
SMALL = dict(task=TASK, n=8, m=4, prompts_per_step=2, steps=6, save_every=2)
SMALL |= dict(eval_problems=16, eval_every=3)


def small(**changes) -> Config:
    """The settings of a run of a second or two."""
    return Config(**SMALL | changes)


def flags(**changes) -> list[str]:
    """The same settings as command line flags."""
    return [part for name, value in (SMALL | changes).items() for part in (flag(name), str(value))]


def fixed_batch(run: Run, rewards: Sequence[Sequence[float]]) -> tuple[Rollouts, torch.Tensor]:
    """Rollouts of the first step's prompts with rewards that we choose, and their advantages."""
    _, prompt_ids = run.prompts(1)
    rollouts = run.sampler.generate(prompt_ids, len(rewards[0]), run.max_new_tokens, 1.0, seed=0)
    return rollouts, group_advantages(torch.tensor(rewards))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of one uninterrupted small run. Look only: many tests share it."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    train.train(small(), out)
    return out


# ---- what a run has left -------------------------------------------------------------------------


def metrics(out: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The rows of a JSONL file as a reader sees them that knows JSON, which has no NaN."""
    lines = (out / name).read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def without_times(out: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl but for what the clock says."""
    return [{k: v for k, v in row.items() if k not in ("time", "seconds")} for row in metrics(out)]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "model").state_dict()


def assert_same_run(out: Path, expected: Path) -> None:
    """Numbers, what was written and weights are equal to the bit."""
    assert without_times(out) == without_times(expected)
    for name in ("groups.jsonl", "rollouts.jsonl", "evaluation.jsonl"):
        assert (out / name).read_text() == (expected / name).read_text()
    assert_equal(weights_of(out), weights_of(expected))


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


# ---- programs ------------------------------------------------------------------------------------


@pytest.fixture
def in_background():
    """Starts train.py in a process that need not import everything first, to be killed."""
    started = []

    def start(*arguments: object) -> multiprocessing.Process:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train"])
        started.append(context.Process(target=train.main, args=([*map(str, arguments)],)))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def run_command(arguments: Sequence[object], **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*map(str, arguments)], capture_output=True, text=True, timeout=900, check=False, **options
    )


def wait_for(condition, process, seconds: float = 120) -> None:
    """Wait until the condition holds; fail if the process ends before, or time runs out."""
    end = time.monotonic() + seconds
    while not condition():
        popen = isinstance(process, subprocess.Popen)
        assert process.poll() is None if popen else process.is_alive(), "it has ended"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def has_logged(out: Path, rows: int):
    """A condition for `wait_for`: so many rows are in metrics.jsonl."""
    path = out / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= rows


# ---- model folders and tokenizers ---------------------------------------------------------------


def edit(path: Path, **changes) -> None:
    """Change entries of a JSON file; None removes one."""
    entries = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in entries.items() if value is not None}
    path.write_text(json.dumps(kept))


def text_tokenizer(template: str | None = None, **special) -> PreTrainedTokenizerFast:
    """One token for each byte and special token: 256 and `<|end|>`, `<|im_end|>`, `<unk>`."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im_end|>", "<unk>"])
    options = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": template} | special
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
