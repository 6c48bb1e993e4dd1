"""How much of a group's gradient is signal? Every rule, measured, beside the formula.

    python bench.py signal                               # the tiny policy, at four ages
    python bench.py signal --pool 128 --ages 1 -- --model DIR --task sums.jsonl --max-new-tokens 48

For rewards of 0 and 1, of which k of the m kept are 1, let s = k/m, and let g1 and v1 be mean and
trace of the covariance of the right rollouts' gradients, g0 and v0 of the wrong ones'. Given k,

    expectation of (1/m) sum A_i g_i   sqrt(s (1-s)) (g1 - g0)     the direction is that of all n
    noise (trace of the covariance)    ((1-s) v1 + s v0) / m

Notebook 5 derives it. Groups are drawn from a pool of rollouts, which stands for the policy. Left
out: KL, the clip range, and that the loss "dapo" divides by its update's tokens.

Legend: N rollouts in the pool, D numbers of a sketch, G groups of n rollouts, m kept.
"""

import argparse
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from torch import nn
from torch.distributions import Binomial
from torch.nn.functional import cosine_similarity, pad

import train
from benches.measure import OTHERS, table, train_settings
from grpo import group_advantages, grpo_loss, loss_normalizer
from pods import RULES, down_sample
from support.errors import InputError
from support.learner import cut
from support.run import Run
from support.tasks import Problem

# CPPO's "max_advantage" goes with advantages over all n: another estimate than this file's.
COMPARED = tuple(rule for rule in RULES if rule != "max_advantage")


@dataclass(frozen=True)
class Moments:
    """What the formula needs to know of a prompt's rollouts."""

    p: float  # the share that is right
    gap: float  # |g1 - g0|^2
    v1: float  # trace of the covariance of the right ones' gradients
    v0: float  # of the wrong ones'


@dataclass(frozen=True)
class Signal:
    """A group's gradient over many groups."""

    signal: float  # |expectation|^2
    noise: float  # trace of the covariance

    @property
    def ratio(self) -> float:
        """Signal to noise; 0 for a group that never has any."""
        return self.signal / self.noise if self.noise else 0.0


def moments(gradients: torch.Tensor, right: torch.Tensor) -> Moments:
    """Of a pool's gradients [N, D] and which of the rollouts are right, bool [N], some of them."""
    ones, zeros = gradients[right].double(), gradients[~right].double()
    gap = (ones.mean(0) - zeros.mean(0)).square().sum().item()
    v1, v0 = (kind.var(0, correction=0).sum().item() for kind in (ones, zeros))
    return Moments(right.double().mean().item(), gap, v1, v0)


def kept_right(rule: str, n: int, m: int, p: float) -> torch.Tensor:
    """The probabilities [m + 1] that k = 0..m of the m kept are right, if a rollout is with p."""
    if rule == "random":
        n = m  # the m that are kept are independent draws, as all n are
    u = torch.arange(n + 1)  # of the n are right
    rewards = (u[:, None] > torch.arange(n)).double()  # [n + 1, n]
    k = rewards.gather(-1, down_sample(rewards, m, rule)).sum(-1).long()  # [n + 1]: ask the rule
    chance = Binomial(n, torch.tensor(p, dtype=torch.float64)).log_prob(u.double()).exp()
    return torch.zeros(m + 1, dtype=torch.float64).index_add_(0, k, chance)


def formula(of: Moments, rule: str, n: int, m: int) -> Signal:
    """Signal and noise for 0/1 rewards, over the random number k of right ones among the kept."""
    chance = kept_right(rule, n, m, of.p)  # [m + 1]
    s = torch.arange(m + 1, dtype=torch.float64) / m
    length = (s * (1 - s)).sqrt()  # 0 for a group without signal, which then has no noise either
    mean = (chance * length).sum()
    within = (chance * ((1 - s) * of.v1 + s * of.v0) / m)[1:-1].sum()  # of the gradients, given k
    between = (chance * (length - mean).square()).sum() * of.gap  # of the length
    return Signal((mean.square() * of.gap).item(), (within + between).item())


def group_gradients(
    gradients: torch.Tensor,
    rewards: torch.Tensor,
    seen: torch.Tensor,
    rule: str,
    n: int,
    m: int,
    groups: int,
    generator: torch.Generator,
) -> torch.Tensor:
    """The gradients (1/m) sum A_i g_i of many groups, [G, D], drawn from a pool with replacement.

    Of the pool: `gradients` [N, D], `rewards` [N], and `seen` [N], what the rule selects by.
    """
    N = len(gradients)
    # The pool is shuffled anew for each of the n places and dealt from it. Places are independent,
    # but every rollout is dealt equally often, so that one huge gradient cannot decide by luck.
    rounds = torch.rand(n, -(-groups // N), N, generator=generator)
    drawn = rounds.argsort(-1).flatten(1)[:, :groups].T  # [G, n]
    kept = drawn.gather(-1, down_sample(seen[drawn], m, rule, generator))  # [G, m]
    weights = torch.zeros(groups, N, dtype=gradients.dtype)  # [G, N]
    weights.scatter_add_(1, kept, group_advantages(rewards[kept]).to(gradients) / m)
    return weights @ gradients


def measured(estimates: torch.Tensor) -> Signal:
    """Of groups' gradients [G, D]."""
    noise = estimates.double().var(0).sum().item()
    # The mean of G groups has a G-th of the noise, which |mean|^2 holds too.
    signal = estimates.double().mean(0).square().sum().item() - noise / len(estimates)
    return Signal(signal, noise)


def take_sketch(weights: Iterable[nn.Parameter], dimensions: int, seed: int = 0) -> torch.Tensor:
    """A count sketch [D] of the gradients of the weights, which are cleared.

    Number i of a weight's gradient is added to number i mod D, with a sign that is always the same.
    So the expectation of an inner product of sketches is that of the gradients.
    """
    total, draw = torch.zeros(dimensions), torch.Generator().manual_seed(seed)
    for weight in weights:
        signs = 2 * torch.randint(2, weight.shape, dtype=torch.int8, generator=draw) - 1
        if weight.grad is not None:
            numbers = (weight.grad * signs.to(weight.device)).flatten()
            numbers = pad(numbers, (0, -len(numbers) % dimensions))
            total += numbers.view(-1, dimensions).sum(0).cpu()
            weight.grad = None
    return total


@dataclass
class Pool:
    """N rollouts of one prompt."""

    prompt: str
    gradients: torch.Tensor  # [N, D] of each one's log-probability, as the loss weighs its tokens
    rewards: dict[str, torch.Tensor]  # [N] each: the parts and the total
    texts: list[str]  # N


def draw_pool(
    run: Run, problem: Problem, prompt_ids: list[int], size: int, seed: int, dimensions: int = 509
) -> Pool | None:
    """`size` rollouts of a prompt, scored and sketched; None if all are right or all are wrong.

    A prime number of `dimensions` spreads a matrix's columns best.
    """
    config, longest = run.config, run.max_new_tokens
    rollouts = run.sampler.generate([prompt_ids], size, longest, config.temperature, seed)
    parts = run.score([problem] * size, rollouts.texts[0])
    rewards = {name: torch.tensor(part, dtype=torch.float64) for name, part in parts.items()}
    if len(rewards["accuracy"].unique()) < 2:
        return None
    # The loss divides by this times m: 1, the mean length, or the most tokens there may be.
    normalizer = loss_normalizer(rollouts.mask[0], config.loss_type, longest) / size
    options = {"loss_type": config.loss_type, "normalizer": normalizer}
    advantages = -torch.ones(size)  # then the loss has the gradient of the log-probability
    known, gradients = {}, []
    run.learner.optimizer.zero_grad()
    for row in range(size):
        batch = cut(rollouts, advantages, [row])
        tokens = tuple(batch.input_ids[0].tolist())
        if tokens not in known:  # a small policy often repeats itself
            now = batch.log_probs(run.learner.policy, config.temperature)  # [1, T]
            grpo_loss(now, now.detach(), batch.advantages, batch.mask, **options).backward()
            known[tokens] = take_sketch(run.learner.trained.values(), dimensions)
        gradients.append(known[tokens])
    return Pool(problem.prompt, torch.stack(gradients), rewards, rollouts.texts[0])


def group_size(text: str) -> tuple[int, int]:
    """`64x16` -> n = 64, m = 16."""
    n, m = map(int, text.split("x"))
    if not 2 <= m <= n:
        raise ValueError
    return n, m


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    add, sizes = parser.add_argument, [(16, 16), (64, 64), (64, 16), (64, 4)]
    add("--prompts", type=int, default=6, help="the first with right and wrong answers")
    add("--pool", type=int, default=1024, help="N, rollouts of each that stand for the policy")
    add("--groups", type=int, default=16_000, help="drawn from the pool for each number")
    add("--sizes", type=group_size, nargs="+", default=sizes, help="n x m, such as 64x16")
    add("--ages", type=int, default=4, help="how often to measure while training, from the start")
    add("--every", type=int, default=10, help="training steps in between")


def signal(arguments: argparse.Namespace) -> dict:
    """Signal to noise of a group's gradient for each rule, n and m, beside the formula.

    First for advantages of accuracy alone, where the formula holds; then for those of the total
    reward. The cosine is that between the expected gradient and accuracy's, of all n.
    """
    run, pools = Run(train_settings(arguments)), []
    data = next(iter(run.eval_data.values()))
    for step in range(arguments.every * (arguments.ages - 1) + 1):
        if step:
            train.train_step(run, step)
        if step % arguments.every:
            continue
        drawn = (
            draw_pool(run, problem, ids, arguments.pool, run.seed(f"pool {i}", step))
            for i, (problem, ids) in enumerate(zip(data.problems, data.prompt_ids))
        )
        for pool in islice(filter(None, drawn), arguments.prompts):
            row = {"steps": step, "prompt": pool.prompt}
            pools.append(row | compare(pool, arguments.sizes, arguments.groups))
            print(table(f"after {step} steps, {pool.prompt}", pools[-1]["cases"]))
            OTHERS.look()
    if not pools:
        raise InputError(f"--pool {arguments.pool}: none has right and wrong answers, raise it")
    return {"config": asdict(run.config), "pools": pools}


def compare(pool: Pool, sizes: Iterable[tuple[int, int]], groups: int) -> dict:
    """The pool's moments and, for each of `cases`, signal to noise measured and by the formula."""
    right, rewards, cases = pool.rewards["accuracy"] > 0.5, pool.rewards, []
    about = moments(pool.gradients, right)
    goal = pool.gradients[right].mean(0) - pool.gradients[~right].mean(0)  # [D]
    kinds = [(rule, "accuracy", "accuracy") for rule in COMPARED]
    kinds += [("random", "total", "total"), ("max_variance", "total", "total")]
    kinds += [("max_variance", "total", "accuracy")]
    for n, m in sizes:
        # Of all n all rules are one, and called random in the results.
        for rule, paid, seen in kinds if m < n else [("random", "accuracy", "accuracy")]:
            what = (pool.gradients, rewards[paid], rewards[seen], rule, n, m, groups)
            estimates = group_gradients(*what, torch.Generator().manual_seed(n * m))
            case = {"rule": rule, "n": n, "m": m, "advantages": paid, "selection": seen}
            case["measured"] = measured(estimates).ratio
            case["formula"] = formula(about, rule, n, m).ratio if paid == "accuracy" else None
            case["cosine"] = cosine_similarity(estimates.mean(0), goal, 0).item()
            cases.append(case)
    return asdict(about) | {"right": about.p, "cases": cases}
