"""Problems to practise on: a prompt, its reference answer, and how a model is shown the prompt.

    problems = load_task("arithmetic", "train")            # 7,290 sums, made on the spot
    problems = load_task("carries", "train")               # those in which both columns carry
    problems = load_task("gsm8k", "test")                  # from the hub
    problems = load_task("gsm8k", "test", source=DIR)      # from DIR/test.jsonl
    problems = load_task("sums.jsonl", "train")            # your own `question` and `answer`
    problems, prompt_ids = encode(problems, tokenizer)     # rendered by the model's chat template

A problem that cannot be rewarded only costs rollouts, so both checks are made here, once, before
any training: a reference answer that cannot be graded and a prompt that is too long are dropped,
counted and said. Nothing is ever cut: half a question is another question, and a chat template
without its first token is another language. Left out: few-shot examples, mixtures, streaming.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rewards import are_gradable, last_boxed
from support.arithmetic import carries, sums
from support.errors import say

# The paper's form of answer: a thought that nobody reads, then an answer that is graded.
SYSTEM_PROMPT = (
    "Think the problem through step by step first, then state only the final answer. "
    "Write both in tags, and nothing outside them: "
    "<think>your reasoning</think><answer>your answer</answer>"
)

# For base models, which come without a chat template.
PLAIN_TEMPLATE = "{system}\n\nProblem: {prompt}\n\nSolution:"


@dataclass(frozen=True)
class Problem:
    """What the model is asked, and the answer that earns the reward."""

    prompt: str
    answer: str


# ---- rows: one function for each schema ----------------------------------------------------------
# row -> (question, problem), where the question is what a split must not straddle and an answer of
# "" says that the row has none; or None for a row that is not part of the task.


def _gsm8k(row: Mapping) -> tuple[str, Problem]:
    question = _text(row, "question")
    return question, Problem(question, _after_hashes(_text(row, "answer")) or "")


def _math(row: Mapping) -> tuple[str, Problem]:
    problem = _text(row, "problem")
    return problem, Problem(problem, last_boxed(_text(row, "solution")) or "")


def _math500(row: Mapping) -> tuple[str, Problem]:
    problem = _text(row, "problem")
    return problem, Problem(problem, _text(row, "answer"))


def _sciknoweval(row: Mapping) -> tuple[str, Problem] | None:
    if _text(row, "domain") != "Chemistry" or not _text(row, "type").startswith("mcq"):
        return None
    question, choices = _text(row, "question"), _field(row, "choices", Mapping)
    labels, texts = _field(choices, "label", list), _field(choices, "text", list)
    lines = [f"{label}) {text}" for label, text in zip(labels, texts, strict=True)]
    # The dataset's own instruction, "directly give the answer without any explanation", would
    # forbid the thought that is trained here, so this one replaces it.
    prompt = "\n".join([question, "", *lines, "", "Answer with the letter of the right choice."])
    # A key that labels none of the choices must not become some label by default.
    return question, Problem(prompt, row["answerKey"] if row.get("answerKey") in labels else "")


def _own(row: Mapping) -> tuple[str, Problem]:
    question, answer = _text(row, "question"), _text(row, "answer")
    gold = _after_hashes(answer)
    return question, Problem(question, answer.strip() if gold is None else gold)


def _text(row: Mapping, name: str) -> str:
    return str(_field(row, name, str | int | float))


def _field(row: Mapping, name: str, kind):
    value = row.get(name)
    # JSON's true is an int to Python, and its NaN a float that equals nothing.
    if isinstance(value, kind) and not isinstance(value, bool) and value == value:
        return value
    raise ValueError(f"the field {name!r} is missing or not of its type (fields: {', '.join(row)})")


def _after_hashes(solution: str) -> str | None:
    """`3*500 = <<3*500=1500>>1500 #### 1,500` -> `1500`; None without `####`."""
    _, hashes, gold = solution.rpartition("####")
    if not hashes:
        return None
    gold = gold.strip()
    return gold.replace(",", "") if re.fullmatch(r"\D?\d{1,3}(,\d{3})+(\.\d+)?", gold) else gold


# ---- loading -------------------------------------------------------------------------------------

SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
# Name: the dataset on the hub, its configurations, how its rows are read. Training on `math` and
# testing on `math500` is sound: MATH-500 is a sample of the `test` split of MATH.
DATASETS = {
    "gsm8k": ("openai/gsm8k", ("main",), _gsm8k),
    "math": ("EleutherAI/hendrycks_math", SUBJECTS, _math),
    "math500": ("HuggingFaceH4/MATH-500", (None,), _math500),
    "sciknoweval": ("hicai-zju/SciKnowEval", (None,), _sciknoweval),
}
TASKS = ("arithmetic", "carries", *DATASETS)


def load_task(name: str, split: str, source: str | Path | None = None) -> list[Problem]:
    """The problems of one split of a task; says how many were dropped.

    Args:
        name: one of `TASKS`; or a JSONL file with `question` and `answer` (the answer alone, or a
            solution that ends with `#### answer`). The file `train.jsonl` with a `test.jsonl`
            beside it, or their folder, has these two splits; of any other file a tenth of the
            questions is held out as `test`.
        split: `train` or `test`. Where the task has only one of them, a tenth of its questions is
            held out by hash (arithmetic, SciKnowEval); MATH-500 is for testing only.
        source: a folder from which a named task is read instead of the hub, as `train.jsonl` and
            `test.jsonl` in the hub's schema (SciKnowEval: every `*.jsonl` there). These may lie in
            a subfolder of the task's name, so that one folder can serve several tasks.
    Raises:
        ValueError: in one line, what is wrong with the task, the split or the data.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: use train or test")
    if name in ("arithmetic", "carries"):
        if source is not None:
            raise ValueError(f"{name} reads no data: name the task that {source} is for")
        pairs = _one_split(sums(), split, lambda pair: pair[0])
        return [Problem(*pair) for pair in pairs if name != "carries" or carries(pair[0]) == 2]

    if name in DATASETS:
        rows, read = _dataset_rows(name, split, source), DATASETS[name][2]
        must_split = name == "sciknoweval"
    elif name.endswith(".jsonl") or Path(name).is_dir():
        if source is not None:
            raise ValueError(f"{name} is read as it is: the data folder {source} has no use")
        path, must_split = _own_file(Path(name), split)
        rows, read = _jsonl_rows(path), _own
    else:
        raise ValueError(f"unknown task {name!r}: use {', '.join(TASKS)} or a .jsonl file")

    pairs = []
    for number, row in rows.items():
        try:
            pairs.append(read(row))
        except ValueError as error:
            raise ValueError(f"task {name}, {split} row {number}: {error}") from error
    pairs = [pair for pair in pairs if pair is not None]
    if must_split:  # before anything is dropped, so that no drop can move a problem
        pairs = _one_split(pairs, split, lambda pair: pair[0])
    if not pairs:
        raise ValueError(f"task {name} has no {split} problems: it needs 2 questions or more")
    gradable = are_gradable([problem.answer for _, problem in pairs])
    problems = [problem for (_, problem), good in zip(pairs, gradable) if good]
    if not problems:
        raise ValueError(f"task {name}: none of {len(pairs)} {split} problems can be graded")
    dropped = len(pairs) - len(problems)
    say(f"{name} {split}: {len(problems)} problems, {dropped} dropped (answer does not parse)")
    return problems


def _one_split(items: list, split: str, question: Callable[..., str]) -> list:
    """The tenth of the distinct questions with the lowest hashes is `test`, the rest `train`.

    By hash and not by position, so that the order of the rows does not matter, and by question, so
    that one which occurs twice is never on both sides. Python's own hash() differs between runs.
    """
    hashes = {q: hashlib.sha256(q.encode()).digest() for q in map(question, items)}
    held_out = set(sorted(hashes, key=hashes.get)[: max(1, len(hashes) // 10)])
    return [item for item in items if (question(item) in held_out) == (split == "test")]


def _dataset_rows(name: str, split: str, source: str | Path | None) -> dict[int, Mapping]:
    """The rows of a named task from the hub or from `source`, numbered from 1."""
    if name == "math500" and split == "train":
        raise ValueError("math500 is for testing only: train on math")
    if source is not None:
        folder = Path(source, name) if Path(source, name).is_dir() else Path(source)
        pattern = "*.jsonl" if name == "sciknoweval" else f"{split}.jsonl"
        files = sorted(folder.glob(pattern))
        if not files:
            raise ValueError(f"task {name}: there is no {pattern} in the folder {folder}")
        return dict(enumerate((row for file in files for row in _jsonl_rows(file).values()), 1))
    import datasets  # here, because it takes seconds and the sums do not need it

    hub, configurations, _ = DATASETS[name]
    hub_split = "test" if name == "sciknoweval" else split
    try:
        parts = [datasets.load_dataset(hub, c, split=hub_split) for c in configurations]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        where = f"{hub} from the hub (offline? --data DIR, or --eval-task {name}=DIR)"
        reason = " ".join(str(error).split())
        raise ValueError(f"task {name}: could not load {where}: {reason}") from error
    return dict(enumerate((row for part in parts for row in part), 1))


def _own_file(path: Path, split: str) -> tuple[Path, bool]:
    """The file in which a split of an own task lies, and whether it holds both splits."""
    folder = path if path.is_dir() else path.parent
    paired = path.is_dir() or path.name in ("train.jsonl", "test.jsonl")
    if paired and (folder / "test.jsonl").exists():
        return folder / f"{split}.jsonl", False
    return (folder / "train.jsonl" if path.is_dir() else path), True


def _jsonl_rows(path: Path) -> dict[int, Mapping]:
    """The objects of a JSONL file by line number; blank lines are skipped.

    Files are read like this and not through `datasets`, which would turn an answer that looks like
    a date into one, and take a file of the same name, size and time stamp for the one before it.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    rows = {}
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                rows[number] = {**json.loads(line)}
        except (ValueError, TypeError, RecursionError) as error:  # not JSON, UTF-8, or an object
            reason = getattr(error, "msg", error)
            raise ValueError(f"{path}, line {number} is not a JSON object: {reason}") from error
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


# ---- rendering -----------------------------------------------------------------------------------


def render(tokenizer, prompt: str, system_prompt: str = SYSTEM_PROMPT) -> list[int]:
    """The token ids that a model is shown for a prompt, ending where its answer begins.

    The model's own chat template decides everything, BOS included; these ids go to the sampler as
    they are, because rendered text that is tokenised again gets a second BOS. A model without a
    template gets `PLAIN_TEMPLATE`, after one BOS if it has one.
    """
    if not tokenizer.chat_template:
        text = PLAIN_TEMPLATE.format(system=system_prompt, prompt=prompt)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    user = {"role": "user", "content": prompt}
    try:
        text = _filled(tokenizer, {"role": "system", "content": system_prompt}, user)
    except ValueError:  # the template knows no system role (Gemma)
        text = None
    # Others drop it without a word (Phi-3). Then, too, the user says it all; unless the tokenizer
    # cannot read it, because the model is made for the bare question (the tiny policy).
    if text is None or (not _holds(text, system_prompt) and _can_read(tokenizer, system_prompt)):
        text = _filled(tokenizer, user | {"content": f"{system_prompt}\n\n{prompt}"})
    if not _holds(text, prompt):
        raise ValueError(f"the model's chat template drops the question {prompt[:60]!r}: mend it")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _filled(tokenizer, *messages: Mapping) -> str:
    """The chat template's text for these messages and the beginning of the answer."""
    try:
        options = {"tokenize": False, "add_generation_prompt": True}
        return tokenizer.apply_chat_template(list(messages), **options)
    except Exception as error:  # a template is a program, and may fail in any way
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from error


def _holds(text: str, part: str) -> bool:
    """Whether the part is in the text, but for white space, which templates strip."""
    return " ".join(part.split()) in " ".join(text.split())


@lru_cache(maxsize=8)
def _can_read(tokenizer, text: str) -> bool:
    """Whether the tokenizer has tokens for all of a text."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokenizer.unk_token_id not in ids


def opens_think(tokenizer, ids: list[int]) -> bool:
    """Whether a rendered prompt ends with an open `<think>`, which the completion then lacks."""
    return tokenizer.decode(ids, skip_special_tokens=False).rstrip().endswith("<think>")


def encode(
    problems: Iterable[Problem],
    tokenizer,
    max_prompt_tokens: int = 512,
    system_prompt: str = SYSTEM_PROMPT,
    vocabulary: int | None = None,
) -> tuple[list[Problem], list[list[int]]]:
    """Render every problem; one that the model cannot be shown is dropped, never cut.

    That is a prompt longer than `max_prompt_tokens`, a question that spells a special token or has
    signs that the tokenizer does not know, a token beyond `vocabulary`, the model's embeddings.

    Returns:
        The problems kept and their token ids, in the same order.
    Raises:
        ValueError: if few problems are left, or the chat template cannot be used.
    """
    problems = list(problems)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    questions = tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
    kept, unreadable = [], []
    for problem, question in zip(problems, questions):
        ids = render(tokenizer, problem.prompt, system_prompt)
        strange = [i for i in question if i in special]
        strange += [i for i in ids if vocabulary is not None and i >= vocabulary]
        if strange:
            unreadable.append((problem.prompt, strange[0]))
        elif len(ids) <= max_prompt_tokens:
            kept.append((problem, ids))
    if unreadable:
        (prompt, token), count = unreadable[0], f"{len(unreadable)} of {len(problems)} prompts"
        why = f"token {token} {tokenizer.convert_ids_to_tokens(token)!r} in {prompt[:60]!r}"
        if vocabulary is not None and token >= vocabulary:
            why += f" is beyond the model's vocabulary of {vocabulary}"
        if 2 * len(unreadable) > len(problems):
            advice = "choose a model and a tokenizer that are made for each other and for text"
            raise ValueError(f"the model cannot read {count} ({why}): {advice}")
        say(f"{count} are not plain text to the tokenizer ({why}): dropped")
    too_long = len(problems) - len(kept) - len(unreadable)
    long = f"{too_long} of {len(problems)} prompts are longer than {max_prompt_tokens} tokens"
    if not kept:
        raise ValueError(f"{long}: raise --max-prompt-tokens")
    if too_long:
        say(f"{long}: dropped")
    return [p for p, _ in kept], [ids for _, ids in kept]


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
