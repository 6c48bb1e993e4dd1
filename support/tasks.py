"""Problems to practise on: a prompt, its reference answer, and how a model is shown the prompt.

    problems = load_task("arithmetic", "train")            # 7,290 sums, made on the spot
    problems = load_task("gsm8k", "test", source=DIR)      # from DIR/test.jsonl, not the hub
    problems = load_task("sums.jsonl", "train")            # your own `question` and `answer`
    problems, prompt_ids = encode(problems, tokenizer)     # rendered by the chat template

A reference that cannot be graded and a prompt that is too long are dropped, counted and said, and
never cut: half a question is another question.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from rewards import are_gradable, last_boxed
from support.errors import say

# The paper's form of answer: a thought that nobody reads, then an answer that is graded.
SYSTEM_PROMPT = (
    "Think the problem through step by step first, then state only the final answer. "
    "Write both in tags, and nothing outside them: "
    "<think>your reasoning</think><answer>your answer</answer>"
)


@dataclass(frozen=True)
class Problem:
    """What the model is asked, the answer that earns the reward, and what else the row holds."""

    prompt: str
    answer: str
    columns: Mapping[str, object] = field(default_factory=dict, compare=False)  # of an own file


# One function for each schema of rows; an answer of "" says that the row has none.
def _gsm8k(row: Mapping) -> Problem:
    return Problem(_field(row, "question"), _after_hashes(_field(row, "answer")))


def _math(row: Mapping) -> Problem:
    # The last box alone: ones beside it spell the same answer in another way.
    last = re.split(r"(?=\\(?:boxed|fbox))", _field(row, "solution"))[-1]
    return Problem(_field(row, "problem"), last_boxed(last) or "")


def _math500(row: Mapping) -> Problem:
    return Problem(_field(row, "problem"), _field(row, "answer"))


def _sciknoweval(row: Mapping) -> Problem | None:
    """None for a row that is not part of the task."""
    if _field(row, "domain") != "Chemistry" or not _field(row, "type").startswith("mcq"):
        return None
    question, choices = _field(row, "question"), _field(row, "choices", Mapping)
    labels, texts = _field(choices, "label", list), _field(choices, "text", list)
    lines = [f"{label}) {text}" for label, text in zip(labels, texts, strict=True)]
    # The dataset's own instruction forbids an explanation, the thought that is trained here.
    prompt = "\n".join([question, "", *lines, "", "Answer with the letter of the right choice."])
    # A key that labels none of the choices must not become some label by default.
    key = row["answerKey"] if row.get("answerKey") in labels else ""
    return Problem(prompt, key, {"question": question})


def _own(row: Mapping) -> Problem:
    question, answer = _field(row, "question"), _field(row, "answer")
    others = {name: row[name] for name in row if name not in ("question", "answer")}
    return Problem(question, _after_hashes(answer) or answer.strip(), others)


def _field(row: Mapping, name: str, kind=str | int | float):
    """A field of a row, a number as text."""
    value = row.get(name)
    # JSON's true is an int to Python, and its NaN a float that equals nothing.
    if isinstance(value, kind) and not isinstance(value, bool) and value == value:
        return str(value) if isinstance(value, int | float) else value
    raise ValueError(f"the field {name!r} is missing or not of its type (fields: {', '.join(row)})")


def _after_hashes(solution: str) -> str:
    """`3*500 = <<3*500=1500>>1500 #### 1,500` -> `1500`; "" without `####`."""
    _, hashes, gold = solution.rpartition("####")
    if re.fullmatch(r"\D?\d{1,3}(,\d{3})+(\.\d+)?", gold.strip()):
        gold = gold.replace(",", "")
    return gold.strip() if hashes else ""


def sums() -> list[tuple[str, str]]:
    """All 8,100 sums of two two-digit numbers: prompt and answer."""
    return [(f"{a}+{b}=", str(a + b)) for a in range(10, 100) for b in range(10, 100)]


def carries(prompt: str) -> int:
    """How many of a sum's two columns carry: `47+85=` -> 2."""
    a, b = map(int, prompt.removesuffix("=").split("+"))
    return [a % 10 + b % 10 >= 10, a + b >= 100].count(True)


SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
SUBJECTS += ("number_theory", "prealgebra", "precalculus")
# Name: the dataset on the hub, its configurations, how its rows are read. MATH-500 is from the test
# split of MATH, so training on `math` and testing on `math500` is sound.
DATASETS = {
    "gsm8k": ("openai/gsm8k", ("main",), _gsm8k),
    "math": ("EleutherAI/hendrycks_math", SUBJECTS, _math),
    "math500": ("HuggingFaceH4/MATH-500", (None,), _math500),
    "sciknoweval": ("hicai-zju/SciKnowEval", (None,), _sciknoweval),
}
TASKS = {  # what --help says of each
    "arithmetic": "all sums of two-digit numbers, made on the spot (the default)",
    "carries": "those of them in which both columns carry",
} | {name: f"{hub}, from the hub or --data" for name, (hub, *_) in DATASETS.items()}


def load_task(name: str, split: str, source: str | Path | None = None) -> list[Problem]:
    """The problems of one split of a task; says how many were dropped.

    Args:
        name: one of `TASKS`; or a JSONL file with `question` and `answer` (the answer alone, or a
            solution that ends with `#### answer`). `train.jsonl` with `test.jsonl` beside it, or
            their folder, has these two splits.
        split: `train` or `test`. Where a task has no test split, a tenth of its questions is held
            out by hash; MATH-500 is for testing only.
        source: a folder from which a named task is read instead of the hub, as `train.jsonl` and
            `test.jsonl` (SciKnowEval: every `*.jsonl`), there or in a folder of the task's name.
    Raises:
        ValueError: in one line, what is wrong with the task, the split or the data.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}: use train or test")
    if source is not None and name not in DATASETS:
        raise ValueError(f"{name} reads no data folder: name the task that {source} is for")
    if name in ("arithmetic", "carries"):
        problems = _one_split([Problem(*pair) for pair in sums()], split)
        return [p for p in problems if name == "arithmetic" or carries(p.prompt) == 2]
    if name in DATASETS:
        rows, read = _dataset_rows(name, split, source), DATASETS[name][2]
        must_split = name == "sciknoweval"
    elif name.endswith(".jsonl") or Path(name).is_dir():
        path = Path(name, "train.jsonl") if Path(name).is_dir() else Path(name)
        splits = path.name in ("train.jsonl", "test.jsonl")
        must_split = not (splits and path.with_name("test.jsonl").exists())
        rows, read = _jsonl_rows(path if must_split else path.with_name(f"{split}.jsonl")), _own
    else:
        raise ValueError(f"unknown task {name!r}: use {', '.join(TASKS)} or a .jsonl file")
    every = []
    for number, row in enumerate(rows, start=1):
        try:
            every.append(read(row))
        except ValueError as error:
            raise ValueError(f"task {name}, {split} row {number}: {error}") from error
    every = [problem for problem in every if problem]
    if must_split:  # before anything is dropped, so that no drop can move a problem
        every = _one_split(every, split)
    gradable = are_gradable([problem.answer for problem in every])
    problems = [problem for problem, good in zip(every, gradable) if good]
    if not problems:
        need = "give 2 questions or more, with answers that can be graded"
        raise ValueError(f"task {name}: none of {len(every)} {split} problems is left: {need}")
    dropped = len(every) - len(problems)
    say(f"{name} {split}: {len(problems)} problems, {dropped} dropped (answer does not parse)")
    return problems


def _one_split(problems: list[Problem], split: str) -> list[Problem]:
    """The tenth of the distinct questions with the lowest hashes is `test`, in whatever order."""
    questions = [p.columns.get("question", p.prompt) for p in problems]  # without choices
    hashes = {question: hashlib.sha256(question.encode()).digest() for question in questions}
    held_out = set(sorted(hashes, key=hashes.get)[: max(1, len(hashes) // 10)])
    return [p for p, q in zip(problems, questions) if (q in held_out) == (split == "test")]


def _dataset_rows(name: str, split: str, source: str | Path | None) -> list[Mapping]:
    """The rows of a named task from the hub or from `source`."""
    if name == "math500" and split == "train":
        raise ValueError("math500 is for testing only: train on math")
    if source is not None:
        folder = Path(source, name) if Path(source, name).is_dir() else Path(source)
        pattern = "*.jsonl" if name == "sciknoweval" else f"{split}.jsonl"
        files = sorted(folder.glob(pattern))
        if not files:
            raise ValueError(f"task {name}: there is no {pattern} in the folder {folder}")
        return [row for file in files for row in _jsonl_rows(file)]
    import datasets  # takes seconds, and the sums do not need it

    hub, configurations, _ = DATASETS[name]
    split = "test" if name == "sciknoweval" else split  # all it has: ours are made from it
    try:
        return [row for c in configurations for row in datasets.load_dataset(hub, c, split=split)]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        hint = f"offline? --data DIR, or --eval-task {name}=DIR"
        raise ValueError(f"could not load {hub} ({hint}): {reason}") from error


def _jsonl_rows(path: Path) -> list[Mapping]:
    """The objects of a JSONL file; blank lines are skipped.

    Not through `datasets`: it turns an answer that looks like a date into one, and takes a file of
    the same name, size and time stamp for the one before it.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append({**json.loads(line)})
        except (ValueError, TypeError, RecursionError) as error:  # not JSON, UTF-8, or an object
            reason = getattr(error, "msg", error)
            raise ValueError(f"{path}, line {number} is not a JSON object: {reason}") from error
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def render(tokenizer, prompt: str) -> list[int]:
    """The token ids that a model is shown for a prompt, ending where its answer begins.

    The model's own chat template decides everything, BOS included: rendered text that is tokenised
    again would get a second one. A base model, without a template, gets plain text after one BOS.
    """
    if not tokenizer.chat_template:
        text = f"{SYSTEM_PROMPT}\n\nProblem: {prompt}\n\nSolution:"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
    user = {"role": "user", "content": prompt}
    try:
        text = _filled(tokenizer, [{"role": "system", "content": SYSTEM_PROMPT}, user])
    except ValueError:  # the template knows no system role (Gemma)
        text = None
    # Others drop it without a word (Phi-3). The user says it all, then; unless the tokenizer cannot
    # read it, because the model is made for the bare question (the tiny policy).
    if text is None or (not _holds(text, SYSTEM_PROMPT) and _can_read(tokenizer, SYSTEM_PROMPT)):
        text = _filled(tokenizer, [user | {"content": f"{SYSTEM_PROMPT}\n\n{prompt}"}])
    if not _holds(text, prompt):
        raise ValueError(f"the model's chat template drops the question {prompt[:60]!r}: mend it")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _filled(tokenizer, messages: list[Mapping]) -> str:
    """The chat template's text for these messages and the beginning of the answer."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, and may fail in any way
        raise ValueError(f"the chat template fails: {' '.join(str(error).split())}") from error


def _holds(text: str, part: str) -> bool:
    """Whether the part is in the text, but for white space, which templates strip."""
    return " ".join(part.split()) in " ".join(text.split())


@lru_cache(maxsize=8)
def _can_read(tokenizer, text: str) -> bool:
    """Whether the tokenizer has tokens for all of a text."""
    return tokenizer.unk_token_id not in tokenizer(text, verbose=False)["input_ids"]


def opens_think(tokenizer, ids: list[int]) -> bool:
    """Whether a rendered prompt ends with an open `<think>`, which the completion then lacks."""
    return tokenizer.decode(ids).rstrip().endswith("<think>")


def encode(
    problems: Sequence[Problem], tokenizer, max_prompt_tokens: int = 512, vocabulary=math.inf
) -> tuple[list[Problem], list[list[int]]]:
    """Render every problem; returns those that the model can be shown, and their token ids.

    Dropped, never cut, are a prompt longer than `max_prompt_tokens`, a question with special tokens
    or signs that the tokenizer does not know, a token beyond `vocabulary`, the model's embeddings.
    ValueError if few problems are left, or the chat template cannot be used.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(i for i, token in added if token.special)}
    questions = tokenizer([p.prompt for p in problems], add_special_tokens=False)["input_ids"]
    kept, prompt_ids, unreadable = [], [], []
    for problem, question in zip(problems, questions):
        ids = render(tokenizer, problem.prompt)
        strange = [i for i in question if i in special] + [i for i in ids if i >= vocabulary]
        if strange:
            name = f"token {strange[0]} {tokenizer.convert_ids_to_tokens(strange[0])!r}"
            unreadable.append(f"{name} in {problem.prompt[:60]!r}")
        elif len(ids) <= max_prompt_tokens:
            kept.append(problem)
            prompt_ids.append(ids)
    if unreadable:
        reason = f"{len(unreadable)} of {len(problems)} prompts: {unreadable[0]} is no plain text "
        reason += f"within the model's vocabulary of {min(vocabulary, len(tokenizer))}"
        if 2 * len(unreadable) > len(problems):
            raise ValueError(f"the model cannot read {reason}: choose a tokenizer made for text")
        say(f"dropped {reason}")
    if too_long := len(problems) - len(kept) - len(unreadable):
        long = f"{too_long} of {len(problems)} prompts are longer than {max_prompt_tokens} tokens"
        if not kept:
            raise ValueError(f"{long}: raise --max-prompt-tokens")
        say(f"{long}: dropped")
    return kept, prompt_ids
