"""What can only be found out by trying, tried before step 0: saving and sampling.

    rehearsal = Rehearsal(run)          # an error in one line, or nothing
    rehearsal.after(step, row)          # after every step: the sampler still is the trainer's

A sampler computes the trainer's policy with a cache, or in another program. Both give log-probs of
the sampled tokens, which differ by 1e-6 in float32 where all is well, and by 0.5 where a recurrent
layer has lost its state, or an engine acts on old weights. So no list of architectures is needed.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from logprobs import Policy
from support.errors import InputError, explained, say
from support.run import Run
from support.settings import Config
from support.storage import save_model

# The mean |sampler's - trainer's log-prob| that rounding explains, and the one that stops a run.
# In float32 on a GPU vLLM has one attention kernel, in Triton, and its products are TF32: emulated
# on SmolLM2-135M, the mean was 0.9e-3 to 1.7e-3.
BOUND = {"float32": 1e-4, "TF32": 3e-3, "bfloat16": 5e-2}
FAR = {"float32": 1e-3, "TF32": 2e-2, "bfloat16": 0.15}
TOKENS = 16  # of each completion that is tried


def precision(config: Config, device: str) -> str:
    """What sampler and trainer compute in: the rougher of the two."""
    in_tf32 = (config.sampler, device, config.dtype) == ("vllm", "cuda", "float32")
    return "TF32" if in_tf32 else config.dtype


class Rehearsal:
    """Tries once what the run, training or evaluating, is about to do for hours.

    Raises InputError, here and in `after`, if sampler and trainer are two policies.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.synced, self.warned = run, False, False
        self.precision = precision(run.config, run.model.device.type)
        if self.precision == "TF32":
            say(f"float32 with vLLM on a GPU is TF32: log-probs may be {BOUND['TF32']:g} apart")
        self._compare("before the first step")
        if run.learner:
            with tempfile.TemporaryDirectory() as folder:  # everything except the weights
                save = partial(save_model, run.model, run.tokenizer, Path(folder, "model"), {})
                run.processes.on_first(save)

    def after(self, step: int, row: dict) -> None:
        """Compare again after the first update, when an engine may act on old weights; then watch
        the gap in each `row` of metrics.jsonl.
        """
        if not self.synced:
            self.synced = True
            self._compare("after the first update")
        gap, bound = row["logprob_gap"]["mean"], BOUND[self.precision]
        if gap is not None and gap > bound and not self.warned and self.run.processes.first:
            self.warned = True
            message = f"step {step}: the sampler's log-probs are {gap:.2g} from the trainer's, "
            message += f"more than the {bound:g} that rounding explains (logprob_gap)"
            tqdm.write(message, file=sys.stderr)

    @torch.no_grad()
    def _compare(self, when: str) -> None:
        run, config = self.run, self.run.config
        dtype, T = getattr(torch, config.dtype), min(TOKENS, run.max_new_tokens)
        data = run.train_data if run.learner else next(iter(run.eval_data.values()))
        by_length = sorted(data.prompt_ids, key=len)
        two = [by_length[0], by_length[len(by_length) // 2]]  # with luck, one of them is padded
        policy = run.learner.policy if run.learner else Policy(run.model, dtype)
        name = f"--model {config.model} ({run.model.config.model_type}), --sampler {config.sampler}"
        try:
            run.sampler.sync(run.model)  # as after every update
            rollouts = run.sampler.generate(two, 2, T, config.temperature, seed=0)
            mask = rollouts.mask.flatten(0, 1)  # [4, T]
            log_probs = policy(*rollouts.sequences(), mask.shape[1], config.temperature)  # [4, T]
        except Exception as error:
            if explained(error):  # out of memory, for example
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise InputError(f"{name}: cannot be sampled from or trained: {reason}") from error
        if isinstance(policy, FSDPModule):
            policy.reshard()  # it keeps its outermost weights gathered for a backward pass
        off = (log_probs - rollouts.log_probs.flatten(0, 1)).abs()[mask].mean().item()
        off = max(run.processes.gather(off))
        if not off <= FAR[self.precision]:
            raise InputError(
                f"{name}: sampler and trainer are two policies {when}: mean difference of "
                f"log-probs {off:.2g}, in {self.precision} at most {BOUND[self.precision]:g}"
            )
