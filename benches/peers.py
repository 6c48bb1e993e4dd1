"""Is train.py slower than the trainer that people use? One step of TRL and one of ours, in turn.

    pip install trl==1.16.0
    python bench.py peers
    python bench.py peers -- --model DIR --task gsm8k --n 16 --m 16 --prompts-per-step 1

Legend: P prompts, n = m rollouts each.
"""

import argparse
import statistics
import time

import torch
import transformers
from torch.nn.utils import parameters_to_vector

import train
from benches.measure import OTHERS, ratio, table, train_settings
from grpo import group_advantages
from rewards import score
from rollouts import pack
from support.errors import InputError
from support.learner import Learner
from support.models import load_model
from support.run import Run

DEFAULT = ("--n", "64", "--m", "64", "--eval-problems", "16")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")


def peers(arguments: argparse.Namespace) -> dict:
    """One optimisation step of TRL's GRPOTrainer (1.16.0) and of train.py, step by step in turn.

    The same policy, prompts, n = m, micro-batch, loss, temperature and optimizer settings; plain
    PyTorch generation in both. On the first step's rollouts both gradients are compared: a cosine
    below 0.999 would mean that the two do not do the same work.
    """
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        raise InputError("peers compares with TRL: pip install trl==1.16.0") from error
    turns = InTurn(run := Run(train_settings(arguments, *DEFAULT)))
    steps, config = arguments.rounds + 1, run.config
    asked = [pair for step in range(steps) for pair in zip(*run.prompts(step + 1))]
    texts = [run.tokenizer.decode(ids) for _, ids in asked]
    if run.tokenizer(texts)["input_ids"] != [ids for _, ids in asked]:
        raise InputError("this model's prompts, as text, are not the same tokens to TRL")
    problems = [{"prompt": text, "answer": one.answer} for text, (one, _) in zip(texts, asked)]
    args = trl.GRPOConfig(arguments.out, max_steps=steps, **settings_of(run))
    model, tokenizer = load_model(config.model)
    data = {"train_dataset": Dataset.from_list(problems), "processing_class": tokenizer}
    trainer = trl.GRPOTrainer(model, turns.reward, args, callbacks=[turns], **data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    times = {name: seconds[1:] for name, seconds in turns.times.items()}  # the first warms up
    row = {f"{name} s": statistics.median(seconds) for name, seconds in times.items()}
    row |= {"TRL / train.py": ratio(times, "TRL", "train.py")}
    row["cosine of gradients"] = cosine_of_gradients(turns)
    print(table(f"one step of {config.model}, P={config.prompts_per_step}, n={config.n}", [row]))
    return {"trl": trl.__version__, "model": config.model, "rows": [row]}


def settings_of(run: Run) -> dict[str, object]:
    """A run's settings as GRPOConfig calls them."""
    config, rows = run.config, run.config.prompts_per_step * run.config.n
    same = ("temperature", "adam_beta2", "max_grad_norm", "loss_type")
    found = {name: getattr(config, name) for name in same}
    found |= {"learning_rate": config.lr, "lr_scheduler_type": "constant"}
    found |= {"num_generations": config.n, "max_completion_length": run.max_new_tokens}
    found["per_device_train_batch_size"] = batch = min(config.micro_batch, rows)
    found |= {"gradient_accumulation_steps": rows // batch, "shuffle_dataset": False}
    found |= {"bf16": False, "gradient_checkpointing": False}
    found |= {"use_cpu": not torch.cuda.is_available(), "disable_tqdm": True}
    return found | {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}


class InTurn(transformers.TrainerCallback):
    """Times TRL's steps, makes one of ours after each; keeps TRL's first rollouts and gradient."""

    def __init__(self, run: Run) -> None:
        self.run, self.times = run, {"TRL": [], "train.py": []}  # seconds of each step
        self.rollouts = self.gradient = None

    def reward(self, prompts, completions, completion_ids, answer, **_) -> list[float]:
        """Our rewards, for TRL's rollouts."""
        rewards = score(completions, answer)["total"]
        self.rollouts = self.rollouts or (prompts, completion_ids, rewards)
        return rewards

    def on_step_begin(self, *_, **__) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_pre_optimizer_step(self, *_, model=None, **__) -> None:
        """Keep the first step's gradient."""
        if self.gradient is None:
            self.gradient = parameters_to_vector(p.grad for p in model.parameters())

    def on_step_end(self, *_, **__) -> None:
        """Stop the clock; a step of ours."""
        self.times["TRL"].append(time.perf_counter() - self.start)
        row, _ = train.train_step(self.run, len(self.times["TRL"]))
        self.times["train.py"].append(sum(row["seconds"].values()))
        OTHERS.look()


def cosine_of_gradients(turns: InTurn) -> float | None:
    """Of TRL's and ours on TRL's first rollouts; None if no group has a signal."""
    run, (texts, ids, rewards) = turns.run, turns.rollouts
    model, tokenizer = load_model(run.config.model)
    prompts = tokenizer(texts[:: run.config.n])["input_ids"]
    zeros = [[0.0] * len(row) for row in ids]  # log-probs that one step does not look at
    kept = pack(prompts, ids, zeros, run.sampler.eos_ids, tokenizer, model.device)
    rewards = torch.tensor(rewards, dtype=torch.float64).view(-1, run.config.n)  # [P, n]
    learner = Learner(model, run.config, run.processes)
    if train.update(learner, kept, group_advantages(rewards), run.max_new_tokens)["skipped"]:
        return None
    ours = parameters_to_vector(p.grad for p in model.parameters())
    # In float32 the cosine of two equal vectors can come out above 1.
    return torch.cosine_similarity(ours.double(), turns.gradient.double(), 0).item()
