"""The policy that is trained, with all that an update needs of it.

learner = Learner(model, config, Processes())
learner.policy(input_ids, attention_mask, T, temperature)   # log-probs, as several processes
learner.optimizer.step()
with learner.reference() as reference: ...                  # the policy as it was loaded
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from logprobs import Policy, check_output_layer
from support.adapters import add_lora
from support.errors import InputError
from support.processes import Processes
from support.settings import Config


class Learner:
    """Model, adapter, KL's reference, the processes' common gradient, AdamW.

    Args:
        model: on its device, from `load_model`; with `lora_rank` it is wrapped in place.
        config: dtype, beta, gradient_checkpointing, lora_rank, shard and AdamW's are used.
        processes: whose gradients are averaged.
        seed: of a fresh adapter.

    Attributes:
        model: the transformers model, or PEFT's around it; FSDP2 spreads its weights.
        whole_model: the same, or a copy of it where that is spread: what can be sampled from.
        policy: `logprobs.Policy` of it, as DDP or FSDP2 wraps it.

    Raises:
        InputError: a model that cannot be trained like this.
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
            # The policy as it was loaded; with an adapter it is the model without it.
            self._reference = Policy(copy.deepcopy(model).eval(), dtype)
        if config.gradient_checkpointing:
            # Only in train mode, which nothing else here depends on: no layer drops out.
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        if config.lora_rank:
            try:
                self.model = add_lora(model, config.lora_rank, seed)
            except ValueError as error:
                raise InputError(f"--lora-rank with --model {config.model}: {error}") from error
        # FSDP leaves each process a part of every weight, and nobody samples from that.
        parted = config.shard and config.sampler == "torch"
        self.whole_model = copy.deepcopy(self.model) if parted else self.model
        # Sharding replaces the weights, so the optimizer is made from those of the wrapped policy.
        self.policy = processes.wrap(Policy(self.model, dtype), config.shard)
        self.optimizer = torch.optim.AdamW(
            [weight for weight in self.model.parameters() if weight.requires_grad],
            lr=config.lr,
            betas=(0.9, config.adam_beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    @contextmanager
    def reference(self) -> Iterator[nn.Module]:
        """The policy as it was loaded, for as long as the context lasts."""
        if self._reference is not None:
            yield self._reference
        else:
            with self.model.disable_adapter():
                yield self.policy

    def trained(self) -> dict[str, tuple[int, ...]]:
        """The names of what is trained, and the shapes."""
        named = self.model.named_parameters()
        return {name: tuple(weight.shape) for name, weight in named if weight.requires_grad}
