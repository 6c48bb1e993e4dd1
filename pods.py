"""Which m of n rollouts to train on: the down-sampling rules of PODS.

    from pods import max_variance
    keep = max_variance(rewards, m=16)                       # rewards [P, n] -> indices [P, m]
    kept = torch.take_along_dim(rewards, keep, dim=-1)       # [P, m]

Copy this file into your own trainer; it needs torch and nothing else. Generate n rollouts a prompt,
score them all, and update the policy only on the m that the rule returns. Advantages are computed
afterwards, on the kept m alone (Xu, Savani, Fang, Kolter: "Not All Rollouts are Useful:
Down-Sampling Rollouts in LLM Reinforcement Learning", arXiv 2504.13818).

Legend: P prompts, n rollouts a prompt, m kept. A *group* is the n rollouts of one prompt, one row
of the last axis. Selection never looks across groups.

**Lemma (paper, section 3).** For m >= 2, every subset S of size m with the largest variance
consists of the k lowest and the m - k highest rewards of its group, for some k (up to swaps of
equal rewards).

*Proof.* If m = n there is nothing to choose. Otherwise fix all members of S but one and call that
one's reward x. The variance of S as a function of x is a parabola with leading coefficient
(m - 1) / m^2 > 0: it is strictly convex. Suppose S is optimal and a rollout in S has a reward x
strictly between two rewards l < x < h that are not in S. A strictly convex function is larger at
one end of [l, h] than anywhere inside, so exchanging x for l or for h raises the variance: a
contradiction. Hence no member of S lies strictly between the smallest and the largest reward left
out. S holds everything below the smallest, everything above the largest, and otherwise only rewards
equal to one of the two: up to swaps of equals, the lowest and the highest of the group.  QED

So there are only m + 1 candidates, and even their variances need not be computed:

**The splits rise, then fall.** Sort the group ascending, x[0] <= ... <= x[n-1], and let S_k be the
k lowest and m - k highest, k = 0..m. S_{k+1} drops h = x[n-m+k] for l = x[k] <= h. With s_k the sum
of S_k, expanding the two variances gives

    m^2 (Var S_{k+1} - Var S_k) = -(h - l) * slope(k),     slope(k) = (m - 1) l + (m + 1) h - 2 s_k.

Going from k to k + 1, l and h do not fall and s_k does not rise, so slope(k) never decreases: Var
S_k does not fall while slope(k) < 0, and does not rise from there on. The best k is the *number of
negative slopes*. Unlike variances, slopes hold no squares: a large common offset or a huge outlier
costs little precision.

**0/1 rewards need no search.** With at least m/2 ones and m/2 zeros the best subset is half of
each, for odd m one more of either kind; if one kind is rarer, all of it and the other kind for the
rest (the variance p (1 - p) of a 0/1 subset depends on its share p of ones only, and grows towards
p = 1/2).

**Why variance, if advantages are divided by the standard deviation anyway?** For 0/1 rewards all
rules give an expected gradient of the same direction, and its length is proportional to the
standard deviation of the kept rewards: the larger it is, the more signal stands against the noise
of sampling. Proof, measurements, when it does not pay: `notebooks/5_when_pods_pays.ipynb`.
"""

import operator
from collections.abc import Callable

import torch


def max_variance(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m rollouts whose rewards have the largest variance, in O(n log n) a group.

    Exactly, but for ties within rounding: a slope of less than 8 m eps max|reward - median| counts
    as 0, where eps is the precision in which the rewards are known (float64's, or float32's).

    Args:
        rewards: [..., n], a tensor, a NumPy array, or lists of numbers; each row of the last axis
            is a group. Only values count: 0.1 in float32 is treated like 0.1 in a list.
        m: how many to keep, 2 <= m <= n.

    Returns:
        int64 indices [..., m] into the last axis, ascending, without repeats, on the rewards'
        device. Among equal rewards the lowest index is taken first; among splits of equal variance
        the one with the most high rewards (for 0/1 rewards and odd m: one more 1 than 0).

    Raises:
        ValueError: m < 2, m > n, an empty group, or a reward that is not finite.
    """
    rewards, m, device = _check(rewards, m)  # float64 [..., n]
    n = rewards.shape[-1]
    x, order = rewards.sort(dim=-1, stable=True)  # [..., n] ascending, ties by index
    x = _centred(x)

    low, high = x[..., :m], x[..., n - m :]  # [..., m]: what split k takes next, and what it drops
    sum_low = low.cumsum(-1) - low  # [..., m]: of the k lowest
    sum_high = high.flip(-1).cumsum(-1).flip(-1)  # [..., m]: of the m - k highest
    slope = (m - 1) * low + (m + 1) * high - 2 * (sum_low + sum_high)  # [..., m], never decreasing
    # Slopes that are zero but for rounding count as zero, or a tie would be decided by noise.
    noise = 8 * m * _precision(rewards) * x.abs().amax(-1, keepdim=True)  # [..., 1]
    k = (slope < -noise).sum(-1, keepdim=True)  # [..., 1]: how many of the lowest

    # The highest m - k start at sorted position n - m + k, perhaps in the middle of a run of equal
    # rewards, which are at positions [run, end). Of these take the first ones: lowest index first.
    first = x.gather(-1, (n - m + k).clamp(max=n - 1))  # [..., 1]
    run = torch.searchsorted(x, first)  # [..., 1]
    end = torch.searchsorted(x, first, right=True)  # [..., 1]
    start = torch.maximum(run, k)  # the k lowest may reach into the same run
    slot = torch.arange(m, device=x.device)  # [m]
    of_run = end - (n - m + k)  # [..., 1]: how many the run gives to the highest
    position = torch.where(slot < k + of_run, start + slot - k, n - m + slot)
    position = torch.where(slot < k, slot, position)  # [..., m]
    return order.gather(-1, position).sort(dim=-1).values.to(device)


def max_reward(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m highest rewards, lowest index first among equals. Arguments and errors: `max_variance`.

    It keeps no failures, so the policy never learns what to avoid: 67.3% on GSM8K where
    max-variance reaches 82.6% (the paper's comparison of the rules).
    """
    rewards, m, device = _check(rewards, m)
    order = rewards.sort(dim=-1, descending=True, stable=True).indices  # [..., n]
    return order[..., :m].sort(dim=-1).values.to(device)


def max_advantage(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m rewards farthest from the group's mean, lowest index first among equals: CPPO's rule.

    Completion Pruning Policy Optimization (arXiv 2503.22342) keeps the largest |advantages| of the
    whole group, and these advantages (`--advantages all`). Of 0/1 rewards it takes the rarer kind
    first. If that fills the m, advantages computed anew on the kept would all be 0.
    Arguments and errors: `max_variance`.
    """
    rewards, m, device = _check(rewards, m)
    x, order = rewards.sort(dim=-1)  # [..., n]
    x = _centred(x)
    far, position = (x - x.mean(-1, keepdim=True)).abs().sort(dim=-1, descending=True)  # [..., n]
    # What is equally far but for rounding is in one tier, and in a tier the lowest index is first.
    noise = 8 * x.shape[-1] * _precision(rewards) * x.abs().amax(-1, keepdim=True)  # [..., 1]
    tier = (-far.diff(dim=-1, prepend=far[..., :1]) > noise).cumsum(-1)  # [..., n] 0, 0, 1, 2, ...
    index = order.gather(-1, position)  # [..., n]
    index = index.gather(-1, (tier * x.shape[-1] + index).argsort(dim=-1))  # [..., n]
    return index[..., :m].sort(dim=-1).values.to(device)


def percentile(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The rollouts at the (i + 0.5) / m quantiles of the sorted rewards, i = 0 .. m-1.

    That is, the sorted group is cut into m equal slices and the middle of each is kept: quantile q
    is at position floor(q n), counted from 0. Arguments and errors: `max_variance`.
    """
    rewards, m, device = _check(rewards, m)
    n = rewards.shape[-1]
    order = rewards.sort(dim=-1, stable=True).indices  # [..., n]
    middle = (2 * torch.arange(m, device=rewards.device) + 1) * n // (2 * m)  # [m], in integers
    return order[..., middle].sort(dim=-1).values.to(device)


def random_subset(
    rewards: torch.Tensor, m: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """m rollouts of each group, uniformly at random. Arguments and errors: `max_variance`.

    `generator` makes the draw repeatable; it may be on another device than the rewards.
    """
    rewards, m, device = _check(rewards, m)
    options = {"device": generator.device if generator else rewards.device, "generator": generator}
    keys = torch.rand(rewards.shape, dtype=torch.float64, **options)
    return keys.argsort(dim=-1)[..., :m].sort(dim=-1).values.to(device)


# A rule of your own: RULES["mine"] = f, where f(rewards, m) returns indices as the others do. Then
# down_sample(..., rule="mine") works, and `--rule mine` in a script that calls train.main().
RULES: dict[str, Callable[..., torch.Tensor]] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "random": random_subset,
    "percentile": percentile,
    "max_advantage": max_advantage,
}


def down_sample(
    rewards: torch.Tensor,
    m: int,
    rule: str = "max_variance",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Indices [..., m] of the rollouts that `rule`, a name in `RULES`, keeps of rewards [..., n].

    `generator` is used by "random" alone.

    Raises:
        ValueError: an unknown rule, what `max_variance` raises, or a rule of your own that returns
            something else than m different indices for each group.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}: choose one of {', '.join(RULES)}")
    if rule == "random":
        return random_subset(rewards, m, generator)
    checked, m, device = _check(rewards, m)
    keep = torch.as_tensor(RULES[rule](rewards, m), device=device)
    shape, n = [*checked.shape[:-1], m], checked.shape[-1]
    if keep.is_floating_point() or keep.dtype == torch.bool or list(keep.shape) != shape:
        got = f"{keep.dtype} of shape {list(keep.shape)}"
        raise ValueError(f"rule {rule!r} returned {got}: need integer indices of shape {shape}")
    keep = keep.long().sort(dim=-1).values  # [..., m] ascending
    if (keep < 0).any() or (keep >= n).any() or (keep.diff(dim=-1) == 0).any():
        raise ValueError(f"rule {rule!r} must return {m} different indices from 0 to {n - 1}")
    return keep


def _centred(x: torch.Tensor) -> torch.Tensor:
    """Ascending rewards [..., n] less their group's median.

    No rule cares about a common offset, but rounding does. The median is itself a reward, so this
    difference is exact for rewards near it, whatever outliers the group has.
    """
    # Differences of rewards near float64's limit would overflow; a power of two costs no precision.
    x = torch.where(x.abs().amax(-1, keepdim=True) > 2.0**1000, x / 2.0**512, x)
    n = x.shape[-1]
    return x - x[..., n // 2 : n // 2 + 1]


def _precision(rewards: torch.Tensor) -> torch.Tensor:
    """The relative precision [..., 1] to which each group's float64 rewards are known.

    A tenth that was once a float32 stays wrong by 1e-9, and is recognised by its 24 significant
    bits. Integers, halves and the like have fewer bits, and are exact.
    """
    mantissa = torch.frexp(rewards).mantissa  # [..., n] in [0.5, 1)

    def fits(bits: int) -> torch.Tensor:
        return (mantissa * 2**bits % 1 == 0).all(-1, keepdim=True)  # [..., 1]

    float32, float64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
    return torch.where(fits(24) & ~fits(20), float32, float64).to(rewards)


def _check(rewards: torch.Tensor, m: int) -> tuple[torch.Tensor, int, torch.device]:
    """Rewards as a detached float64 tensor [..., n], m as an int, the rewards' own device."""
    if not isinstance(rewards, torch.Tensor):
        # By way of Python's numbers: torch takes no NumPy view of negative strides or foreign byte
        # order, and would read a list of floats as float32, in which close rewards are equal.
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        rewards = torch.tensor(rewards, dtype=torch.float64)
    rewards, device = rewards.detach(), rewards.device
    try:
        rewards = rewards.to(torch.float64).contiguous()
    except (TypeError, RuntimeError):  # a device without float64, such as Apple's
        rewards = rewards.cpu().to(torch.float64).contiguous()
    m = operator.index(m)
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        shape = list(rewards.shape)
        raise ValueError(f"empty group: rewards have shape {shape}, need [..., n >= 2]")
    n = rewards.shape[-1]
    if m < 2:
        raise ValueError(f"m={m} is too small: the variance of fewer than 2 rewards says nothing")
    if m > n:
        raise ValueError(f"m={m} is larger than n={n}: lower m or generate more rollouts")
    # A NaN would be sorted to one end and selected first. (Only here a GPU has to answer at once.)
    finite = rewards.isfinite()
    if not finite.all():
        index = tuple((~finite).nonzero()[0].tolist())
        value = rewards[index].item()
        raise ValueError(f"reward {value} at index {list(index)} is not finite")
    return rewards, m, device
