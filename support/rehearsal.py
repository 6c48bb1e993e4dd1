"""What can only be found out by trying, tried before step 0: saving, sampling, scoring.

    rehearsal = Rehearsal(run)          # an InputError in one line, or nothing
    rehearsal.after(step, row)          # after every step: the sampler still is the trainer's

A sampler computes the trainer's policy by other means: with a cache, or in another program. Whether
it really does is seen from numbers that both give: the log-probs of a few sampled tokens. They
differ by 1e-6 in float32 where all is well, and by 0.5 where a recurrent layer has lost its state,
an engine has other kernels for an architecture, or acts on old weights. So no list of supported
architectures is needed.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from tqdm import tqdm
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from logprobs import positions
from rollouts import Rollouts
from support.errors import InputError, explained, say
from support.files import save_model
from support.run import Run
from support.settings import Config

# The mean |sampler's - trainer's log-prob| that rounding explains, and the one that stops a run.
# In float32 on a GPU vLLM has one attention kernel, in Triton, and its products are TF32: emulated
# on SmolLM2-135M, the mean was 0.9e-3 to 1.7e-3.
BOUND = {"float32": 1e-4, "TF32": 3e-3, "bfloat16": 5e-2}
FAR = {"float32": 1e-3, "TF32": 2e-2, "bfloat16": 0.15}
TOKENS = 16  # of each completion that is tried
Result = TypeVar("Result")


@contextmanager
def evaluating(model: nn.Module, dtype: str) -> Iterator[None]:
    """The model in evaluation mode, computing as the policy does, as long as the context lasts."""
    training, bfloat16 = model.training, dtype == "bfloat16"
    model.eval()
    try:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bfloat16):
            yield
    finally:
        model.train(training)


def precision(config: Config, device: str) -> str:
    """What sampler and trainer compute in, of the two the rougher."""
    in_tf32 = config.sampler == "vllm" and device == "cuda" and config.dtype == "float32"
    return "TF32" if in_tf32 else config.dtype


class Rehearsal:
    """Tries once what the run is about to do for hours.

    Args:
        run: with a learner; without one (evaluation) sampling alone is tried.

    Raises:
        InputError: the model cannot be saved, sampled from or scored, or the sampler's policy is
            not the trainer's.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.synced, self.warned = run, False, False
        self.precision = precision(run.config, run.model.device.type)
        if self.precision == "TF32":
            say(
                "--dtype float32: vLLM's attention on a GPU multiplies in TF32, so its log-probs "
                f"may be {BOUND['TF32']:g} from the trainer's; with bfloat16 it is faster"
            )
        if run.config.sampler == "torch":
            self._try("be sampled from", self._check_cache)
        rollouts = self._try("be sampled from", self._sample)
        if run.learner:
            run.processes.on_first(self._check_saving)
            self._compare(rollouts, "before the first step")

    def after(self, step: int, row: dict) -> None:
        """Compare again after the first update, when an engine may act on old weights; then watch.

        Raises:
            InputError: the sampler did not take the new weights.
        """
        if not self.synced:
            self.synced = True
            self._compare(self._sample(), "after the first update")
        gap, bound = row["logprob_gap"]["mean"], BOUND[self.precision]
        if gap is not None and gap > bound and not self.warned and self.run.processes.first:
            self.warned = True
            message = f"step {step}: the sampler's log-probs are {gap:.2g} from the trainer's, "
            message += f"more than the {bound:g} that rounding explains (logprob_gap)"
            tqdm.write(message, file=sys.stderr)

    def _try(self, purpose: str, work: Callable[[], Result]) -> Result:
        """The work's result, or an InputError that says what the model cannot."""
        config = self.run.config
        try:
            return work()
        except InputError:
            raise
        except Exception as error:
            known = explained(error)
            lost = "logits are not finite" in str(error)
            if known and not lost:
                raise
            reason = " ".join(str(error).split())[:200]
            reason = "it gives no probabilities" if lost else f"{type(error).__name__}: {reason}"
            other = " or try --sampler torch" if config.sampler == "vllm" else ""
            raise InputError(
                f"--model {config.model} ({self._kind()}) cannot {purpose} with --sampler "
                f"{config.sampler}: {reason}; choose another model{other}"
            ) from error

    def _kind(self) -> str:
        """The name of the model's class."""
        model = self.run.model
        return type(model.get_base_model() if self.run.config.lora_rank else model).__name__

    @torch.no_grad()
    def _check_cache(self) -> None:
        """Raise ValueError unless all that the model remembers of a prompt is keys and values.

        `TorchSampler` copies rows of the cache, and gives each a position. The state of a recurrent
        layer has none.
        """
        model = self.run.sampler.model
        ids = torch.tensor([self._prompts()[0]], device=model.device)  # [1, L]
        # With its config a model gets a cache that fits it, whatever its layers keep.
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        recurrent = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
        if not any(recurrent):
            with evaluating(model, self.run.config.dtype):
                model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if any(recurrent) or not cache.get_seq_length():
            raise ValueError("it has layers that keep something else than keys and values")

    def _prompts(self) -> list[list[int]]:
        """The shortest prompt and one of the middle: of two lengths, where the task has them."""
        data = self.run.train_data if self.run.learner else next(iter(self.run.eval_data.values()))
        by_length = sorted(data.prompt_ids, key=len)
        return [by_length[0], by_length[len(by_length) // 2]]

    def _sample(self) -> Rollouts:
        """A few tokens, from weights that were sent as they are after every update."""
        run = self.run
        run.sampler.sync(run.model)
        length = min(TOKENS, run.max_new_tokens)
        return run.sampler.generate(self._prompts(), 2, length, run.config.temperature, seed=0)

    @torch.no_grad()
    def _compare(self, rollouts: Rollouts, when: str) -> None:
        """Raise InputError if sampler and trainer are two policies."""
        run, config = self.run, self.run.config
        ids, attention = rollouts.sequences()  # [B, L+T]
        mask = rollouts.mask.flatten(0, 1)  # [B, T]
        sampled, T = rollouts.log_probs.flatten(0, 1), mask.shape[1]  # [B, T]
        score = partial(run.learner.policy, ids, attention, T, config.temperature)
        trained = self._try("be trained", score)  # [B, T]
        run.processes.spread_again(run.learner.policy)
        gap = max(run.processes.gather((trained - sampled).abs()[mask].mean().item()))
        if gap <= FAR[self.precision]:
            return
        # A third opinion: the model's own forward pass, without a cache, in evaluation mode.
        model = run.model if config.sampler == "vllm" else run.sampler.model
        with evaluating(model, config.dtype):
            logits = model(
                input_ids=ids, attention_mask=attention, position_ids=positions(attention)
            ).logits  # [B, L+T, V]
        plain = (logits[:, -T - 1 : -1].float() / config.temperature).log_softmax(-1)
        plain = plain.gather(-1, ids[:, -T:, None])[..., 0]  # [B, T]
        off = {
            side: (values - plain).abs()[mask].mean().item()
            for side, values in ((f"--sampler {config.sampler}", sampled), ("the trainer", trained))
        }
        raise InputError(
            f"{when} sampler and trainer are two policies: --model {config.model} "
            f"({self._kind()}), mean difference of log-probs {gap:.2g}, in {self.precision} at "
            f"most {BOUND[self.precision]:g}; look at {max(off, key=off.get)}, "
            f"{max(off.values()):.2g} from a plain forward pass"
        )

    def _check_saving(self) -> None:
        """Raise InputError if what is no weight cannot be written, which is tried for once."""
        run = self.run
        with tempfile.TemporaryDirectory() as folder:
            try:
                save_model(run.learner.model, run.tokenizer, Path(folder, "model"), {})
            except OSError as error:
                raise InputError(f"--model {run.config.model} cannot be saved: {error}") from error
