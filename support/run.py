"""What a run holds in memory: model, data, sampler, seeds, clock. Nothing here touches the disk.

    run = Run(config)                          # ready to train; train=False: to evaluate
    problems, prompt_ids = run.prompts(step)
    with run.clock("generate"): ...            # run.seconds["generate"]
    run.leave()

Everything random is a function of (seed, step, process), so a run that goes on needs no generator
state: `run.seed("rollouts", step)` is the same number whenever and wherever it is asked for.
"""

import copy
import hashlib
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from rollouts import TorchSampler, max_positions
from support import tasks
from support.errors import InputError, explained
from support.learner import Learner
from support.models import check_stops, load_model
from support.processes import Processes
from support.settings import Config, task_and_folder
from support.vllm import VLLMSampler

PHASES = ("generate", "score", "select", "update", "sync")


class Run:
    """Everything that the loop works with.

    Args:
        config: the settings.
        train: False: only what an evaluation needs, no learner and no training data.

    Attributes:
        processes, model, tokenizer, learner, sampler: see their modules.
        eval_data, train_data: `Data`, the former by the name of its task.
        max_new_tokens: T, the longest completion.
        opens_think: whether the prompts end in an open <think>.
        completions: what this process wrote in the last evaluation, see support/evaluation.py.
        seconds: of this step's phases, see `clock`.

    Raises:
        InputError: model, data or settings that do not go together.
    """

    def __init__(self, config: Config, train: bool = True) -> None:
        self.config, self.processes = config, Processes()
        # What is trained is stored in float32: in bfloat16 an update of 5e-6 to a weight of 0.02 is
        # rounded away. Only weights that stay as they are may be stored as they are computed with.
        trains_all, dtype = train and not config.lora_rank, getattr(torch, config.dtype)
        self.model, self.tokenizer = load_model(
            config.model, torch.float32 if trains_all else dtype
        )
        self.parameters = self.model.num_parameters()
        torch.set_num_threads(
            config.threads or (1 if self.parameters < 10_000_000 else torch.get_num_threads())
        )
        longest_prompt = self._load_data(train)
        self.max_new_tokens = self._max_new_tokens(longest_prompt)
        self.learner = None
        if train:
            seed = derived_seed(config.seed, "adapter")
            self.learner = Learner(self.model, config, self.processes, seed)
            self.model = self.learner.model
        self.sampler = self._sampler(longest_prompt + self.max_new_tokens)
        self.completions: list[dict] = []
        self.start_step()

    def _load_data(self, train: bool) -> int:
        """The problems to train on and to evaluate on; returns the length of the longest prompt."""
        config = self.config
        try:
            check_stops(self.model, self.tokenizer)
        except ValueError as error:
            raise InputError(f"--model {config.model}: {error}") from error
        self.eval_data = {
            name: self._data(name, "test", folder).subset(config.eval_problems)
            for name, folder in map(task_and_folder, config.eval_task or (config.task,))
        }
        every = list(self.eval_data.values())
        if train:
            self.train_data = self._data(config.task, "train")
            every.append(self.train_data)
            tested = {name: data.problems for name, data in self.eval_data.items()}
            tasks.say_shared(self.train_data.problems, tested)
        self.opens_think = tasks.opens_think(self.tokenizer, every[-1].prompt_ids[0])
        return max(len(ids) for data in every for ids in data.prompt_ids)

    def _data(self, task: str, split: str, source: str | None = None) -> "Data":
        """A task's problems, from a folder of its own or from the one of --task."""
        source = source or (self.config.data if task == self.config.task else None)
        known = self.model.get_input_embeddings().weight.shape[0]  # tokens
        return Data(task, split, source, self.tokenizer, self.config, known)

    def _max_new_tokens(self, longest_prompt: int) -> int:
        """As asked for, or what the model's positions leave."""
        limit = max_positions(self.model)
        room = (limit or math.inf) - longest_prompt
        wanted = self.config.max_new_tokens or min(512, max(room, 0))
        if wanted > room or wanted < 1:
            raise InputError(
                f"--max-new-tokens {wanted} and a prompt of {longest_prompt} tokens do not fit the "
                f"model's {limit} positions: lower --max-new-tokens or --max-prompt-tokens"
            )
        return int(wanted)

    def _sampler(self, max_length: int) -> TorchSampler | VLLMSampler:
        """`max_length`: the tokens that the longest prompt and completion may have together."""
        dtype, share = getattr(torch, self.config.dtype), self.config.gpu_memory_utilization
        if self.config.sampler == "torch":
            model = self.learner.whole_model if self.learner else self.model
            return TorchSampler(model, self.tokenizer, dtype)
        try:
            return VLLMSampler(self.model, self.tokenizer, max_length, dtype, share)
        except ImportError as error:
            raise InputError(str(error)) from error
        except Exception as error:  # an engine has many ways to say that it lacks an architecture
            if explained(error):
                raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise InputError(
                f"--sampler vllm cannot run --model {self.config.model}: {reason}; try --sampler "
                "torch"
            ) from error

    def description(self) -> str:
        """What is trained on what, in two lines."""
        config, N = self.config, self.processes.count
        weights = (weight for weight in self.model.parameters() if weight.requires_grad)
        trained = sum(weight.numel() for weight in weights)
        kind = "FSDP" if config.shard else "DDP"
        return (
            f"model {config.model}: {self.parameters:,} parameters on {self.model.device}, "
            f"{trained:,} trained, {torch.get_num_threads()} CPU thread(s)\n"
            f"task {config.task}: {len(self.train_data.problems)} problems, "
            f"{config.prompts_per_step} a step"
            + (f" in each of {N} processes ({kind})" if N > 1 else "")
            + f", n={config.n} rollouts each, m={config.m} kept by {config.rule}"
        )

    # -- for one step

    def data_digests(self) -> dict[str, str]:
        """What the run trains and evaluates on, in a few letters: questions, template, answers."""
        return {"train": self.train_data.digest()} | {
            name: data.digest() for name, data in self.eval_data.items()
        }

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

    def prompts(self, step: int) -> tuple[list[tasks.Problem], list[list[int]]]:
        """This process's P problems of a step and their token ids, which follow from the step."""
        data, P = self.train_data, self.config.prompts_per_step
        count = len(data.problems)
        first = ((step - 1) * self.processes.count + self.processes.rank) * P
        indices = []
        for position in range(first, first + P):
            epoch, index = divmod(position, count)
            indices.append(epoch_order(count, self.config.seed, epoch)[index])
        return [data.problems[i] for i in indices], [data.prompt_ids[i] for i in indices]

    def seed(self, purpose: str, step: int) -> int:
        """A seed for this step and this process. Sharing one, all would draw the same numbers."""
        rank = self.processes.rank
        return derived_seed(self.config.seed, purpose, step, *([rank] if rank else []))

    def leave(self) -> None:
        """Part from the other processes, if there are any.

        In this order: an engine ends its own process groups, and a policy that outlives its group
        would wait forever for a thread of the group's. (A single process has no group; one that it
        finds belongs to an engine that may live on.)
        """
        if self.processes.count > 1:
            self.sampler.close()
            self.learner = None
            self.processes.leave()


class Data:
    """A task's problems with their prompts rendered for one tokenizer."""

    def __init__(
        self, task: str, split: str, source: str | None, tokenizer, config: Config, vocabulary: int
    ) -> None:
        try:
            problems = tasks.load_task(task, split, source)
            self.problems, self.prompt_ids = tasks.encode(
                problems, tokenizer, config.max_prompt_tokens, vocabulary=vocabulary
            )
        except ValueError as error:
            raise InputError(f"--model {config.model}, --task {task}: {error}") from error

    def subset(self, count: int) -> "Data":
        """`count` problems (0: all), the same ones for every seed, so that runs can be compared."""
        order = epoch_order(len(self.problems), 0, 0)[: count or None]
        part = copy.copy(self)
        part.problems = [self.problems[i] for i in order]
        part.prompt_ids = [self.prompt_ids[i] for i in order]
        return part

    def digest(self) -> str:
        """A few letters that differ if a prompt or an answer does, or their order."""
        answers = [problem.answer for problem in self.problems]
        return hashlib.sha256(repr((self.prompt_ids, answers)).encode()).hexdigest()[:16]


def derived_seed(*parts: object) -> int:
    """A seed that depends on all its parts, the same in every process and Python version."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of the training problems in one pass over them; each pass has its own."""
    order = list(range(count))
    random.Random(derived_seed(seed, "order", epoch)).shuffle(order)
    return order
