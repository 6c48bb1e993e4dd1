"""Is train.py slower than the trainer that people use? One step of TRL and one of ours, in turn.

    pip install trl==1.16.0
    python bench.py peers
    python bench.py peers -- --model DIR --task gsm8k --n 16 --m 16 --prompts-per-step 1

Legend: P prompts, n = m rollouts each.
"""

import argparse
import statistics
import tempfile
import time

import torch
import transformers
from torch.nn.utils import parameters_to_vector

import train
from benches.measure import OTHERS, ratio, table, train_settings
from grpo import group_advantages
from rewards import score
from rollouts import eos_token_ids, pack
from support.errors import InputError
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.run import Run
from support.settings import Config

DEFAULT = ("--n", "64", "--m", "64", "--eval-problems", "16")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")


def peers(arguments: argparse.Namespace) -> dict:
    """One optimisation step of TRL's GRPOTrainer (1.16.0) and of train.py, step by step in turn.

    The same policy, prompts, n = m, micro-batch, loss, temperature and optimizer settings; plain
    PyTorch generation in both. The first step of both is left out. On its rollouts both gradients
    are also compared: the cosine between them should be above 0.999, or the two do not do the same
    work.
    """
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        raise InputError("peers compares with TRL: pip install trl==1.16.0") from error
    config, steps = train_settings(arguments, *DEFAULT), arguments.rounds + 1
    run, ours, theirs, first = Run(config), [], [], {}
    rows = min(config.micro_batch, config.prompts_per_step * config.n)  # of a pass
    asked = [pair for step in range(steps) for pair in zip(*run.prompts(step + 1))]
    texts = [run.tokenizer.decode(ids) for _, ids in asked]
    if run.tokenizer(texts)["input_ids"] != [ids for _, ids in asked]:
        raise InputError("this model's prompts, as text, are not the same tokens to TRL")
    problems = [{"prompt": text, "answer": one.answer} for text, (one, _) in zip(texts, asked)]

    def reward(prompts, completions, completion_ids, answer, **_) -> list[float]:
        rewards = score(completions, answer)["total"]
        if not first:
            first.update(prompts=prompts, ids=completion_ids, rewards=rewards)
        return rewards

    class InTurn(transformers.TrainerCallback):
        """Times TRL's steps, and makes one of ours after each."""

        def on_step_begin(self, *_, **__) -> None:
            self.start = time.perf_counter()

        def on_pre_optimizer_step(self, *_, model=None, **__) -> None:
            if "gradient" not in first:
                first["gradient"] = parameters_to_vector(p.grad for p in model.parameters())

        def on_step_end(self, *_, **__) -> None:
            theirs.append(time.perf_counter() - self.start)
            row, _ = train.train_step(run, len(ours) + 1)
            ours.append(sum(row["seconds"].values()))
            OTHERS.look()

    model, tokenizer = load_model(config.model)
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=config.prompts_per_step * config.n // rows,
            num_generations=config.n,
            max_completion_length=run.max_new_tokens,
            max_steps=steps,
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
            model,
            reward,
            settings,
            callbacks=[InTurn()],
            train_dataset=Dataset.from_list(problems),
            processing_class=tokenizer,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    cosine, gradient = None, our_gradient(config, run.max_new_tokens, first)
    if gradient is not None:
        # In float32 the cosine of two equal vectors can come out above 1.
        cosine = torch.cosine_similarity(gradient.double(), first["gradient"].double(), 0).item()
    times = {"TRL": theirs[1:], "train.py": ours[1:]}  # the first step of each warms up
    row = {f"{name} s": statistics.median(seconds) for name, seconds in times.items()}
    row |= {"TRL / train.py": ratio(times, "TRL", "train.py"), "cosine of gradients": cosine}
    print(table(f"one step of {config.model}, P={config.prompts_per_step}, n={config.n}", [row]))
    return {"trl": trl.__version__, "model": config.model, "rows": [row]}


def our_gradient(config: Config, longest: int, theirs: dict) -> torch.Tensor | None:
    """Our gradient, as one vector, on TRL's first rollouts; None if no group has a signal."""
    model, tokenizer = load_model(config.model)
    prompts = [tokenizer(text)["input_ids"] for text in theirs["prompts"][:: config.n]]
    zeros = [[0.0] * len(row) for row in theirs["ids"]]  # log-probs that one step does not look at
    eos_ids = eos_token_ids(model, tokenizer)
    kept = pack(prompts, theirs["ids"], zeros, eos_ids, tokenizer, model.device)
    rewards = torch.tensor(theirs["rewards"], dtype=torch.float64).view(-1, config.n)  # [P, n]
    learner = Learner(model, config, Processes())
    stats = train.update(learner, kept, group_advantages(rewards), longest)
    return None if stats["skipped"] else parameters_to_vector(p.grad for p in model.parameters())
