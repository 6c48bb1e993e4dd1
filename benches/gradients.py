"""How much of a group's gradient is signal? Every rule, measured, beside the formula.

python bench.py signal                                       # the tiny policy, four times in a run
python bench.py signal --ages 1 --run runs/...               # which n and m suit that run
python bench.py signal --pool 128 --ages 1 -- --model DIR --task sums.jsonl --max-new-tokens 48

A pool of rollouts of one prompt stands for the policy. The gradient of each one's log-probability
is computed once, with the token weights of the loss in use, and many groups of n are drawn from the
pool; what is made of those is in allocation.py. A gradient has as many numbers as the policy has
weights, so it is kept as a sketch of some hundred. Sketches add up as gradients do, so the formula
holds for them exactly, and inner products are kept in expectation.

Left out: the KL term, the clip range (a first optimiser step knows neither), and that the loss
"dapo" divides by the tokens of the update it is in: here it is their mean number.

Legend: N rollouts in the pool, D numbers of a sketch, n rollouts a group, m kept, L prompt and T
completion tokens.
"""

import argparse
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import pad
from tqdm import tqdm

import train
from benches.advice import SIZES as SEVERAL
from benches.advice import advice, generation, logged
from benches.allocation import COMPARED, measure
from benches.measure import new_figure, table
from benches.selection import group_size
from grpo import grpo_loss, loss_normalizer
from rewards import score
from rollouts import Rollouts
from support import presets
from support.errors import InputError
from support.run import Run
from support.settings import REWARD_PARTS
from support.tasks import Problem

SIZES = ((16, 16), (64, 64), (64, 16), (64, 4))
PROBE = 16  # rollouts that show whether a prompt has right and wrong answers


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    add = parser.add_argument
    add("--prompts", type=int, default=6, help="held-out, with right and wrong answers at first")
    add("--pool", type=int, default=1024, help="N, rollouts of each that stand for the policy")
    add("--groups", type=int, default=16_000, help="drawn from the pool for each number")
    add("--dimensions", type=int, default=509, help="D; a prime spreads a matrix's columns best")
    add("--sizes", type=group_size, nargs="+", default=SIZES, help="n x m, such as 64x16")
    add("--ages", type=int, default=4, help="how often to measure while training, from the start")
    add("--every", type=int, default=10, help="training steps in between")
    add("--run", type=Path, help="folder of a run: its settings, and which n and m suit its log")
    add("train_flags", nargs="*", help="after --: flags of train.py")


def signal_to_noise(arguments: argparse.Namespace) -> dict:
    """Signal to noise of a group's gradient for each rule, n and m, beside the formula.

    First for advantages of accuracy alone, where the formula holds. Then for those of the total
    reward, selected by the total and by accuracy: the cosine is that between the expected gradient
    and accuracy's, of all n.
    """
    flags = ["--resume", "--out", str(arguments.run)] if arguments.run else []
    flags += ["--threads", str(arguments.threads), *arguments.train_flags]
    config, _ = presets.parse(flags)
    if any(not 2 <= m <= n for n, m in arguments.sizes):
        raise InputError("--sizes: need n x m with 2 <= m <= n, such as 64x16")
    if arguments.pool < (most := max(n for n, _ in arguments.sizes)):
        raise InputError(f"--pool {arguments.pool}: groups of {most} are drawn from it, raise it")
    if arguments.run:
        logged(arguments.run, config)  # before the minutes of work, not after
    run = Run(config)
    weights = [weight for weight in run.model.parameters() if weight.requires_grad]
    sketch = Sketch(weights, arguments.dimensions)
    problems = mixed_problems(run, arguments.prompts)
    result, step = {"config": asdict(config), "pools": []}, 0
    for age in range(0, arguments.ages * arguments.every, arguments.every):
        while step < age:
            step += 1
            train.train_step(run, step)
        pools = []
        for i, (problem, ids) in enumerate(problems):
            pool = draw_pool(run, problem, ids, arguments.pool, sketch, run.seed(f"pool {i}", age))
            right = pool.rewards["accuracy"].mean().item()
            pools.append({"steps": age, "prompt": problem.prompt, "right": right, "cases": []})
            if 0 < right < 1:
                pools[-1] |= measure(
                    pool.gradients, pool.rewards, arguments.sizes, arguments.groups
                )
        show(pools)
        result["pools"] += pools
    if not any(pool["cases"] for pool in result["pools"]):
        raise InputError(f"--pool {arguments.pool}: none has right and wrong answers, raise it")
    say_how_far_off(result["pools"], arguments.groups)
    draw(result["pools"], arguments.out / "signal.png")
    if arguments.run:
        dearer = generation(run, SEVERAL)
        result["advice"] = advice(arguments.run, config, result["pools"], dearer)
        title = (
            f"progress a second by {arguments.run}'s log, over its own n={config.n} m={config.m}"
        )
        print(table(title, result["advice"]))
    return result


# ---- rollouts and their gradients ----------------------------------------------------------------


class Sketch:
    """A linear map from the gradients of the weights to D numbers: a count sketch.

    Number i of a weight's gradient is added to number i mod D, with a sign drawn once. So the
    expectation of an inner product of sketches is that of the gradients.
    """

    def __init__(self, weights: Iterable[nn.Parameter], dimensions: int, seed: int = 0) -> None:
        self.weights, self.dimensions = list(weights), dimensions
        draw = torch.Generator().manual_seed(seed)
        self.signs = [
            (2 * torch.randint(2, weight.shape, dtype=torch.int8, generator=draw) - 1).to(
                weight.device
            )
            for weight in self.weights
        ]

    def take(self) -> torch.Tensor:
        """The sketch [D] of what is in the weights' `grad`, which is cleared."""
        total = torch.zeros(self.dimensions)
        for weight, sign in zip(self.weights, self.signs, strict=True):
            if weight.grad is not None:
                numbers = (weight.grad * sign).flatten()
                numbers = pad(numbers, (0, -len(numbers) % self.dimensions))
                total += numbers.view(-1, self.dimensions).sum(0).cpu()
                weight.grad = None
        return total


@dataclass
class Pool:
    """N rollouts of one prompt."""

    gradients: torch.Tensor  # [N, D]
    rewards: dict[str, torch.Tensor]  # [N] each: the parts and the total
    texts: list[str]  # N


def draw_pool(
    run: Run, problem: Problem, prompt_ids: list[int], size: int, sketch: Sketch, seed: int
) -> Pool:
    """`size` rollouts of a prompt, scored, and the sketch of each one's gradient."""
    config = run.config
    rollouts = run.sampler.generate(
        [prompt_ids], size, run.max_new_tokens, config.temperature, seed
    )
    weights = dict(zip(REWARD_PARTS, config.reward_weights))
    parts = score(rollouts.texts[0], [problem.answer] * size, weights, run.opens_think)
    rewards = {name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}
    return Pool(rollout_gradients(run, rollouts, sketch), rewards, rollouts.texts[0])


def rollout_gradients(run: Run, rollouts: Rollouts, sketch: Sketch) -> torch.Tensor:
    """The gradient of each rollout's log-probability, with the token weights of the loss, [N, D].

    The update's gradient is then -(1/m) sum A_i g_i over a prompt's m. Equal completions have equal
    gradients, so each is computed once; a small policy often repeats itself.

    Args:
        rollouts: N of one prompt.
    """
    config, mask = run.config, rollouts.mask[0]  # [N, T]
    ids, attention = rollouts.sequences()  # [N, L+T]
    L, N = rollouts.prompt_ids.shape[1], len(mask)
    # The loss divides by this times m: 1, the mean length, or the most tokens there may be.
    normalizer = loss_normalizer(mask, config.loss_type, run.max_new_tokens) / N
    known, gradients = {}, []
    run.learner.optimizer.zero_grad()
    for row, T in enumerate(tqdm(mask.sum(-1).tolist(), leave=False, disable=None)):
        tokens = tuple(ids[row, L : L + T].tolist())
        if tokens not in known:
            inputs = ids[row : row + 1, : L + T], attention[row : row + 1, : L + T]
            log_probs = run.learner.policy(*inputs, T, config.temperature)  # [1, T]
            # An advantage of -1 gives a loss whose gradient is that of the log-probability.
            loss = grpo_loss(
                log_probs,
                log_probs.detach(),
                torch.full((1,), -1.0),
                mask[row : row + 1, :T],
                loss_type=config.loss_type,
                normalizer=normalizer,
            )
            loss.backward()
            known[tokens] = sketch.take()
        gradients.append(known[tokens])
    return torch.stack(gradients)


def mixed_problems(run: Run, count: int) -> list[tuple[Problem, list[int]]]:
    """The first held-out problems that a few rollouts answer both right and wrong."""
    data, found = next(iter(run.eval_data.values())), []
    for i, (problem, ids) in enumerate(zip(data.problems, data.prompt_ids)):
        rollouts = run.sampler.generate(
            [ids], PROBE, run.max_new_tokens, run.config.temperature, run.seed("probe", i)
        )
        right = score(rollouts.texts[0], [problem.answer] * PROBE, opens_think=run.opens_think)
        if 0 < sum(right["accuracy"]) < PROBE:
            found.append((problem, ids))
        if len(found) == count:
            return found
    raise InputError(
        f"--prompts {count}: of {len(data.problems)} held-out problems {len(found)} have both right"
        f" and wrong answers among {PROBE} rollouts: lower --prompts, or take another task"
    )


# ---- reporting -----------------------------------------------------------------------------------


def show(pools: list[dict]) -> None:
    """The two tables of one age."""
    rows, misled = [], []
    for pool in pools:
        head = {"prompt": pool["prompt"][:24], "right": f"{pool['right']:.1%}"}
        if not pool["cases"]:
            print(f"{pool['prompt'][:60]}: {head['right']} right, nothing to tell apart")
            continue
        rows.append(head | {"v1/v0": pool["v1"] / pool["v0"] if pool["v0"] else None})
        misled.append(dict(head))
        for case in pool["cases"]:
            name = f"{case['rule']} {case['m']}/{case['n']}"
            if "formula" in case:
                rows[-1][name] = f"{case['measured']:.3g}, {case['formula']:.3g}"
            else:
                by = "" if case["rule"] == "random" else f" by {case['selection']}"
                misled[-1][name + by] = f"{case['measured']:.3g}, {case['cosine']:.3f}"
    if rows:
        steps = pools[0]["steps"]
        print(table(f"after {steps} steps, accuracy: signal to noise measured, by formula", rows))
        print(table(f"after {steps} steps, total: signal to noise, cosine to accuracy", misled))


def say_how_far_off(pools: list[dict], groups: int) -> None:
    """The formula's error, where so many groups measure well enough: 2 / sqrt(ratio * G) < 5%."""
    least = 1600 / groups
    every = [case for pool in pools for case in pool["cases"] if "formula" in case]
    large = [case for case in every if case["formula"] > least]
    off = sorted(abs(case["measured"] / case["formula"] - 1) for case in large)
    if off:
        print(
            f"\nmeasured against formula, the {len(off)} of {len(every)} above {least:.2g}: median "
            f"{statistics.median(off):.1%} off, all within {off[-1]:.1%}"
        )


def draw(pools: list[dict], path: Path) -> None:
    """Measured against formula; what selection gains; what it does to a reward that is a sum."""
    figure, (left, middle, right) = new_figure(3)
    pools = [pool for pool in pools if pool["cases"]]
    for rule in COMPARED:
        found = [c for pool in pools for c in pool["cases"] if c["rule"] == rule and "formula" in c]
        points = [(c["formula"], c["measured"]) for c in found if c["measured"] > 0]
        if points:
            left.loglog(*zip(*points), "o", ms=4, alpha=0.7, label=rule)
    ends = left.get_xlim()
    left.plot(ends, ends, color="gray", lw=1)
    title = "Signal to noise of accuracy's gradient"
    left.set(title=title, xlabel="by the formula", ylabel="measured")
    gains = {}
    for pool in pools:
        by_case = {tuple(c.values())[:5]: c for c in pool["cases"]}
        for (rule, n, m, advantages, selection), case in by_case.items():
            alike = "random", n, m, advantages, advantages
            if rule != "max_variance" or alike not in by_case:
                continue
            gain = case["measured"] / by_case[alike]["measured"]
            if advantages == "accuracy":
                gains.setdefault((middle, f"{m} of {n}"), []).append((pool["right"], gain))
            else:
                name = f"{m} of {n} by {selection}"
                gains.setdefault((right, name), []).append((case["cosine"], gain))
    for (axes, name), points in gains.items():
        axes.semilogy(*zip(*points), "o", ms=5, alpha=0.7, label=name)
    middle.set(title="Accuracy: max-variance over random", xlabel="share of right rollouts")
    right.set(title="Total: the same", xlabel="cosine to accuracy's gradient, of all rollouts")
    for axes in (middle, right):
        axes.axhline(1, color="gray", lw=1)
        axes.set(ylabel="signal to noise over random's, same m")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
