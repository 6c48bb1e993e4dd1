"""How fast are rollouts generated? Our samplers against transformers' own `generate`.

    python bench.py sampler
    python bench.py sampler --n 16 64 -- --model DIR --task gsm8k --max-new-tokens 256

Legend: P prompts, n rollouts each, T completion tokens.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benches.measure import interleaved, ratio, table, train_settings
from rollouts import Rollouts, TorchSampler
from support.run import Run
from support.vllm import VLLMSampler


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this part."""
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--prompts", type=int, default=8, help="P")
    parser.add_argument("--n", type=int, nargs="+", default=[16, 64, 256], help="rollouts a prompt")


def sampler(arguments: argparse.Namespace) -> dict:
    """Completion tokens per second of TorchSampler, transformers' `generate` and vLLM.

    All sample the same prompts from the same weights, in turn, without top-k or top-p. TorchSampler
    and vLLM also return texts and log-probs in that time, `generate` only ids.
    """
    run = Run(train_settings(arguments), train=False)
    prompts = next(iter(run.eval_data.values())).prompt_ids[: arguments.prompts]
    found, rows = samplers(run), []
    for n in arguments.n:
        request = (prompts, n, run.max_new_tokens, run.config.temperature, 0)
        calls = {name: partial(one, *request) for name, one in found.items()}
        tokens = {name: count_tokens(call(), run.sampler.eos_ids) for name, call in calls.items()}
        times = interleaved(calls, arguments.rounds)
        # Each draws its own tokens from the same policy, so seconds compare only token by token.
        per_token = {name: [s / tokens[name] for s in times[name]] for name in calls}
        for name, seconds in per_token.items():
            row = {"n": n, "sampler": name, "tokens": tokens[name]}
            row["tokens/s"] = 1 / statistics.median(seconds)
            rows.append(row | {"speed / generate": ratio(per_token, "generate", name)})
    print(table(f"{len(prompts)} prompts of {run.config.task}, {run.config.model}", rows))
    return {"model": run.config.model, "prompts": len(prompts), "rows": rows}


def samplers(run: Run) -> dict[str, Callable]:
    """The `generate` of everything that can sample here, by name."""
    found = {"generate": partial(generate, run)}
    found["torch"] = TorchSampler(run.model, run.tokenizer).generate
    try:
        found["vllm"] = VLLMSampler(run.model, run.tokenizer).generate
    except ImportError as error:  # not installed, or the build for another device
        print(f"no row for vLLM: {str(error).splitlines()[0]}")
    return found


@torch.inference_mode()
def generate(run: Run, prompts: list, n: int, T: int, temperature: float, seed: int):
    """transformers' own, as most trainers call it: completion ids [P*n, T], padded after EOS."""
    torch.manual_seed(seed)
    inputs = run.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    options = {"temperature": temperature, "max_new_tokens": T, "num_return_sequences": n}
    options |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "eos_token_id": run.sampler.eos_ids}
    options["pad_token_id"] = run.tokenizer.pad_token_id
    ids = run.model.eval().generate(**inputs.to(run.model.device), **options)
    return ids[:, inputs["input_ids"].shape[1] :]


def count_tokens(completions: Rollouts | torch.Tensor, eos_ids: Sequence[int]) -> int:
    """Completion tokens, EOS included: what is padded after it is no work done."""
    if isinstance(completions, Rollouts):
        return int(completions.mask.sum())
    ended = torch.isin(completions, torch.tensor(eos_ids, device=completions.device)).long()
    return int((ended.cumsum(-1) - ended == 0).sum())  # tokens with no EOS before them
