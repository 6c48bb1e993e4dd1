"""What test_two_processes.py runs in two processes at once; everyone's findings go to OUT/found.pt.

torchrun --standalone --nproc-per-node 2 -- tests/two_processes.py OUT TASK together|KIND
"""

import dataclasses
import io
import itertools
import os
import resource
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import train
from grpo import group_advantages
from logprobs import whole
from pods import down_sample
from rollouts import Rollouts, TorchSampler
from support.evaluation import evaluate
from support.learner import Learner
from support.models import load_model
from support.processes import Processes
from support.run import Run
from support.settings import Config, flag
from support.storage import Folder, Progress

# Four prompts' rewards, two prompts a process: all groups have a signal, or one process has none.
REWARDS = {
    "all": [
        [1.0, 0.0, 0.5, 0.0, 1.2],
        [0.2, 0.0, 0.2, 0.2, 1.0],
        [0.1, 0.1, 0.1, 0.1, 0.1],
        [0.0, 1.2, 0.2, 1.2, 0.0],
    ],
    "first": [[1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.0, 0.2, 0.2, 1.0], [0.2] * 5, [0.0] * 5],
    "second": [[0.2] * 5, [1.2] * 5, [1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.0, 0.2, 0.2, 1.0]],
}
PROMPTS = ["47+85=", "10+16=", "99+99=", "58+67="]
CASES = [
    {"loss_type": loss_type, "micro_batch": micro_batch, "rewards": rewards, "beta": beta}
    for loss_type in ("grpo", "dapo", "dr_grpo")
    for micro_batch in (3, 64)
    for rewards in REWARDS
    for beta in (0.0, 0.5)
]
KINDS = {
    "whole": {},
    "--shard": {"shard": True},
    "--shard, adapter": {"shard": True, "lora_rank": 4},
}
T = 26  # tokens of a completion at most


def model_and_rollouts() -> tuple[PreTrainedModel, Rollouts]:
    """The tiny policy, and five rollouts of each prompt."""
    model, tokenizer = load_model("tiny_policy")
    prompts = tokenizer(PROMPTS)["input_ids"]
    return model, TorchSampler(model, tokenizer).generate(prompts, 5, T, 1.0, seed=0)


def learner_and_rollouts(config: Config) -> tuple[Learner, Rollouts]:
    """A policy a little away from its reference, and the rollouts."""
    model, rollouts = model_and_rollouts()
    learner = Learner(model, config, Processes())
    with torch.no_grad():
        for weight in learner.model.parameters():
            if weight.requires_grad:
                weight.mul_(1.02).add_(0.005)
    return learner, rollouts


def part(rollouts: Rollouts, mine: slice) -> Rollouts:
    fields = dataclasses.fields(Rollouts)
    return Rollouts(**{field.name: getattr(rollouts, field.name)[mine] for field in fields})


def gradients(mine: slice, **settings) -> tuple[list[dict], dict]:
    """The gradient of every case, this process having the groups `mine`; then the weights after
    a real update of two epochs, clipped."""
    config = Config(n=5, m=5, max_grad_norm=1e9, beta=0.5, **settings)
    learner, rollouts = learner_and_rollouts(config)
    kept, found = part(rollouts, mine), []
    (group,) = learner.optimizer.param_groups
    group["lr"] = 0.0  # the gradient only
    for case in CASES:
        changes = {name: value for name, value in case.items() if name != "rewards"}
        learner.config = dataclasses.replace(config, **changes)
        advantages = group_advantages(torch.tensor(REWARDS[case["rewards"]]))[mine]
        stats = train.update(learner, kept, advantages, T)
        named = [(name, w.grad) for name, w in learner.model.named_parameters() if w.requires_grad]
        # A process that has computed nothing yet has no loss; their sum is the update's.
        losses = learner.processes.gather(stats["loss"])
        found.append({name: whole(grad).clone() for name, grad in named})
        found[-1] |= {"norm": torch.tensor(stats["grad_norm"]), "loss": torch.tensor(sum(losses))}
        found[-1]["loss"] /= len(losses)
    learner.config = dataclasses.replace(config, epochs=2, micro_batch=3, max_grad_norm=1e-3)
    learner.optimizer.state.clear()
    group["lr"] = 3e-4
    advantages = group_advantages(torch.tensor(REWARDS["all"]))[mine]
    assert train.update(learner, kept, advantages, T)["grad_norm"] > 1e-3
    weights = {name: whole(weight.detach()) for name, weight in learner.model.named_parameters()}
    return found, weights


SMALL = dict(n=8, m=4, prompts_per_step=1, steps=30, eval_every=12, eval_problems=17, save_every=2)


def arguments(task: str, *options: object, **changes) -> list[str]:
    """A small run of train.py's."""
    size = SMALL | changes | {"task": task}
    return [*(part for name in size for part in (flag(name), str(size[name]))), *map(str, options)]


def run_of(task: str, **settings) -> Run:
    return Run(Config(**SMALL | settings | {"task": task}))


def evaluated(task: str) -> dict:
    """Enough problems for several calls of the sampler."""
    run = run_of(task, eval_task="arithmetic", eval_problems=300, eval_samples=4)
    return evaluate(run)[0]


# ---- only together -------------------------------------------------------------------------------


def one_start(rank: int) -> dict:
    """Two folders that differ, and a weight that no text uses: what a real update makes of them."""
    model, rollouts = model_and_rollouts()
    model.vision = torch.nn.Linear(2, 2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * rank)
    learner = Learner(model, Config(n=5, m=5), Processes())
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    mine = slice(2 * rank, 2 * rank + 2)
    advantages = group_advantages(torch.tensor(REWARDS["second"]))[mine]  # nothing for the first
    stats = train.update(learner, part(rollouts, mine), advantages, T)
    return {"start": start, "end": model.state_dict(), "norm": stats["grad_norm"]}


def allocated(work: Callable[[], object]) -> int:
    """The most bytes that were there at once, by torch's allocator, besides those of before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def peak_beyond_weights() -> float:
    """The most that three updates allocate beyond a model's weights, in units of these weights."""
    size = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=99)
    model = LlamaForCausalLM(LlamaConfig(**size, intermediate_size=1024, num_key_value_heads=4))
    ids = torch.ones(1, 4, 6, dtype=torch.long)
    real, finished = ids > 0, ids[..., 0] > 0
    kept = Rollouts(ids[:, 0, :1], real[:, 0, :1], ids, real, ids * 0.0, finished, [[""] * 4])
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.5]])

    def updates() -> None:
        learner = Learner(model, Config(n=4, m=4, prompts_per_step=1, micro_batch=2), Processes())
        for _ in range(3):
            train.update(learner, kept, advantages, 6)

    return allocated(updates) / sum(weight.nbytes for weight in model.parameters())


def seeds(task: str) -> list[dict]:
    """Which problems each process gets in three steps, and what its seeds make of one prompt."""
    run, seen = run_of(task), []
    for step in (1, 2, 3):
        problems, _ = run.prompts(step)
        same_prompt = run.train_data.prompt_ids[:1]
        (texts,) = run.sampler.generate(same_prompt, 8, T, 1.0, run.seed("rollouts", step)).texts
        generator = torch.Generator().manual_seed(run.seed("rule", step))
        chosen = down_sample(torch.zeros(1, 64), 8, "random", generator).tolist()
        seen.append({"prompts": [p.prompt for p in problems], "rollouts": texts, "rule": chosen})
    return seen


def said(*arguments: object) -> tuple[int, str, str]:
    """What train.py's main returns and prints in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = train.main([*map(str, arguments)])
        except SystemExit as left:
            code = left.code
    return code, output.getvalue(), errors.getvalue()


def full_disk(out: Path, task: str) -> tuple[int, str, str]:
    """A run whose first checkpoint does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        return said(*arguments(task, "--out", out, steps=6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def adapter_goes_on(out: Path, task: str) -> dict:
    """A sharded adapter in bfloat16, stopped after three steps and gone on with."""
    settings = dict(shard=True, lora_rank=4, merge=True, beta=0.1, dtype="bfloat16", micro_batch=3)
    settings |= dict(gradient_checkpointing=True, lr=1e-2)

    def weights(run: Run) -> dict:
        return {name: whole(w.detach()).clone() for name, w in run.model.named_parameters()}

    run, gaps = run_of(task, **settings), []
    folder = Folder(out, run)
    progress = folder.create()
    folder.begin(progress)
    for step in (1, 2, 3):
        row, _ = train.train_step(run, step)
        gaps.append(row["logprob_gap"]["mean"])
        folder.log(progress, row | {"step": step, "time": float(step)})
    folder.save(Progress(3, 3.0))
    saved = weights(run)
    train.train_step(run, 4)
    if run.processes.first:
        folder.lock.close()
    again = run_of(task, **settings)
    progress = Folder(out, again).go_back()
    found = {"gaps": gaps, "progress": (progress.step, progress.time, len(progress.rows))}
    found["back"] = all(torch.equal(w, saved[name]) for name, w in weights(again).items())
    train.train_step(again, 4)
    expected = weights(run)
    found["on"] = all(torch.equal(w, expected[name]) for name, w in weights(again).items())
    found["moved"] = any(not torch.equal(w, saved[name]) for name, w in expected.items())
    Folder(out, again).save_models()
    return found


def together(out: Path, task: str, rank: int) -> dict[str, Callable[[], object]]:
    mine = slice(2 * rank, 2 * rank + 2)
    work = {kind: lambda kind=kind: gradients(mine, **KINDS[kind]) for kind in KINDS}
    return work | {
        "one start": lambda: one_start(rank),
        "peak": peak_beyond_weights,
        "seeds": lambda: seeds(task),
        "bad flag": lambda: said("--nonsense"),
        "bad number": lambda: said("--m", 80),
        "bad model": lambda: said("--model", "./missing", "--out", out / "none"),
        "full disk": lambda: full_disk(out / "full", task),
        "full folder": lambda: said(*arguments(task, "--out", out / "full")),
        "adapter": lambda: adapter_goes_on(out / "adapter", task),
        "evaluated": lambda: evaluated(task),
        "eval only": lambda: said("--eval-only", "--task", task, "--out", out / "evaluation"),
        "run": lambda: said(*arguments(task, "--out", out / "run")),
        "run, --shard": lambda: said(*arguments(task, "--shard", "--out", out / "run, --shard")),
    }


def with_engine(task: str, kind: str) -> dict:
    """Two steps and one prompt's rollouts with vLLM, of which a process has one in its life."""
    run = run_of(task, sampler="vllm", **KINDS[kind])
    rows = [train.train_step(run, step)[0] for step in (1, 2)]
    prompt = run.train_data.prompt_ids[:1]
    (texts,) = run.sampler.generate(prompt, 8, T, 1.0, run.seed("rollouts", 3)).texts
    return {"rows": rows, "texts": texts}


if __name__ == "__main__":
    out, task, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    rank = Processes().rank
    Processes.leave = lambda self: None  # the next work needs the group, too
    if what == "together":
        found = {name: work() for name, work in together(out, task, rank).items()}
    else:
        found = with_engine(task, what)
    torch.save(found, out / f"found_{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # their group is not to be taken apart
