"""What a run holds in memory: model, data, sampler, seeds, clock. Nothing here touches the disk.

run = Run(config)                          # ready to train; train=False: to evaluate
problems, prompt_ids = run.prompts(step)
with run.clock("generate"): ...            # run.seconds["generate"]
parts = run.score(problems, completions)   # accuracy, format, tag_count, one's own, total
run.leave()
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rewards import score
from rollouts import TorchSampler, max_positions
from support.data import Data, derived_seed, load_data, say_shared
from support.errors import InputError, explained, say
from support.learner import Learner
from support.models import check_stops, load_model
from support.presets import this_machine
from support.processes import Processes
from support.settings import REWARD_PARTS, Config, part_and_weight, task_and_folder
from support.tasks import Problem, opens_think

PHASES = ("generate", "score", "select", "update", "sync")


class Run:
    """Everything that the loop works with.

    With `train=False` only what an evaluation needs: no learner and no training data.

    InputError: model, data, reward or settings that do not go together.

    Attributes:
        processes, model, tokenizer, learner, sampler: see their modules.
        eval_data, train_data: `Data`, the former by the name of its task.
        max_new_tokens: T, the longest completion.
        opens_think: whether the prompts end in an open <think>.
        seconds: of this step's phases, see `clock`.
    """

    def __init__(self, config: Config, train: bool = True) -> None:
        self.config, self.processes = config, Processes()
        self.vllm_sleeps = True  # gives its memory to the update
        planned = train and (config.sampler == "vllm" or config.micro_batch is None)
        if planned and torch.cuda.is_available():
            from support.plan import settle  # here, because a run on a CPU does without

            self.vllm_sleeps = settle(config, this_machine(self.processes.count))
        self.own_rewards = []
        if config.reward:
            from support.own_reward import load

            self.own_rewards = [load(*part_and_weight(part)) for part in config.reward]
        # What is trained is stored in float32: in bfloat16 an update of 5e-6 to a weight of 0.02 is
        # rounded away. Only weights that stay as they are may be stored as they are computed with.
        trains_all, dtype = train and not config.lora_rank, getattr(torch, config.dtype)
        stored = torch.float32 if trains_all else dtype
        self.model, self.tokenizer = load_model(config.model, stored)
        self.parameters = self.model.num_parameters()
        if self.model.device.type == "cpu" and self.parameters > 500_000_000:
            say("no GPU is found (torch.cuda.is_available() is False): on the CPU this takes days")
        fastest = 1 if self.parameters < 10_000_000 else torch.get_num_threads()
        torch.set_num_threads(config.threads or fastest)
        longest_prompt = self._load_data(train)
        self.max_new_tokens = self._max_new_tokens(longest_prompt)
        self.learner = None
        if train:
            seed = derived_seed(config.seed, "adapter")
            self.learner = Learner(self.model, config, self.processes, seed)
            self.model = self.learner.model
        self.sampler = self._sampler(longest_prompt + self.max_new_tokens)
        self.start_step()

    def _load_data(self, train: bool) -> int:
        """The problems to train and evaluate on; returns the length of the longest prompt."""
        config = self.config
        try:
            check_stops(self.model, self.tokenizer)
        except ValueError as error:
            raise InputError(f"--model {config.model}: {error}") from error
        known = self.model.get_input_embeddings().weight.shape[0]  # tokens
        of_model = (self.tokenizer, config, known)
        self.eval_data: dict[str, Data] = {
            name: load_data(name, "test", folder, *of_model).subset(config.eval_problems)
            for name, folder in map(task_and_folder, config.eval_task or (config.task,))
        }
        every = list(self.eval_data.values())
        if train:
            self.train_data = load_data(config.task, "train", None, *of_model)
            every.append(self.train_data)
            for name, data in self.eval_data.items():
                say_shared(name, data.problems, self.train_data.problems)
        self.opens_think = opens_think(self.tokenizer, every[-1].prompt_ids[0])
        # A reward of one's own that fails should do so now: on an empty text, and on a good one.
        problem = every[-1].problems[0]
        self.score([problem] * 2, ["", f"<think>so</think><answer>{problem.answer}</answer>"])
        return max(len(ids) for data in every for ids in data.prompt_ids)

    def _max_new_tokens(self, longest_prompt: int) -> int:
        """T as asked for, or what the model's positions leave."""
        limit = max_positions(self.model)
        room = (limit or math.inf) - longest_prompt
        wanted = self.config.max_new_tokens or min(512, max(room, 0))
        if wanted > room or wanted < 1:
            raise InputError(
                f"--max-new-tokens {wanted} and a prompt of {longest_prompt} tokens do not fit the "
                f"model's {limit} positions: lower --max-new-tokens or --max-prompt-tokens"
            )
        return int(wanted)

    def _sampler(self, max_length: int):
        """`max_length`: the tokens that the longest prompt and completion may have together."""
        dtype, share = getattr(torch, self.config.dtype), self.config.gpu_memory_utilization
        if self.config.sampler == "torch":
            model = self.learner.whole_model if self.learner else self.model
            return TorchSampler(model, self.tokenizer, dtype)
        from support.vllm import VLLMSampler

        of_model = (self.model, self.tokenizer, max_length, dtype)
        try:
            return VLLMSampler(*of_model, share, self.vllm_sleeps)
        except Exception as error:  # an engine has many ways to say that it lacks an architecture
            if explained(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            where = f"--sampler vllm cannot run --model {self.config.model}"
            raise InputError(f"{where}: {reason}; try --sampler torch") from error

    def description(self) -> str:
        """What is trained on what, in three lines."""
        config, N, device = self.config, self.processes.count, self.model.device
        trained = sum(w.numel() for w in self.model.parameters() if w.requires_grad)
        weights = "weights spread over them" if config.shard else "each with all weights"
        each = f" in each of {N} processes ({weights})" if N > 1 else ""
        kept = f"n={config.n} rollouts each, m={config.m} kept by {config.rule}"
        if config.m == config.n:
            kept = f"n=m={config.n} rollouts each, all trained on (GRPO)"
        tested = (f"{len(data.problems)} of {name}" for name, data in self.eval_data.items())
        return (
            f"model {config.model}: {self.parameters:,} parameters on {device}, "
            f"{trained:,} trained, {torch.get_num_threads()} CPU thread(s)\n"
            f"task {config.task}: {len(self.train_data.problems)} problems, "
            f"{config.prompts_per_step} a step{each}, {kept}\n"
            f"held-out problems: {', '.join(tested)}"
        )

    def data_digests(self) -> dict[str, str]:
        """What the run trains and evaluates on in a few letters each, and its own rewards."""
        tested = {name: data.digest() for name, data in self.eval_data.items()}
        rewards = {reward.spec: reward.digest for reward in self.own_rewards}
        return {"train": self.train_data.digest()} | tested | rewards

    def start_step(self) -> None:
        """Set the clock to 0."""
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent inside to this step's `phase`."""
        start = time.perf_counter()
        yield
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run behind Python's back
        self.seconds[phase] += time.perf_counter() - start

    def prompts(self, step: int) -> tuple[list[Problem], list[list[int]]]:
        """This process's P problems of a step and their token ids, which follow from the step."""
        P = self.config.prompts_per_step
        first = ((step - 1) * self.processes.count + self.processes.rank) * P
        return self.train_data.at(range(first, first + P), self.config.seed)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> dict[str, list]:
        """The parts of the rewards, and their weighted `total`; a problem for each completion."""
        weights = dict(zip(REWARD_PARTS, self.config.reward_weights))
        answers = [problem.answer for problem in problems]
        parts = score(completions, answers, weights, self.opens_think)
        for own in self.own_rewards:
            parts[own.name] = numbers = own(problems, completions)
            parts["total"] = [t + own.weight * x for t, x in zip(parts["total"], numbers)]
        return parts

    def seed(self, purpose: str, step: int) -> int:
        """A seed for this step and this process. Sharing one, all would draw the same numbers."""
        rank = self.processes.rank
        return derived_seed(self.config.seed, purpose, step, *([rank] if rank else []))

    def leave(self) -> None:
        """Part from the other processes. A single one has no group of its own.

        In this order: a policy that outlives its group would wait forever for a thread of it.
        """
        if self.processes.count > 1:
            self.sampler.close()
            self.learner = None
            self.processes.leave()
