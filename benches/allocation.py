"""Signal and noise of a group's gradient: the formula for 0/1 rewards, and what to hold against it.

    expected = formula(moments(gradients, right), "max_variance", n=64, m=16)
    drawn = group_gradients(gradients, rewards, rewards, "max_variance", 64, 16, 8000, generator)
    measured(drawn).ratio                                   # about expected.ratio

Normalised advantages give every group unit variance. Why then keep the rewards that vary most?
Let k of the m kept be right, s = k/m, and g_i be the gradient of rollout i's log-probability. A
right rollout's advantage is sqrt((1-s)/s), a wrong one's -sqrt(s/(1-s)), so

    (1/m) sum A_i g_i = sqrt(s (1-s)) (mean g of the right kept - mean g of the wrong kept).

The kept rewards' standard deviation sqrt(s (1-s)) is still there, as the length of the step. A rule
that sees rewards alone takes any of the right and any of the wrong ones. With g1, v1 the mean and
the trace of the covariance of the right ones' gradients, g0, v0 of the wrong ones', given k:

    expectation  sqrt(s (1-s)) (g1 - g0)            whose direction is that of all n
    noise        ((1-s) v1 + s v0) / m              the trace of the covariance

`notebooks/5_when_pods_pays.ipynb` derives it step by step. (grpo.py's advantages divide by the
sample deviation: all is sqrt((m-1)/m) times as long, and signal to noise the same.)

Legend: N rollouts in the pool that stands for the policy, U distinct ones, D numbers in a gradient,
G groups, n rollouts in each, m kept.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
from torch.nn.functional import cosine_similarity

from grpo import group_advantages
from pods import RULES, down_sample

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
    """Of a pool's gradients [N, D] and which of the rollouts are right, bool [N].

    Raises:
        ValueError: all are right, or none is.
    """
    gradients, right = gradients.double(), right.bool()
    if not 0 < int(right.sum()) < len(right):
        raise ValueError(f"{int(right.sum())} of {len(right)} are right: need some of both kinds")
    ones, zeros = gradients[right], gradients[~right]
    gap = (ones.mean(0) - zeros.mean(0)).square().sum().item()
    v1, v0 = (kind.var(0, correction=0).sum().item() for kind in (ones, zeros))
    return Moments(right.double().mean().item(), gap, v1, v0)


def kept_right(rule: str, n: int, m: int, p: float) -> torch.Tensor:
    """The probabilities [m + 1] that k = 0..m of the m kept are right, if a rollout is with p."""
    if rule == "random":
        return binomial(m, p)
    k = right_of(rule, n, m)
    return torch.zeros(m + 1, dtype=torch.float64).index_add_(0, k, binomial(n, p))


@lru_cache
def right_of(rule: str, n: int, m: int) -> torch.Tensor:
    """How many of the m kept are right if u = 0..n of the n are, [n + 1]: ask the rule itself."""
    rewards = (torch.arange(n + 1)[:, None] > torch.arange(n)).double()  # [n + 1, n], u ones
    return rewards.gather(-1, RULES[rule](rewards, m)).sum(-1).long()


def binomial(n: int, p: float) -> torch.Tensor:
    """The probabilities [n + 1] of 0..n successes."""
    count = torch.arange(n + 1, dtype=torch.float64)
    p = torch.tensor(p, dtype=torch.float64)
    return torch.distributions.Binomial(n, p).log_prob(count).exp()


def formula(of: Moments, rule: str, n: int, m: int) -> Signal:
    """Signal and noise for 0/1 rewards, over the random number k of right ones among the kept.

    The noise has two parts: that of the gradients, given k, and that of the length sqrt(s (1-s)).
    """
    chance = kept_right(rule, n, m, of.p)  # [m + 1]
    s = torch.arange(m + 1, dtype=torch.float64) / m
    length = (s * (1 - s)).sqrt()  # 0 for a group without signal, which then has no noise either
    mean = (chance * length).sum()
    within = (chance * ((1 - s) * of.v1 + s * of.v0) / m)[1:-1].sum()
    between = (chance * (length - mean).square()).sum() * of.gap
    return Signal((mean.square() * of.gap).item(), (within + between).item())


def best_share(v1: float, v0: float) -> float:
    """The share of right ones among the kept with the best signal to noise: Neyman's allocation."""
    return math.sqrt(v1) / (math.sqrt(v1) + math.sqrt(v0))


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
    """The gradient (1/m) sum A_i g_i of each of many groups, [G, D].

    Args:
        gradients: [N, D] of the pool's rollouts. A group's n are drawn from it with replacement, as
            a policy's rollouts are: independent of each other.
        rewards: [N], what the advantages are made of.
        seen: [N], what the rule selects by: the same rewards, or a part of them.
    """
    N = len(gradients)
    # Each of the n places runs through the pool in a random order, again and again: a group is n
    # independent draws, but a rollout with a huge gradient is not by chance in too many groups.
    rounds = torch.rand(n, -(-groups // N), N, generator=generator)
    drawn = rounds.argsort(-1).flatten(1)[:, :groups].T  # [G, n]
    kept = drawn.gather(-1, down_sample(seen[drawn], m, rule, generator))  # [G, m]
    # A small policy repeats itself: of a pool of 1,024 often fewer than 100 are distinct.
    distinct, which = gradients.unique(dim=0, return_inverse=True)  # [U, D], [N]
    weights = torch.zeros(groups, len(distinct), dtype=gradients.dtype)  # [G, U]
    weights.scatter_add_(1, which[kept], group_advantages(rewards[kept]).to(gradients) / m)
    return weights @ distinct


def measured(estimates: torch.Tensor) -> Signal:
    """Of groups' gradients [G, D]."""
    noise = estimates.double().var(0).sum().item()
    # The mean of G groups has a G-th of the noise, which |mean|^2 holds too.
    signal = estimates.double().mean(0).square().sum().item() - noise / len(estimates)
    return Signal(signal, noise)


def measure(
    gradients: torch.Tensor,
    rewards: dict[str, torch.Tensor],
    sizes: Iterable[tuple[int, int]],
    groups: int,
) -> dict:
    """The pool's moments and, for each of `cases`, signal to noise measured and by the formula.

    Args:
        gradients: [N, D].
        rewards: [N] each, `accuracy` (0 or 1) and `total`.
        sizes: pairs of n and m.
        groups: how many to draw for each case.
    """
    right = rewards["accuracy"] > 0.5  # [N]
    about = moments(gradients, right)
    goal = gradients[right].mean(0) - gradients[~right].mean(0)  # [D]
    found = []
    for case in cases(sizes):
        rule, n, m = case["rule"], case["n"], case["m"]
        advantages, seen = rewards[case["advantages"]], rewards[case["selection"]]
        draw = torch.Generator().manual_seed(n * m)
        estimates = group_gradients(gradients, advantages, seen, rule, n, m, groups, draw)
        cosine = cosine_similarity(estimates.mean(0), goal, 0).item()
        case |= {"measured": measured(estimates).ratio, "cosine": cosine}
        if case["advantages"] == case["selection"] == "accuracy":
            case["formula"] = formula(about, rule, n, m).ratio
        found.append(case)
    return asdict(about) | {"cases": found}


def cases(sizes: Iterable[tuple[int, int]]) -> Iterator[dict]:
    """All rules where 0/1 rewards are all there is, then what selection sees of the total."""
    for n, m in sizes:
        for rule in COMPARED if m < n else ["random"]:  # if nothing is left out, all rules are one
            yield case_of(rule, n, m, "accuracy", "accuracy")
    for n, m in sizes:
        if m < n:
            yield case_of("random", n, m, "total", "total")
            for selection in ("total", "accuracy"):
                yield case_of("max_variance", n, m, "total", selection)


def case_of(rule: str, n: int, m: int, advantages: str, selection: str) -> dict:
    """One setting: the part of the reward that advantages are made of, and what the rule sees."""
    return {"rule": rule, "n": n, "m": m, "advantages": advantages, "selection": selection}
