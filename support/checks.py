"""What can be wrong with a model folder, a tokenizer or the data, asked before any training.

    check_names(missing, unknown, misshaped, total)     # every weight of a model is in its files
    check_finite(model.named_parameters())              # and is a number
    keep_savable(model, folder)                         # what was loaded can be written again
    check_stops(model, tokenizer)                       # a completion can end
    say_shared(train_data.problems, {"gsm8k": ...})     # questions that are trained on and tested

Each finds a mistake that otherwise trains for hours without a word, or ends them with a traceback.
What cannot be used is a ValueError in one line, with the remedy; what is only strange is said. What
can only be seen by trying is tried in rehearsal.py.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from rollouts import eos_token_ids
from support.errors import say
from support.tasks import Problem

# ---- weights -------------------------------------------------------------------------------------


def check_names(
    missing: Sequence[str], unknown: Sequence[str], misshaped: Sequence[str], total: int
) -> None:
    """Whether the files of a model hold its weights, all of them and no others.

    Args:
        missing: weights of the model that its files lack.
        unknown: tensors in the files that the model has no place for.
        misshaped: those that have another shape in the files than in the model.
        total: the model's weights.

    Raises:
        ValueError: there are such.
    """
    parts = [
        f"{len(names)} {what}, such as {names[0]}"
        for names, what in (
            (missing, f"of {total} weights are missing in its files"),
            (unknown, "tensors in its files are unknown to the model"),
            (misshaped, "have another shape in its files than in config.json"),
        )
        if names
    ]
    if not parts:
        return
    remedy = "get the whole folder anew, weights and config.json from one place"
    # torch.compile, DDP and others wrap a model, and put their own name before those inside.
    wrappers = {
        other.removesuffix(name) for name in missing for other in unknown if other.endswith(name)
    }
    if wrappers:
        remedy = f"save the model inside of its wrapper, without the prefix {min(wrappers)!r}"
    raise ValueError(f"{'; '.join(parts)}: {remedy}")


def check_finite(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError if a weight, by name, is NaN or infinite: nothing could be learned."""
    weights = [(name, weight.detach()) for name, weight in weights if weight.numel()]
    # The extremes are NaN if any number is, and take no memory.
    bad = [name for name, weight in weights if not torch.stack(weight.aminmax()).isfinite().all()]
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(weights)} weights are not finite, such as {bad[0]}: the files are "
            "damaged, or were saved after a run had diverged; get them anew"
        )


def keep_savable(model: nn.Module, folder: str) -> None:
    """Mend a generation config that transformers reads but refuses to write, and say so.

    Rollouts are drawn by the run's own settings; of these only what ends a completion is used.
    """
    config = model.generation_config
    try:
        config.validate(strict=True)
    except ValueError as error:
        reason = str(error).partition("\n- ")[2] or str(error)  # after "invalid:", the first thing
        say(
            f"{folder}/generation_config.json cannot be written as it is: only its stop tokens are "
            f"kept ({reason.splitlines()[0]})"
        )
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id
        )


# ---- tokens --------------------------------------------------------------------------------------


def vocabulary(model: nn.Module) -> int:
    """How many tokens the model has embeddings for."""
    return model.get_input_embeddings().weight.shape[0]


def check_stops(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Whether completions can end; says so if the chat template ends its turns otherwise.

    Raises:
        ValueError: no token ends a completion.
    """
    stops = eos_token_ids(model, tokenizer)
    known = [token for token in stops if 0 <= token < vocabulary(model)]
    where = "eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
    if not known:
        given = f"{stops}, is beyond the vocabulary" if stops else "is given"
        raise ValueError(f"no end-of-sequence token {given}: name it as {where}")
    end = turn_end(tokenizer)
    if end is not None and end not in stops:
        name = tokenizer.convert_ids_to_tokens(end)
        say(
            f"hint: the chat template ends a turn with {name}, which is no stop token: if "
            f"completions do not end, add {end} to eos_token_id in generation_config.json"
        )


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template puts behind an answer; None if it puts none."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template allows no such turns; rendering has its own checks
        return None
    _, answer, rest = text.rpartition(turns[1]["content"])
    after = tokenizer(rest.strip(), add_special_tokens=False)["input_ids"] if answer else []
    special = set(tokenizer.all_special_ids)
    special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return after[0] if after and after[0] in special - {tokenizer.unk_token_id} else None


# ---- data ----------------------------------------------------------------------------------------


def say_shared(trained: Sequence[Problem], tested: Mapping[str, Sequence[Problem]]) -> None:
    """Say how many questions of each evaluation task, by its name, are also trained on."""

    def plain(problem: Problem) -> str:
        return " ".join(problem.prompt.split()).casefold()

    known = set(map(plain, trained))
    for name, problems in tested.items():
        if shared := sum(plain(problem) in known for problem in problems):
            say(
                f"{shared} of {len(problems)} test questions of {name} are also trained on: its "
                "accuracy is in part what was learned by heart"
            )
