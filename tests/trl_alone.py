"""Run by test_trl_pods.py in a folder that holds trl_pods.py, pods.py and nothing else.

python trl_alone.py POLICY FOUND        # a model folder; what was seen is saved as FOUND
"""

import copy
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
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

    def __call__(self, prompts, completions, completion_ids, answer, trainer_state, **_):
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


def only_33(completions, answer, log_extra, log_metric, **_):
    """Does not apply to the other answers, and cannot score every third completion."""
    log_extra("number", list(range(len(completions))))
    log_metric("asked", len(completions))
    return [float(i % 2) if right == "33" and i % 3 else None for i, right in enumerate(answer)]


def length(completion_ids, **_):
    """Cannot score every second completion of the last prompt."""
    return [len(ids) + i / 100 if i < 24 or i % 2 else None for i, ids in enumerate(completion_ids)]


def messages(pairs) -> list:
    return [([{"role": "user", "content": prompt}], answer) for prompt, answer in pairs]


def dataset(pairs) -> Dataset:
    return Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in pairs])


def make(reward_funcs, pairs=TEXTS, n=12, m=4, eval_pairs=None, **settings) -> Watched:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    settings = {"per_device_train_batch_size": 3 * m, "num_generations": m} | QUIET | settings
    trainer = Watched(
        AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32),
        reward_funcs,
        GRPOConfig("out", **settings),
        rollouts_per_prompt=n,
        train_dataset=dataset(pairs),
        eval_dataset=eval_pairs and dataset(eval_pairs),
        processing_class=tokenizer,
    )
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


def evaluated(pairs, held_out) -> dict:
    """A step, an evaluation by the way, and one more when all is done."""
    reward = Reward()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6}
    settings |= {"num_generations_eval": 3}
    trainer = make(reward, pairs, eval_pairs=held_out, max_steps=1, **settings)
    trainer.train()
    return {"metrics": trainer.evaluate(), "shown": reward.shown, "passes": trainer.passes}


def several() -> dict:
    """Two reward functions that do not always apply, with weights; what they log."""
    trainer = make([only_33, length], max_steps=1, reward_weights=[10.0, 0.5])
    trainer.train()
    found = {"rewards": [one.rewards for one in trainer.scored], "kept": trainer.scored[0].kept}
    found["answers"] = [row["answer"] for row in trainer.rows]
    extra = {name: list(values) for name, values in trainer._logs["extra"].items()}
    return found | {"log": trainer.state.log_history, "extra": extra}


def refused() -> dict:
    """The messages for what cannot work."""

    async def later(**_):
        return []

    def short(prompts, **_):
        return [1.0]

    def of_part_of_a_group():
        trainer = make(Reward())
        trainer.rows = [{"prompt": "1+1=", "answer": a} for a in ("2", "2", "2", "2", "2", "3")]
        trainer.rollout_func([row["prompt"] for row in trainer.rows], trainer)

    wrong = {
        "part": of_part_of_a_group,
        "n": lambda: make(Reward(), n=3),
        "async": lambda: make([Reward(), later]),
        "model": lambda: make(torch.nn.Linear(1, 1)),
        "short": lambda: make(short, max_steps=1).train(),
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
    found["texts"] = evaluated(TEXTS, HELD_OUT)
    found["messages"] = evaluated(messages(TEXTS), messages(HELD_OUT))
    found["several"], found["refused"] = several(), refused()
    torch.save(found, FOUND)
