"""PODS in TRL: a GRPOTrainer that generates n rollouts of a prompt and trains on m of them.

    from trl_pods import PodsTrainer            # this file and pods.py, copied beside your script
    trainer = PodsTrainer(
        "Qwen/Qwen2.5-3B-Instruct",
        reward_funcs=my_reward,                 # as TRL calls it, on all n; or several of them
        args=GRPOConfig(num_generations=16, per_device_train_batch_size=16),  # m
        rollouts_per_prompt=64,                 # n
        train_dataset=train,
    )
    trainer.train()

Everything else is GRPOTrainer's own: datasets of texts or of messages, evaluation, KL, several
epochs on a batch, adapters, vLLM. TRL is told that a group has m members: it repeats each prompt m
times and normalises over m rewards. The m copies are replaced by the m of n rollouts that `pods.py`
keeps, so log-probs, reference and update are computed for those alone. Evaluation keeps everything.

Written for TRL 1.16, which calls `rollout_func` experimental, supports vLLM 0.22 to 0.31 and warns
of any other; the lines for vLLM have not been run.

Legend: P prompts of this process, n rollouts a prompt, m kept, T tokens.
Left out: tools, environments, images, reward models, asynchronous rewards; FSDP without vLLM.
"""

from collections.abc import Callable

import torch
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import get_callable_name, is_async_callable

from pods import down_sample


class PodsTrainer(GRPOTrainer):
    """GRPO on m of n rollouts.

    Args:
        model, reward_funcs, args and others: GRPOTrainer's; m is `args.num_generations`.
        rollouts_per_prompt: n.
        rule: one of `pods.RULES`. What it sees is the sum of the rewards, weighted as TRL does.

    Raises:
        ValueError: n < m, a process's batch splits a group, or what is left out here is asked for.
    """

    def __init__(
        self, model, reward_funcs, *args, rollouts_per_prompt: int, rule="max_variance", **options
    ) -> None:
        for name in ("tools", "environment_factory", "rollout_func"):
            if options.get(name):
                raise ValueError(f"PodsTrainer brings its own rollouts: leave out {name}")
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.scored = [ScoredOnce(function) for function in functions]
        self.rollouts_per_prompt, self.rule, self.rows = rollouts_per_prompt, rule, []
        super().__init__(model, self.scored, *args, rollout_func=keep_m_of_n, **options)
        if hasattr(self.processing_class, "tokenizer"):
            raise ValueError("PodsTrainer takes texts alone: pass the tokenizer, no processor")
        m, m_eval = self.num_generations, self.num_generations_eval
        if rollouts_per_prompt < m:
            raise ValueError(f"rollouts_per_prompt={rollouts_per_prompt} is smaller than m={m}")
        splits = self.args.train_batch_size * self.args.steps_per_generation % m
        if splits or (self.eval_dataset is not None and self.args.eval_batch_size % m_eval):
            raise ValueError(
                "a process must hold whole groups: make per_device_train_batch_size * "
                f"steps_per_generation a multiple of {m}, per_device_eval_batch_size of {m_eval}"
            )

    # A rollout function is given prompts alone, but rewards need the batch's other columns. These
    # cannot be looked up by the prompt: a dataset may hold one prompt twice, with two answers.

    def training_step(self, model, inputs, *args, **options):
        """TRL's, with the batch's rows kept for the rewards."""
        self.rows = inputs
        return super().training_step(model, inputs, *args, **options)

    def prediction_step(self, model, inputs, *args, **options):
        """The same in an evaluation."""
        self.rows = inputs
        return super().prediction_step(model, inputs, *args, **options)


class ScoredOnce:
    """A reward function that is called once, on all n rollouts; TRL is told about those kept."""

    def __init__(self, function: Callable) -> None:
        is_function = callable(function) and not isinstance(function, torch.nn.Module)
        if not is_function or is_async_callable(function):
            raise ValueError(f"reward_funcs: {function!r} is no plain function")
        self.function, self.kept = function, []
        self.__name__ = get_callable_name(function)  # for TRL's logs

    def score(self, columns: dict) -> list[float]:
        """The function's rewards [P*n]; None, where it does not apply, is NaN."""
        self.extras, self.metrics = {}, []  # what it logs, kept until TRL asks
        columns = columns | {  # what TRL passes comes before a column of the same name
            "log_extra": lambda name, values: self.extras.setdefault(name, []).extend(values),
            "log_metric": lambda name, value: self.metrics.append((name, value)),
        }
        rewards = self.function(**columns)
        self.rewards = [float("nan") if reward is None else float(reward) for reward in rewards]
        if len(self.rewards) != len(columns["prompts"]):
            found = f"{len(self.rewards)} rewards for {len(columns['prompts'])} completions"
            raise ValueError(f"{self.__name__} returned {found}")
        return self.rewards

    def __call__(self, /, log_extra: Callable, log_metric: Callable, **_) -> list[float]:
        """TRL's call, with the P * m rollouts that were kept. (A column may be called `self`.)"""
        for name, value in self.metrics:
            log_metric(name, value)
        for column, values in self.extras.items():
            log_extra(column, [values[i] for i in self.kept])
        return [self.rewards[i] for i in self.kept]


def keep_m_of_n(prompts: list, trainer: PodsTrainer) -> dict[str, list | None]:
    """TRL's rollout function: P prompts, each m times in a row -> the m kept rollouts of each."""
    training = trainer.model.training
    m = trainer.num_generations if training else trainer.num_generations_eval
    n = trainer.rollouts_per_prompt if training else m
    rows, P = trainer.rows[::m], len(prompts) // m
    if prompts != [row["prompt"] for row in rows for _ in range(m)]:
        raise ValueError(f"a process must hold whole groups: make its batch a multiple of m={m}")

    ids = token_ids(prompts[::m], trainer)
    completions, log_probs = generate(ids, n, trainer)  # P * n
    names = [name for name in rows[0] if name not in ("prompt", "completion")]
    columns = {name: [row[name] for row in rows for _ in range(n)] for name in names}
    columns["prompts"] = [prompt for prompt in prompts[::m] for _ in range(n)]
    columns["completions"] = read(completions, ids, prompts, trainer)
    columns["completion_ids"], columns["trainer_state"] = completions, trainer.state
    rewards = score(columns, n, trainer)  # [P, n]
    # An evaluation, in which a group may have one member, keeps all.
    keep = down_sample(rewards, m, trainer.rule) if n > m else torch.arange(m).expand(P, m)
    kept = (keep + n * torch.arange(P)[:, None]).flatten().tolist()  # P * m
    for function in trainer.scored:
        function.kept = kept
    return {
        "prompt_ids": [row for row in ids for _ in range(m)],
        "completion_ids": [completions[i] for i in kept],
        "logprobs": None if log_probs is None else [log_probs[i] for i in kept],
    }


def token_ids(prompts: list, trainer: PodsTrainer) -> list[list[int]]:
    """The tokens of texts, or of messages as the chat template renders them."""
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts)["input_ids"]
    return trainer.processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, return_dict=True, **trainer.chat_template_kwargs
    )["input_ids"]


def generate(
    prompt_ids: list[list[int]], n: int, trainer: PodsTrainer
) -> tuple[list[list[int]], list[list[float]] | None]:
    """n completions of each prompt, with the trainer's way to generate and its settings.

    Returns:
        P * n lists of token ids, EOS included; and vLLM's log-probs of them, with which TRL
        corrects for a sampler that is not quite the trained policy.
    """
    if trainer.use_vllm:
        repeated = [row for row in prompt_ids for _ in range(n)]
        _, completions, log_probs, _ = trainer.vllm_generation.generate(repeated, None, n)
        return completions, [[token[0] for token in row] for row in log_probs]
    batch = trainer.processing_class.pad(
        {"input_ids": prompt_ids}, padding_side="left", return_tensors="pt"
    ).to(trainer.accelerator.device)
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        generation_kwargs=trainer.generation_kwargs,  # else the model's own top-k would act, too
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    with unwrapped as model, torch.no_grad():
        options = {"generation_config": trainer.generation_config, "num_return_sequences": n}
        ids = model.generate(**batch, **options)  # [P*n, L+T]
    completions = []
    for row in ids[:, batch["input_ids"].shape[1] :].tolist():
        # Cut at the first EOS, which belongs to the completion. Never search for the padding
        # token: it is often the same one.
        ends = [t for t, token in enumerate(row) if token in trainer.eos_token_ids]
        completions.append(row[: ends[0] + 1] if ends else row)
    return completions, None


def read(completion_ids: list, prompt_ids: list, prompts: list, trainer: PodsTrainer) -> list:
    """P * n completions as GRPOTrainer shows them to reward functions: texts, or messages."""
    tokenizer = trainer.processing_class
    texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
    if isinstance(prompts[0], str):
        return texts
    if not any(getattr(tokenizer, f"response_{kind}", None) for kind in ("template", "schema")):
        return [[{"role": "assistant", "content": text}] for text in texts]
    # Such a tokenizer tells thoughts from the answer. The prompt may have opened the thoughts.
    n = len(completion_ids) // len(prompt_ids)
    return [
        [parse_response(tokenizer, ids, prompt_ids[i // n])] for i, ids in enumerate(completion_ids)
    ]


def score(columns: dict[str, list], n: int, trainer: PodsTrainer) -> torch.Tensor:
    """The weighted sum of all reward functions for P * n rollouts, float64 [P, n]."""
    rewards = [function.score(columns) for function in trainer.scored]
    rewards = torch.tensor(rewards, dtype=torch.float64)  # [functions, P*n]
    total = (rewards * trainer.reward_weights.to(rewards)[:, None]).nansum(0)  # as TRL sums them
    total = total.masked_fill(rewards.isnan().all(0), torch.nan).view(-1, n)  # [P, n]
    # TRL logs the rewards of the kept, which selection pulls to the middle: this is the policy's.
    trainer.scored[0].metrics += [("reward_of_all", r) for r in total[~total.isnan()].tolist()]
    # What no function could score gets the mean, which max-variance keeps last.
    return torch.where(total.isnan(), total.nanmean(-1, keepdim=True).nan_to_num(), total)
