"""Run by test_trl_pods.py in a folder with trl_pods.py, pods.py and the README's example.py alone.

python trl_alone.py POLICY FOUND        # a model folder; what was seen is saved as FOUND
"""

import copy
import functools
import runpy
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template
from trl_pods import PodsTrainer

POLICY, FOUND = sys.argv[1:]
# One prompt twice, with two answers, and one that is shorter.
TEXTS = [("11+22=", "33"), ("11+22=", "44"), ("5+6=", "11")]
HELD_OUT = [("40+41=", "81"), ("40+41=", "82")]
QUIET = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
QUIET |= {"report_to": "none", "save_strategy": "no", "logging_steps": 1}
QUIET |= {"max_completion_length": 20, "temperature": 0.9, "max_grad_norm": 0.0, "seed": 3}
QUIET |= {"lr_scheduler_type": "constant", "learning_rate": 1e-2}


class Watched(PodsTrainer):
    """Notes the prompts of each backward pass."""

    def compute_loss(self, model, inputs, *args, **options):
        self.passes.append([int(mask.sum()) for mask in inputs["prompt_mask"]])
        return super().compute_loss(model, inputs, *args, **options)


class Gradients(transformers.TrainerCallback):
    """Notes weights and gradient before each step of the optimiser."""

    def __init__(self) -> None:
        self.weights, self.gradients = [], []

    def on_pre_optimizer_step(self, *_, model, **__) -> None:
        self.weights.append(copy.deepcopy(model.state_dict()))
        self.gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())


class Reward:
    """Notes what it was shown."""

    def __init__(self) -> None:
        self.shown = []

    def __call__(self, /, prompts, completions, completion_ids, answer, trainer_state, **_):
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        rewards = [
            float(f"<answer>{right}</answer>" in text) + len(set(text)) / 100
            for text, right in zip(texts, answer, strict=True)
        ]
        self.shown.append(
            {"prompts": prompts, "completions": completions, "ids": completion_ids}
            | {"answers": answer, "rewards": rewards, "step": trainer_state.global_step}
        )
        return rewards


class Both(transformers.ProcessorMixin):
    """What models that see have: a tokenizer, and more."""

    attributes, tokenizer_class = ("tokenizer",), "AutoTokenizer"


def only_33(completions, answer, log_extra, log_metric, **_):
    """Does not apply to the other answers, and cannot score every third completion."""
    log_extra("number", list(range(len(completions))))
    log_metric("asked", len(completions))
    return [float(i % 2) if right == "33" and i % 3 else None for i, right in enumerate(answer)]


def length(completion_ids, scale, **_):
    """Cannot score every second completion of the last prompt."""
    lengths = [scale * len(ids) + i / 100 for i, ids in enumerate(completion_ids)]
    return [each if i < 24 or i % 2 else None for i, each in enumerate(lengths)]


def dataset(pairs) -> Dataset:
    named = dict.fromkeys(("self", "columns", "log_metric", "log_extra", "trainer_state"), "taken")
    return Dataset.from_list([{"prompt": prompt, "answer": a} | named for prompt, a in pairs])


def parts(reward_funcs, settings, pairs, eval_pairs=None) -> dict:
    """What GRPOTrainer takes, and ours too; m is 4."""
    settings = {"per_device_train_batch_size": 12, "num_generations": 4} | QUIET | settings
    return {
        "model": AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32),
        "reward_funcs": reward_funcs,
        "args": GRPOConfig("out", **settings),
        "train_dataset": dataset(pairs),
        "eval_dataset": eval_pairs and dataset(eval_pairs),
        "processing_class": AutoTokenizer.from_pretrained(POLICY),
    }


def make(reward_funcs, pairs=TEXTS, n=12, eval_pairs=None, **settings) -> Watched:
    arguments = parts(reward_funcs, settings, pairs, eval_pairs)
    trainer = Watched(**arguments, rollouts_per_prompt=n)
    trainer.passes = []
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def steps(count: int, **settings) -> dict:
    """What `count` steps did."""
    reward, gradients = Reward(), Gradients()
    trainer = make(reward, max_steps=count, **settings)
    trainer.add_callback(gradients)
    trainer.train()
    found = {"shown": reward.shown, "passes": trainer.passes, "log": trainer.state.log_history}
    return found | vars(gradients)


def evaluated() -> dict:
    """A step, an evaluation by the way, and one more when all is done."""
    reward = Reward()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6}
    settings |= {"num_generations_eval": 3}
    trainer = make(reward, eval_pairs=HELD_OUT, max_steps=1, **settings)
    trainer.train()
    return {"metrics": trainer.evaluate(), "shown": reward.shown, "passes": trainer.passes}


def several() -> dict:
    """Two reward functions that do not always apply, with weights; what they log."""
    rewards = [only_33, functools.partial(functools.partial(length), scale=1)]
    trainer = make(rewards, max_steps=1, reward_weights=[10.0, 0.5])
    trainer.train()
    found = {"rewards": [one.rewards for one in trainer.scored], "kept": trainer.scored[0].kept}
    found["answers"] = [row["answer"] for row in trainer.rows]
    extra = {name: list(values) for name, values in trainer._logs["extra"].items()}
    return found | {"log": trainer.state.log_history, "extra": extra}


def shown_by_both(pairs, **of_tokenizer) -> list:
    """The completions that GRPOTrainer shows to reward functions, and those of ours, if n = m."""
    shown = []
    for trainer, n in ((GRPOTrainer, {}), (PodsTrainer, {"rollouts_per_prompt": 4})):
        arguments = parts(reward := Reward(), {"max_steps": 1}, pairs)
        vars(arguments["processing_class"]).update(of_tokenizer)
        trainer(**arguments, **n).train()
        shown.append(reward.shown[0]["completions"])
    return shown


def refused() -> dict:
    """The messages for what cannot work."""

    async def later(**_):
        return []

    def short(prompts, **_):
        return [1.0]

    def one_of_two_processes():
        arguments = parts(Reward(), {}, TEXTS)
        arguments["args"].per_device_train_batch_size = 6  # GRPOConfig sees all of the 12
        PodsTrainer(**arguments, rollouts_per_prompt=12)

    def with_a_processor():
        arguments = parts(Reward(), {}, TEXTS)
        arguments["processing_class"] = Both(arguments["processing_class"])
        arguments["model"].config.image_token_id = 0
        PodsTrainer(**arguments, rollouts_per_prompt=12)

    two = {"per_device_eval_batch_size": 2}
    wrong = {
        "part": one_of_two_processes,
        "part in evaluation": lambda: make(Reward(), eval_pairs=HELD_OUT, **two),
        "part of other data": lambda: make(Reward(), **two).evaluate(dataset(HELD_OUT)),
        "n": lambda: make(Reward(), n=3),
        "async": lambda: make([Reward(), later]),
        "model": lambda: make(torch.nn.Linear(1, 1)),
        "short": lambda: make(short, max_steps=1).train(),
        "processor": with_a_processor,
        "tools": lambda: PodsTrainer(POLICY, Reward(), rollouts_per_prompt=4, tools=[print]),
    }
    found = {}
    for name, work in wrong.items():
        try:
            work()
        except ValueError as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    losses = ("grpo", "dapo", "dr_grpo")
    two = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    found = {loss: steps(1, loss_type=loss, **two) for loss in losses}
    kl = {"beta": 0.5, "use_bias_correction_kl": False}  # the plain one, without the ratio
    found["epochs"] = steps(2, loss_type="grpo", num_iterations=2, learning_rate=1e-3, **kl)
    found["evaluated"], found["several"], found["refused"] = evaluated(), several(), refused()
    unscored = make(lambda prompts, **_: [None] * len(prompts), max_steps=1)
    unscored.train()
    found["unscored"] = unscored.state.log_history
    messages = [([{"role": "user", "content": prompt}], answer) for prompt, answer in TEXTS]
    parsed = {"response_template": qwen3_template}
    opened = {"chat_template": "{{ messages[-1]['content'] }}<think>"}
    found["both"] = {
        "texts": shown_by_both(TEXTS),
        "messages": shown_by_both(messages),
        "thoughts": shown_by_both(messages, **parsed),
        "thoughts the prompt opens": shown_by_both(messages, **parsed, **opened),
    }
    found["example"] = runpy.run_path("example.py")["trainer"].state.log_history
    torch.save(found, FOUND)
