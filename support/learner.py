"""The policy that is trained, with all that an update needs of it.

    learner = Learner(model, config, Processes())
    batches, normalizer = learner.prepare(kept, advantages, max_new_tokens)
    log_probs = batches[0].log_probs(learner.policy, temperature)    # [b, T]
    norm = learner.finish_gradient()                                 # of all processes, clipped
    learner.optimizer.step()
    with learner.reference() as reference: ...                       # the policy as it was loaded

Legend: P prompts, m kept, B = P*m sequences, b of them in a micro-batch, L prompt and T completion
tokens. Wherever they are passed, `kept` is m rollouts of each of P prompts, and advantages [P, m].
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from grpo import loss_normalizer
from logprobs import Policy, check_output_layer, whole
from rollouts import Rollouts
from support.errors import InputError
from support.models import CHECKPOINTING
from support.processes import Processes
from support.settings import Config

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW holds of each weight


class Learner:
    """The model, its adapter, the KL's reference, the processes' common gradient and AdamW.

    Args:
        model: on its device, from `load_model`; with `lora_rank` it is wrapped in place.
        seed: decides a fresh adapter's random half.

    Attributes:
        model: the transformers model, or PEFT's around it; FSDP2 spreads its weights.
        whole_model: what can be sampled from: `model`, or a whole copy where FSDP2 has spread it.
        policy: `logprobs.Policy` of `model`; with `shard` FSDP2 has wrapped it.
        trained: what is trained, by name, in the same order in all processes.

    Raises:
        InputError: the model cannot be trained like this.
    """

    def __init__(
        self, model: nn.Module, config: Config, processes: Processes, seed: int = 0
    ) -> None:
        self.model, self.config, self.processes = model, config, processes
        dtype = getattr(torch, config.dtype)
        try:
            check_output_layer(model)
        except ValueError as error:
            raise InputError(f"--model {config.model}: {error}") from error
        self._reference = None
        if config.beta > 0 and not config.lora_rank:
            # With an adapter no copy is needed: the reference is the model without the adapter.
            self._reference = Policy(copy.deepcopy(model).eval(), dtype)
        if config.gradient_checkpointing:
            getattr(model, CHECKPOINTING)({"use_reentrant": False})
            model.train()  # or nothing is checkpointed; dropout was set to 0 by `load_model`
        if config.lora_rank:
            from support.adapters import add_lora  # most runs have none

            try:
                self.model = add_lora(model, config.lora_rank, seed)
            except ValueError as error:
                raise InputError(f"--lora-rank with --model {config.model}: {error}") from error
        processes.equalise(self.model)
        # FSDP leaves each process a part of every weight, and no sampler can use a part.
        parted = config.shard and config.sampler == "torch"
        self.whole_model = copy.deepcopy(self.model) if parted else self.model
        policy = Policy(self.model, dtype)
        self.policy = processes.shard(policy) if config.shard else policy
        named = self.model.named_parameters()  # after sharding, which replaces the weights
        self.trained = {name: weight for name, weight in named if weight.requires_grad}
        decay = {"betas": (0.9, config.adam_beta2), "weight_decay": config.weight_decay}
        weights = self.trained.values()
        self.optimizer = torch.optim.AdamW(weights, lr=config.lr, fused=True, **decay)

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The policy as it was loaded, for as long as the context lasts."""
        if self._reference is not None:
            yield self._reference
        else:
            with self.model.disable_adapter():
                yield self.policy

    def prepare(
        self, kept: Rollouts, advantages: torch.Tensor, max_new_tokens: int
    ) -> tuple[list["MicroBatch"], float]:
        """An update's micro-batches, and the number by which the sum of their losses is divided.

        The number belongs to the whole update, not to a micro-batch; it is 0 if no process has
        anything to learn from. With several processes it is the mean of what they count: each sums
        over its own tokens, and so the mean of their gradients is the gradient over all tokens.
        """
        config = self.config
        batches = micro_batches(kept, advantages, config)
        counted = kept.mask  # [P, m, T]: groups without signal count, although their loss is 0
        if config.average_over == "signal":
            counted = counted[(advantages != 0).any(-1)]
        rows = counted.flatten(0, 1)
        own = loss_normalizer(rows, config.loss_type, max_new_tokens) if len(rows) else 0.0
        shares = self.processes.gather((own, len(batches)))
        most = max(count for _, count in shares)
        if config.shard:  # FSDP's processes gather a layer together, so all make as many passes
            batches += [idle_batch(kept) for _ in range(most - len(batches))]
        return batches, sum(share for share, _ in shares) / len(shares) if most else 0.0

    def finish_gradient(self) -> float:
        """Average the gradient over all processes, and scale it down to `max_grad_norm`.

        Returns its norm before that, which is not finite if any number of the gradient is not.
        """
        if not self.optimizer.state:
            # The first step makes AdamW's moments. On a GPU torch would cut them from blocks of
            # memory that activations have left, and such a block could not go back to vLLM.
            torch.cuda.empty_cache()
        if not self.config.shard:  # FSDP has averaged the gradient of each micro-batch already
            self.processes.average_gradients(self.trained.values())
        norm = nn.utils.clip_grad_norm_(self.trained.values(), self.config.max_grad_norm)
        return whole(norm).item()

    def state(self) -> dict[str, dict]:
        """What a checkpoint keeps, whole and on the CPU: of several processes the first has it.

        `model` are the trained weights, `optimizer` the moments of those that had a gradient.
        """
        moments = {}
        for name, weight in self.trained.items():
            if held := self.optimizer.state.get(weight):
                pairs = ((kind, held[kind]) for kind in MOMENTS)
                moments[name] = self.processes.gathered(pairs)
        state = {"model": self.processes.gathered(self.trained.items())}
        return state | ({"optimizer": {"state": moments}} if moments else {})

    @torch.no_grad()
    def set_state(self, state: dict[str, dict]) -> None:
        """The reverse of `state`, which the first process alone needs to have.

        Tensor by tensor: a GPU has no room for all of them twice. (torch's own
        `set_optimizer_state_dict` makes moments of 0 and holds them beside those that it reads.)
        """
        weights, moments = state.get("model", {}), state.get("optimizer", {}).get("state", {})
        with_moments = self.processes.on_first(lambda: set(moments))
        for name, weight in self.trained.items():
            weight.copy_(self.processes.received(weights.get(name), weight))
            for kind in MOMENTS if name in with_moments else ():
                # The number of steps is one float32, the others are like the weight.
                like = torch.empty((), device=weight.device) if kind == "step" else weight
                moment = self.processes.received(moments.get(name, {}).get(kind), like)
                self.optimizer.state[weight][kind] = moment


# ---- micro-batches: what one forward and backward pass computes ----------------------------------


@dataclass
class MicroBatch:
    """Some sequences of an update, cut to the longest of them: b rows in one forward pass."""

    input_ids: torch.Tensor  # [b, L+T]
    attention_mask: torch.Tensor  # [b, L+T]
    mask: torch.Tensor  # [b, T] the completions' own tokens
    sampled: torch.Tensor  # [b, T] the sampler's log-probs
    advantages: torch.Tensor  # [b]
    old: torch.Tensor | None = None  # [b, T] log-probs before the first of several optimiser steps

    def log_probs(self, policy: nn.Module, temperature: float, **options):
        """[b, T] under the policy, at the sampling temperature; options as `Policy` takes them."""
        T = self.mask.shape[1]
        return policy(self.input_ids, self.attention_mask, T, temperature, **options)


def micro_batches(kept: Rollouts, advantages: torch.Tensor, config: Config) -> list[MicroBatch]:
    """The rollouts that have a gradient, in micro-batches of at most `config.micro_batch`.

    Rollouts whose advantage is 0, above all those of groups without signal, have no gradient and
    are not computed. They stay in the normaliser, so the gradient is the paper's, only cheaper. A
    KL term gives them a gradient, so with a KL term they are computed.
    """
    has_gradient = (advantages != 0) | (config.beta > 0)  # [P, m]
    rows = has_gradient.flatten().nonzero()[:, 0].tolist()
    lengths = kept.mask.flatten(0, 1).sum(-1).tolist()  # B
    L, m = kept.prompt_ids.shape[1], kept.mask.shape[1]
    return [cut(kept, advantages, part) for part in in_order(rows, lengths, m, L, config)]


def idle_batch(kept: Rollouts) -> MicroBatch:
    """One row of which no token counts: loss and gradient are 0."""
    batch = cut(kept, torch.zeros(kept.mask.shape[:2]), [0])
    batch.mask = torch.zeros_like(batch.mask)
    return batch


def cut(kept: Rollouts, advantages: torch.Tensor, rows: list[int]) -> MicroBatch:
    """A micro-batch of these of the B rollouts."""
    input_ids, attention_mask = kept.sequences()  # [B, L+T]
    mask = kept.mask.flatten(0, 1)[rows]  # [b, T]
    L, T = kept.prompt_ids.shape[1], int(mask.sum(-1).max())  # padding of all rows is cut
    return MicroBatch(
        input_ids[rows, : L + T],
        attention_mask[rows, : L + T],
        mask[:, :T],
        kept.log_probs.flatten(0, 1)[rows, :T],
        advantages.flatten()[rows].to(mask.device),
    )


def in_order(
    rows: list[int], lengths: list[int], m: int, L: int, config: Config
) -> list[list[int]]:
    """The rows in micro-batches that compute few tokens, padding included.

    Rows of similar length together need less padding; rows of one prompt together read it once (see
    logprobs.py). Which saves more depends on the prompts, the lengths and the micro-batch's size,
    so the tokens of both orders are counted. In both the longest row comes first, so that too
    little memory shows at once.

    Args:
        rows: the numbers of those of the B rollouts that are computed.
        lengths: the tokens of each of the B completions.
    """

    def in_parts(order: list[int]) -> list[list[int]]:
        return [order[i : i + config.micro_batch] for i in range(0, len(order), config.micro_batch)]

    def tokens(parts: list[list[int]]) -> int:
        prompts = sum(len({row // m for row in part}) for part in parts)
        return L * prompts + sum(len(part) * max(lengths[row] for row in part) for part in parts)

    by_length = sorted(rows, key=lambda row: -lengths[row])  # equals keep their order
    if config.gradient_checkpointing:  # checkpointed layers read every row whole
        return in_parts(by_length)
    prompts = list(dict.fromkeys(row // m for row in by_length))  # that of the longest row first
    by_prompt = sorted(by_length, key=lambda row: prompts.index(row // m))
    return min(in_parts(by_length), in_parts(by_prompt), key=tokens)
