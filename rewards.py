r"""What a completion is worth: is the answer right, is the form kept.

    score(["<think>6*7=42</think><answer>42</answer>"], ["42"])
    # {"accuracy": [1.0], "format": [1.0], "tag_count": [1.0], "total": [1.2]}
    accuracy(r"so \boxed{0.5}", r"\frac{1}{2}")            # 1.0
    extract_answer("<think>8?</think><answer>9</answer>")  # "9"

One ordered rule reads the answer (`extract_answer`): a wrong <answer> is wrong even if the right
one stands elsewhere. It reads references, too, so \boxed{5} and "The answer is 5." are 5 there.
`grading/equality.py` says when the two are equal; a verdict depends on them alone, and is the same
in any thread on any machine.

Model output is hostile (`9^{9^{9^9}}`, a megabyte of brackets): texts are cut to a length, nothing
is computed that is too large, and nothing is run as code. Left out: partial credit, rewards for
length, several readings of one answer. They pay for something other than being right.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from grading.equality import ANSWER_CHARACTERS, chosen, equal, gradable
from grading.spelling import TEXT, plain

DEFAULT_WEIGHTS = {"accuracy": 1.0, "format": 0.1, "tag_count": 0.1}  # the paper's, on one GPU
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END_TOKEN = re.compile(
    r"(?:<[|\uff5c][^<>|\uff5c\s]{1,30}[|\uff5c]>|</s>|<eos>|<pad>|<end_of_turn>)$"
)
READ_CHARACTERS = 20_000  # only so much of the end of a completion is searched for an answer


# Form is linear in the text, by counting and finding, never by a pattern that can backtrack.
def format(completion: str, opens_think: bool = False) -> float:
    """1.0 if the completion is <think>...</think>, white space, <answer>...</answer>, else 0.0.

    Each tag must occur exactly once, and the answer must not be blank: an empty one would be the
    cheapest way to be paid. A blank thought is fine, as models that think optionally write it.
    End-of-turn tokens are ignored. `opens_think`: the rendered prompt already ended in <think>.
    """
    text = _whole(completion, opens_think)
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    thought, _, rest = text.partition("</think>")
    gap, _, rest = rest.partition("<answer>")
    answer, _, tail = rest.partition("</answer>")
    in_order = thought.startswith("<think>") and not gap.strip() and not tail
    return 1.0 if in_order and answer.strip() else 0.0


def tag_count(completion: str, opens_think: bool = False) -> float:
    """0.25 for each of the four tags that occurs exactly once, the prompt's <think> included."""
    text = _whole(completion, opens_think)
    return 0.25 * sum(text.count(tag) == 1 for tag in TAGS)


def _whole(completion: str, opens_think: bool) -> str:
    """The text that is judged: with the prompt's <think>, without end-of-turn tokens."""
    text = completion.strip()
    for _ in range(100):  # "...</answer><|im_end|>\n</s>": from the right, token by token
        if not text.endswith(">") or not (token := END_TOKEN.search(text[-40:])):
            break
        text = text[: -len(token[0])].rstrip()
    return "<think>" + text if opens_think else text


BOX_TOKENS = re.compile(  # "\boxed form" is no box; "\\boxed{5}", escaped once too often, is one
    r"\\{1,2}(?:boxed|fbox)(?:[ \t]*(?P<box>\{)|[ \t]+(?P<bare>[-+$.\d\\][^\s$]*|[A-Z]\b))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_GAP = r"(?:[ \t,;:&$*]|\n(?!\s*\n)|\\[()\[\],;: ]|\\q?quad|\\(?:text|mbox|mathrm)\{|\})*"
TOGETHER = re.compile(  # between two boxes: ", ", "\quad and ", "papers and ", "and y_2 ="
    rf"{_GAP}(?:(?:[^\s.!?,;]+\s){{0,4}}?(?:and|or)\b{_GAP})?(?:[A-Za-z]\w*(?:_\{{\w+\}})?\s?=\s?)?"
)
CUE = re.compile(r"(?:answer|choice|option)[*_]*\s*(?:is|:|=)", re.IGNORECASE)
ANSWER_LINE = re.compile(r"^A: *(-?\$?[\d.,]*\d)\s*\Z", re.MULTILINE)  # "A: 35", GSM8K's old form
NUMBER = re.compile(  # not the 2 of cm^2, x_2 or H2
    r"(?:(?<![\w)}\]^_])-)?(?:\\[dt]?frac\{\d+\}\{\d+\}"
    r"|\$?(?<![\w^_])(?<![\^_]\{)(?:(?:\d{1,3}(?:(?:,\d{3})+(?!\d)|(?: \d{3})+(?! ?[\d,/]))|\d+)"
    r"(?:\.\d+)?(?:e[-+]?\d+)?(?:/\d+)?|\.\d+))(?:\\?%)?"
)
INLINE = re.compile(  # a formula between its marks; of "$5, not $6" the dollars are money
    r"\$\$?(?=[^\s$])[^$\n]{0,300}[^\s$]\$\$?(?!\d)|\\\(.{1,300}?\\\)|\\\[.{1,300}?\\\]"
    r"|\\begin\{[a-z]+\}.{1,300}?\\end\{[a-z]+\}|" + TEXT.pattern
)
OPENING = re.compile(r"^(\\[(\[]|\$\$?)\s+")  # the formula may stand on lines of its own
WORDS = r"(?<![\\A-Za-z\d])(?!(?:and|or)\s+[-$\\\d])[A-Za-z]{2,}"
PROSE = re.compile(  # also "12 (twelve)", but not "(x+3) (x-3)"
    WORDS + r"|(?<![-+*/=,)])(?<!\\cup)(?<!\\cap) \("
)
BETWEEN = re.compile(
    r"\b[A-Za-z]+'[a-z]+|" + WORDS + r"|[.:;!?](?=\s|$)|(?<!\S)[aI] (?=[A-Za-z\d$])"
)
# If a piece of text contains one of these, all of it is the answer and not only its number:
# letters, powers, pairs such as (0,9), ratios such as 3:4.
FORMULA = re.compile(r"(?!(?:and|or)\b)(?<![A-Za-z])[A-Za-z]|[\\^_]|[(\[][^()\[\]]*,|0 ?: ?0")


def extract_answer(completion: str, opens_think: bool = False) -> str | None:
    r"""Reads the one answer of a completion, or None if it has none.

    The first of these markers that is present decides alone: the last complete <answer> block; the
    last balanced \boxed{} or \fbox{}; the last ####; the last "answer is"; the last number, with
    the whole formula that it stands in. An unclosed <answer> or box is a marker without an answer:
    the text was cut there. Inside a block the other markers are looked for again. Thoughts are
    never read: from <think> to the next </think> or to the end, and everything before a </think>
    that nothing opened.
    """
    answer = _read(_spoken(completion, opens_think))
    return answer if answer and len(answer) <= ANSWER_CHARACTERS else None


def _spoken(completion: str, opens_think: bool) -> str:
    """The end of the text that is read: without thoughts, and with LaTeX for Unicode."""
    first, *thoughts = _whole(completion, opens_think).split("<think>")
    spoken = [first.rpartition("</think>")[2]]
    spoken += [thought.partition("</think>")[2] for thought in thoughts]
    return plain("\n".join(spoken)[-READ_CHARACTERS:])


def _read(text: str, is_answer: bool = False) -> str | None:
    """The ordered rule. Of a text that `is_answer`, all of it is one if it has no marker."""
    if "<answer>" in text:
        start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
        inside = text[start + len("<answer>") :].partition("</answer>")[0]
        return _read(inside, is_answer=True) if start >= 0 else None
    if any(token["box"] or token["bare"] for token in BOX_TOKENS.finditer(text)):
        return last_boxed(text)
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0]
        return _read(line, is_answer=True)
    if not is_answer and (line := ANSWER_LINE.search(text)):
        return line[1]
    if CUE.search(text):
        return _after_cue(text)
    return text.strip() if is_answer else _last_number(text.strip())


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced \boxed{} or \fbox{}, or of "\boxed 12", or None.

    Boxes of one sentence with nothing or an "and" between them are one list: "\boxed{2} and
    \boxed{5}" is "2, 5".
    """
    contents, following = [], 0
    for start, end, content in reversed(_boxes(text)):
        if contents and not TOGETHER.fullmatch(text, end, following):
            break
        contents.insert(0, content)
        following = start
    return ", ".join(dict.fromkeys(contents)) if contents else None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of each box that holds no other."""
    boxes, braces = [], []  # the open ones: an answer such as \frac{3}{8} has braces of its own
    for token in BOX_TOKENS.finditer(text):
        if token["box"] or token["open"]:
            braces.append(token)
        elif token["bare"]:
            boxes.append((*token.span(), token["bare"]))
        elif token["close"] and braces:
            opening = braces.pop()
            if opening["box"] and not (boxes and boxes[-1][0] > opening.start()):
                content = text[opening.end() : token.start()].strip()
                boxes.append((opening.start(), token.end(), content))
    return boxes


def _after_cue(text: str) -> str | None:
    """What follows the last "answer is": a letter of a choice, an expression, or words."""
    *_, cue = CUE.finditer(text)
    rest = text[cue.end() :].lstrip(" \t\n:*=_")[:ANSWER_CHARACTERS]
    line = OPENING.sub(r"\1", rest).partition("\n")[0]
    full_stop = re.search(r"\.(?=\s|$)|$", _masked(line)).start()
    sentence = line[:full_stop].strip(" *")
    if letter := chosen(TEXT.sub(r"\1", sentence).strip(" $")):
        return letter
    masked = _masked(sentence)
    prose = PROSE.search(masked, 1)
    expression = (sentence[: prose.start()] if prose else sentence).strip(" ,;:*")
    if re.search(r"[-+*/=^]$", expression):
        return sentence  # prose was none: "3q + qr + 5"
    if not PROSE.match(masked) and (not prose or re.search(r"[\d\\]", expression)):
        return expression
    return next(_numbers(sentence), sentence)


def _last_number(text: str) -> str | None:
    """The last number, with all of the formula in which it stands: 10^3 is not 3."""
    if INLINE.fullmatch(text) or (
        re.search(r"[\\^=]", text) and "\n" not in text and not PROSE.search(_masked(text))
    ):
        return text
    lines = reversed(text.splitlines())
    return next((numbers[-1] for line in lines if (numbers := list(_numbers(line)))), None)


def _masked(text: str) -> str:
    """The text with every formula between marks blotted out: in those, no word is prose."""
    return INLINE.sub(lambda formula: "0" * len(formula[0]), text)


def _numbers(line: str) -> Iterator[str]:
    """The numbers and formulas between the words of a line."""
    words = BETWEEN.finditer(_masked(line))
    edges = [0, *(edge for word in words for edge in word.span()), len(line)]
    for start, end in zip(edges[::2], edges[1::2]):
        stretch = line[start:end].strip(' ,;:*_`"')
        found = NUMBER.findall(stretch)
        if found and FORMULA.search(NUMBER.sub("0", stretch)):
            yield stretch
        else:
            yield from found


def is_gradable(reference: str) -> bool:
    """Whether a reference can be compared with: neither blank, nor cut, nor unfinished."""
    return gradable(_reference(reference))


def are_gradable(references: Sequence[str]) -> list[bool]:
    """The same for many."""
    return list(map(is_gradable, references))


def _reference(text: str) -> str:
    r"""A reference as an <answer> with the same text is read: of \boxed{5} and #### 5 the 5."""
    return _read(plain(text[-READ_CHARACTERS:]), is_answer=True) or ""


@lru_cache(maxsize=50_000)
def _is_right(answer: str, reference: str) -> bool:
    return equal(answer, _reference(reference))


def accuracy(completion: str, answer: str, opens_think: bool = False) -> float:
    """1.0 if the answer read from the completion equals `answer`, the reference, else 0.0."""
    extracted = extract_answer(completion, opens_think)
    return float(extracted is not None and _is_right(extracted, answer))


def lenient_accuracy(completion: str, answer: str, opens_think: bool = False) -> float:
    """1.0 if the reference stands anywhere outside thoughts, else 0.0.

    For comparison only: a reward like this pays a text that names every number.
    """
    text = _spoken(completion, opens_think)
    found = [extract_answer(completion, opens_think), *(box[2] for box in _boxes(text))]
    found += [formula[0] for formula in INLINE.finditer(text)]
    found += [*NUMBER.findall(text), *re.findall(r"\b[A-Z]\b", text)]  # and choices
    return float(any(_is_right(each, answer) for each in dict.fromkeys(filter(None, found))))


def score(
    completions: Sequence[str],
    answers: Sequence[str],
    weights: Sequence[float] | Mapping[str, float] = DEFAULT_WEIGHTS,
    opens_think: bool = False,
) -> dict[str, list[float]]:
    """The parts of the reward and their weighted `total`: a list each, one item per completion.

    Args:
        weights: of accuracy, format and tag count, in this order or by name; a name left out
            weighs 0. The weights matter: PODS keeps the rollouts whose totals vary most.
    Raises:
        ValueError: the lengths differ, or the weights are not those of the three parts.
    """
    if len(completions) != len(answers):
        raise ValueError(f"{len(completions)} completions but {len(answers)} answers")
    names = list(DEFAULT_WEIGHTS)
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise ValueError(f"{len(weights)} weights: give one for each of {names}")
        weights = dict(zip(names, weights, strict=True))
    if unknown := weights.keys() - DEFAULT_WEIGHTS.keys():
        raise ValueError(f"no reward is called {sorted(unknown)}: weigh {names}")
    parts = {
        "accuracy": [accuracy(*pair, opens_think) for pair in zip(completions, answers)],
        "format": [format(text, opens_think) for text in completions],
        "tag_count": [tag_count(text, opens_think) for text in completions],
    }
    count = range(len(completions))
    total = [sum(weight * parts[name][i] for name, weight in weights.items()) for i in count]
    return parts | {"total": total}
