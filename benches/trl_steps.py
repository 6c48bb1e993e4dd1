"""TRL's GRPOTrainer, run step by step on our policy and problems, with a clock. Needs trl==1.16.0.

steps = measure(config, max_new_tokens, prompts, answers, count=8, in_between=one_of_ours)
steps.total, steps.generate             # seconds of each step
steps.rollouts, steps.gradient          # of the first one
"""

import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import transformers
import trl
from datasets import Dataset
from torch.nn.utils import parameters_to_vector
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, TrainerCallback

from rewards import score
from support.models import EMBEDDED
from support.settings import Config

VERSION = trl.__version__


class Timed:
    """A model's class with this one before it keeps the seconds of each `generate`."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.seconds = []

    def generate(self, *args, **options):
        """As the model's own."""
        start = time.perf_counter()
        result = super().generate(*args, **options)
        self.seconds.append(time.perf_counter() - start)
        return result


class Steps(TrainerCallback):
    """Times TRL's steps, keeps what its first one did, and gives way after each.

    Attributes:
        total: seconds of each step.
        generate: of these, inside the model's `generate`.
        rollouts: the first step's `prompts`, completion `ids` and `rewards`, row by row.
        gradient: the first step's, as one vector.
    """

    def __init__(self, model: Timed, in_between: Callable[[], object]) -> None:
        self.generate, self.in_between = model.seconds, in_between
        self.total, self.rollouts, self.gradient = [], None, None

    def reward(self, prompts, completions, completion_ids, answer, **_) -> list[float]:
        """TRL's reward function: train.py's rewards."""
        rewards = score(completions, answer)["total"]
        if self.rollouts is None:
            self.rollouts = {"prompts": prompts, "ids": completion_ids, "rewards": rewards}
        return rewards

    def on_step_begin(self, *_, **__) -> None:
        """TRL calls this before it generates."""
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, *_, model=None, **__) -> None:
        """TRL calls this when the gradient is complete."""
        if self.gradient is None:
            self.gradient = parameters_to_vector(p.grad for p in model.parameters())

    def on_step_end(self, *_, **__) -> None:
        """TRL calls this when the weights are new."""
        self.total.append(time.perf_counter() - self.start)
        self.in_between()


def measure(
    config: Config,
    max_new_tokens: int,
    prompts: Sequence[str],
    answers: Sequence[str],
    count: int,
    in_between: Callable[[], object],
) -> Steps:
    """`count` steps of TRL with our settings.

    Args:
        config: of train.py's step; n = m.
        prompts, answers: P for each step, in order; the prompts rendered, as the model reads them.
        in_between: called after each step, off the clock.
    """
    path = EMBEDDED.get(config.model, config.model)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(transformers.AutoConfig.from_pretrained(path))]
    model = type("Policy", (Timed, kind), {}).from_pretrained(path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    problems = [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]
    steps = Steps(model, in_between)
    rows = micro_batch(config)
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=config.prompts_per_step * config.n // rows,
            num_generations=config.n,
            max_completion_length=max_new_tokens,
            max_steps=count,
            temperature=config.temperature,
            learning_rate=config.lr,
            adam_beta2=config.adam_beta2,
            max_grad_norm=config.max_grad_norm,
            loss_type=config.loss_type,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=steps.reward,
            args=settings,
            train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer,
            callbacks=[steps],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return steps


def micro_batch(config: Config) -> int:
    """The rows of a pass: TRL wants no more than there are."""
    return min(config.micro_batch, config.prompts_per_step * config.n)
