"""How fast are rollouts generated? Our samplers against transformers' own `generate`.

python bench.py sampler
python bench.py sampler --model DIR --task gsm8k --n 16 64 --max-new-tokens 256

Legend: P prompts, n rollouts each, T completion tokens.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benches.measure import interleaved, new_figure, ratio, table
from rollouts import Rollouts, TorchSampler, draw, eos_token_ids
from support.run import Run
from support.settings import Config
from support.vllm import VLLMSampler


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--model", default=Config.model, help="folder or hub name")
    parser.add_argument("--task", default=Config.task, help="where the prompts come from")
    parser.add_argument("--data", help="folder with the task's train.jsonl and test.jsonl")
    parser.add_argument("--prompts", type=int, default=8, help="P")
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64, 256], help="rollouts a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="at most")


def sampler(arguments: argparse.Namespace) -> dict:
    """Completion tokens per second of TorchSampler, transformers' `generate` and vLLM.

    All sample the same prompts from the same weights at temperature 1, in turn, without top-k or
    top-p. TorchSampler and vLLM also return texts and log-probs in that time, `generate` only ids.
    The prefill's share is the time of a call for one token over the time of the whole call; the
    draw's, of TorchSampler, is what choosing a token by its probability takes of a token's time.
    """
    names = ("model", "task", "data", "threads")
    config = Config(**{name: getattr(arguments, name) for name in names})
    run = Run(config, train=False)
    data = next(iter(run.eval_data.values()))
    prompts = data.prompt_ids[: arguments.prompts]
    length = min(arguments.max_new_tokens, run.max_new_tokens)
    found = samplers(run.model, run.tokenizer)
    rows = []
    vocabulary = run.model.config.get_text_config().vocab_size
    for n in arguments.n:
        rows += sampler_rows(found, prompts, n, length, arguments.rounds, vocabulary)
    print(table(f"generation: {len(prompts)} prompts of {config.task}, {config.model}", rows))
    picture(rows, arguments.out / "sampler.png")
    return {"model": config.model, "prompts": len(prompts), "rows": rows}


class GenerateSampler:
    """transformers' own `generate`, as most trainers call it; only the tokens, no log-probs."""

    def __init__(self, model: nn.Module, tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.eos_ids = eos_token_ids(model, tokenizer)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
    ) -> torch.Tensor:
        """Completion ids [P*n, T], padded after EOS."""
        torch.manual_seed(seed)
        inputs = self.tokenizer.pad(
            {"input_ids": prompts}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        ids = self.model.generate(
            **inputs,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            num_return_sequences=n,
            eos_token_id=self.eos_ids,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        return ids[:, inputs["input_ids"].shape[1] :]


def count_tokens(completions: "Rollouts | torch.Tensor", eos_ids: Sequence[int]) -> int:
    """Completion tokens, EOS included: what is padded after it is no work done."""
    if isinstance(completions, Rollouts):
        return int(completions.mask.sum())
    ended = torch.isin(completions, torch.tensor(eos_ids, device=completions.device)).long()
    return int((ended.cumsum(-1) - ended == 0).sum())  # tokens with no EOS before them


def samplers(model: nn.Module, tokenizer) -> dict[str, object]:
    """Everything that can generate here, by name."""
    found = {"generate": GenerateSampler(model, tokenizer), "torch": TorchSampler(model, tokenizer)}
    try:
        found["vllm"] = VLLMSampler(model, tokenizer)
    except ImportError as error:  # not installed, or the build for another device
        print(f"no row for vLLM: {str(error).splitlines()[0]}")
    return found


def sampler_rows(
    found: dict[str, object],
    prompts: list[list[int]],
    n: int,
    length: int,
    rounds: int,
    vocabulary: int,
) -> list[dict]:
    """One row a sampler, for n rollouts of each prompt."""
    rollouts, generator = len(prompts) * n, torch.Generator().manual_seed(0)
    probabilities = torch.randn(rollouts, vocabulary, generator=generator).softmax(-1)
    functions = {"draw": partial(draw, probabilities, torch.arange(rollouts), generator)}
    for name, one in found.items():
        functions[name] = partial(one.generate, prompts, n, length, 1.0, seed=0)
        functions[f"{name}, 1 token"] = partial(one.generate, prompts, n, 1, 1.0, seed=0)
    tokens = {name: count_tokens(functions[name](), found["generate"].eos_ids) for name in found}
    times = interleaved(functions, rounds)
    # Each draws its own tokens from the same policy, so seconds compare only token by token.
    tokens["draw"] = rollouts
    per_token = {name: [s / tokens[name] for s in times[name]] for name in tokens}
    return [
        {
            "n": n,
            "sampler": name,
            "tokens": tokens[name],
            "tokens/s": 1 / statistics.median(per_token[name]),
            "prefill share": ratio(times, f"{name}, 1 token", name),
            "draw share": ratio(per_token, "draw", name) if name == "torch" else None,
            "speed / generate": ratio(per_token, "generate", name),
        }
        for name in found
    ]


def picture(rows: list[dict], path: Path) -> None:
    """Tokens per second and the prefill's share against n."""
    figure, (left, right) = new_figure(2)
    for name in dict.fromkeys(row["sampler"] for row in rows):
        view = [row for row in rows if row["sampler"] == name]
        n = [row["n"] for row in view]
        left.plot(n, [row["tokens/s"] for row in view], marker="o", label=name)
        right.plot(n, [row["prefill share"][0] for row in view], marker="o", label=name)
    left.set(title="Speed of generation", ylabel="completion tokens per second")
    right.set(title="Share of the time until the first token", ylabel="share of a call")
    for axes in (left, right):
        axes.set(xlabel="rollouts n for each prompt", xscale="log", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
