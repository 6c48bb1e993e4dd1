"""Is train.py slower than the trainer that people use? One step of TRL and one of ours, in turn.

    pip install trl==1.16.0
    python bench.py peers
    python bench.py peers --model DIR --task gsm8k --data DIR --n 16 --prompts 1 --max-new-tokens 48

Legend: P prompts, n rollouts each, all of them trained on.
"""

import argparse
import statistics

import torch
from torch.nn.utils import parameters_to_vector

import train
from benches.measure import ratio, table
from grpo import group_advantages
from rollouts import eos_token_ids, pack
from support.errors import InputError
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.run import Run
from support.settings import Config


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument(
        "--n", type=int, default=64, help="rollouts a prompt, all of them trained on"
    )
    parser.add_argument("--prompts", type=int, default=4, help="P")
    parser.add_argument("--model", default=Config.model, help="folder or hub name")
    parser.add_argument("--task", default=Config.task, help="where the prompts come from")
    parser.add_argument("--data", help="folder with the task's train.jsonl and test.jsonl")
    parser.add_argument("--max-new-tokens", type=int, help="at most; default: as train.py")


def peers(arguments: argparse.Namespace) -> dict:
    """One optimisation step of TRL's GRPOTrainer (1.16.0) and of train.py, step by step in turn.

    The same policy, prompts, n = m, micro-batch, loss ("dapo"), temperature and optimizer settings;
    plain PyTorch generation in both. Generation is the time inside the model's `generate` for TRL,
    the sampler's for train.py; the rest is scoring, update and bookkeeping. The first step of both
    is left out. At that step, and on TRL's own rollouts, both gradients are also compared: the
    cosine between them should be above 0.999, or the two do not do the same work.
    """
    try:
        from benches import trl_steps
    except ImportError as error:
        raise InputError("peers compares with TRL: pip install trl==1.16.0") from error
    n, steps = arguments.n, arguments.rounds + 1
    names = ("model", "task", "data", "max_new_tokens", "threads")
    given = {name: getattr(arguments, name) for name in names}
    config = Config(n=n, m=n, prompts_per_step=arguments.prompts, eval_problems=16, **given)
    run, ours = Run(config), []
    prompts, answers, lengths = [], [], []
    for problems, prompt_ids in map(run.prompts, range(1, steps + 1)):
        prompts += map(run.tokenizer.decode, prompt_ids)
        answers += [problem.answer for problem in problems]
        lengths += map(len, prompt_ids)
        if run.tokenizer(prompts[-len(problems) :])["input_ids"] != prompt_ids:
            raise InputError("this model's prompts, as text, are not the same tokens to TRL")

    def one_of_ours() -> None:
        """Our step, after each of TRL's."""
        row, _ = train.train_step(run, len(ours) + 1)
        ours.append(row)

    theirs = trl_steps.measure(config, run.max_new_tokens, prompts, answers, steps, one_of_ours)
    gradient = our_gradient(config, run.max_new_tokens, theirs.rollouts)
    cosine = None
    if gradient is not None:
        # In float32 the cosine of two equal vectors can come out above 1.
        cosine = torch.cosine_similarity(gradient.double(), theirs.gradient.double(), dim=0).item()
    # The first step of each warms up.
    times = {
        "train.py total": [sum(row["seconds"].values()) for row in ours[1:]],
        "train.py generate": [row["seconds"]["generate"] for row in ours[1:]],
        "TRL total": theirs.total[1:],
        "TRL generate": theirs.generate[1:],
    }
    P, micro_batch = config.prompts_per_step, trl_steps.micro_batch(config)
    rows = step_rows(times)
    sizes = f"P={P}, n = m = {n}, prompts of {min(lengths)} to {max(lengths)} tokens"
    print(table(f"one step of {config.model}, {sizes}, micro-batch {micro_batch}", rows))
    if cosine is None:
        print("no gradients to compare: at the first step all rewards of a group are equal")
    else:
        print(f"cosine of the two gradients on the same rollouts: {cosine:.6f}")
    idle = sum(row["groups_without_signal"] for row in ours[1:])
    print(f"groups without signal, not computed by train.py: {idle} of {P * arguments.rounds}")
    result = {"trl": trl_steps.VERSION, "model": config.model, "cosine": cosine, "rows": rows}
    return result | {"groups_without_signal": idle}


def our_gradient(config: Config, max_new_tokens: int, rollouts: dict) -> torch.Tensor | None:
    """Our gradient, as one vector, on TRL's first rollouts, from the same weights.

    None if those rollouts have none, because in each group all are equally good.
    """
    model, tokenizer = load_model(config.model)
    prompts = [tokenizer(text)["input_ids"] for text in rollouts["prompts"][:: config.n]]
    ids = rollouts["ids"]
    zeros = [[0.0] * len(row) for row in ids]  # log-probs that one step does not look at
    kept = pack(prompts, ids, zeros, eos_token_ids(model, tokenizer), tokenizer, model.device)
    rewards = torch.tensor(rollouts["rewards"], dtype=torch.float64).view(-1, config.n)  # [P, n]
    learner = Learner(model, config, Processes())
    stats = train.update(learner, kept, group_advantages(rewards), max_new_tokens)
    return None if stats["skipped"] else parameters_to_vector(p.grad for p in model.parameters())


def step_rows(times: dict[str, list[float]]) -> list[dict]:
    """Seconds of a step, generation and the rest apart.

    Args:
        times: `total` and `generate` of "TRL" and "train.py", round by round.
    """
    times = dict(times)
    for name in ("train.py", "TRL"):
        pairs = zip(times[f"{name} total"], times[f"{name} generate"], strict=True)
        times[f"{name} rest"] = [total - generate for total, generate in pairs]
    rows = []
    for part in ("generate", "rest", "total"):
        row = {"part": part}
        row |= {f"{n} s": statistics.median(times[f"{n} {part}"]) for n in ("TRL", "train.py")}
        rows.append(row | {"TRL / train.py": ratio(times, f"TRL {part}", f"train.py {part}")})
    return rows
