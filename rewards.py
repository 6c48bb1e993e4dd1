r"""What a completion is worth: is the answer right, is the form kept.

    score(["<think>6*7=42</think><answer>42</answer>"], ["42"])
    # {"accuracy": [1.0], "format": [1.0], "tag_count": [1.0], "total": [1.2]}
    accuracy(r"so \boxed{0.5}", r"\frac{1}{2}")            # 1.0
    extract_answer("<think>8?</think><answer>9</answer>")  # "9"

The idea: read one answer out of the text, then ask whether it is the reference answer.

* Reading is one ordered rule (`extract_answer`). The first marker that is present decides alone; a
  wrong <answer> is wrong whatever else the text contains. Thoughts are never read.
* Comparing starts in this process: letters of multiple choice, numbers (exactly, as fractions),
  words, lists of those. That settles nearly all answers to word problems in microseconds.
* What is left is algebra, and goes to math-verify: in another process, for model output is hostile
  (`9^{9^{9^9}}`), under limits of time and memory that the kernel keeps. Nothing is ever evaluated
  as code. A comparison that fails is worth 0 and is counted apart (`grader_stats`).

What counts as equal, where a mathematician has to decide:

    numbers    exact: 0.5 is 1/2, but 0.333333 is not 1/3; 1,234 and 1\,234 and 1 234 are 1234, and
               48,50 is not a number; 1e5 is 100000; 1\frac{1}{2} is 3/2; 2 million is 2000000
    percent    45% is 45 and is 0.45, whichever side has the sign; without a sign 45 is not 0.45
    units      18 cm is 18, not 18 m; $18 is 18; 90^\circ is 90; nothing is converted
    bases      52_8 is matched by 52_8 and by 52, as its question names the base; not 52_9 or 42
    work       47+85 is not 132 and 6*7 is not 42, or copying a question would pay; 2^{10} is 1024;
               an answer with \sum, \prod, \int or \lim must be spelled like the reference
    equations  x=5 is 5 and 5+7=12 is 12 if the other side is no equation; x=5 is not y=5
    lists      1,2 is 2,1 and \{2,1\}; (1,2) is ordered: it is 1,2, but not \{1,2\}, [1,2] or (2,1)
    intervals  (2,\infty) is x>2; the kind of bracket matters
    words      letter by letter but for case: stop is not pots, and 7 is not seven
    formulas   NaCl is not ClNa, and H_2O is H2O
    choices    B is matched by B, (B), B) text, B: text, Option B, and by a lone b

Left out: partial credit, rewards for length, several readings of one answer. They pay for something
other than being right. Needs `fork` and `setrlimit`: Linux or macOS.
"""

import atexit
import functools
import gc
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

DEFAULT_WEIGHTS = {"accuracy": 1.0, "format": 0.1, "tag_count": 0.1}  # the paper's, on one GPU
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
END_TOKEN = re.compile(
    r"(?:<[|\uff5c][^<>|\uff5c\s]{1,30}[|\uff5c]>|</s>|<eos>|<pad>|<end_of_turn>)$"
)

READ_CHARACTERS = 20_000  # only so much of the end of a completion is searched for an answer
ANSWER_CHARACTERS = 1_000  # a longer answer is no answer
ALGEBRA_CHARACTERS = 400  # a longer answer is not given to math-verify
ORDINARY_SECONDS = 0.05  # CPU time that one comparison by math-verify may always take
ANSWER_SECONDS = 1.0  # what it may take beyond that, as long as
BATCH_SECONDS = 2.0  # all comparisons of one call together have not wasted this much
DEADLINE_SECONDS = 5.0  # wall-clock time for one call, besides the ordinary time of its answers
MEMORY_BYTES = 2 << 30  # address space of the process that compares

# ---- Form: linear in the text, by counting and finding, never by a pattern that can backtrack.


def format(completion: str, opens_think: bool = False) -> float:
    """1.0 if the completion is <think>...</think>, white space, <answer>...</answer>, else 0.0.

    Each tag must occur exactly once, and the answer must not be blank: an empty one would be the
    cheapest way to be paid. A blank thought is fine, as models that think optionally write it.

    Args:
        completion: what the policy wrote, without the prompt. Blanks and end-of-turn tokens around
            it are ignored.
        opens_think: the rendered prompt already ended in <think>.
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
    """0.25 for each of the four tags that occurs exactly once, wherever it stands.

    Args: as for `format`; a <think> that the prompt opened counts as written.
    """
    text = _whole(completion, opens_think)
    return 0.25 * sum(text.count(tag) == 1 for tag in TAGS)


def _whole(completion: str, opens_think: bool) -> str:
    """The text that is judged: with the prompt's <think>, without end-of-turn tokens."""
    text = completion.strip()
    for _ in range(100):  # "...</answer><|im_end|>\n</s>": from the right, token by token
        if not (token := END_TOKEN.search(text[-40:])):
            break
        text = text[: -len(token[0])].rstrip()
    return "<think>" + text if opens_think else text


# ---- Reading: which part of the text is the answer.

CHARACTERS = str.maketrans(  # what people type, as LaTeX spells it
    dict.fromkeys("\u2212\u2013\ufe63\uff0d\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003", " ")
    | dict.fromkeys("€£¥\u200b", "")
    | {"\u00d7": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty "}
    | {
        "°": r"^\circ ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "²": "^2",
        "³": "^3",
    }
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "\u222a": r"\cup ", "∈": r"\in "}
    | {"\uff05": "%", "\uff0c": ",", "∅": r"\emptyset ", "θ": r"\theta ", "⟨": "(", "⟩": ")"}
)
TEXT = re.compile(r"\\(?:text|mbox|textbf|textrm|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*(?:\{|[ \t][-+$.\d\\]|[ \t][A-Z]\b)")  # not "\boxed form"
BOX_TOKENS = re.compile(
    r"\\(?:boxed|fbox)[ \t]*(?P<box>\{)"
    r"|\\(?:boxed|fbox)[ \t]+(?P<bare>[-+$.\d\\][^\s$]*|[A-Z]\b)"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
CUE = re.compile(r"(?:answer|choice|option)(?:\*\*)?\s*(?:is|:|=)", re.IGNORECASE)
ANSWER_LINE = re.compile(r"^A: *(-?\$?[\d.,]*\d)\s*\Z", re.MULTILINE)  # "A: 35", GSM8K's old form
NUMBER = re.compile(
    r"(?:(?<![\w)}\]])-)?(?:\\[dt]?frac\{\d+\}\{\d+\}"
    r"|\$?(?:\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?:/\d+)?|\.\d+))(?:\\?%)?"
)
PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\s+[-$\\\d])[A-Za-z]{2,}| \(")
OPTION = re.compile(r"\(?([A-HJ-Z])\)?(?=$|[.:,;)*]| +[a-z]{2,})")  # "I" is a pronoun
OPTION_A = re.compile(r"\(?A\)?(?=$|[.:,;)*]| +(?:since|because|as|for|due)\b)")  # "A", an article


class Extracted(str):
    """An answer that was read already. Reading it again gives it back unchanged."""


def extract_answer(completion: str, opens_think: bool = False) -> str | None:
    r"""Reads the one answer of a completion, or None if it has none.

    The first of these markers that is present decides alone: the last complete <answer> block; the
    last balanced \boxed{} or \fbox{}; the last ####; the last "answer is"; the last number (or the
    whole text, if it is nothing but an expression). An unclosed <answer> or box is a marker without
    an answer: the text was cut there. Inside a block the other markers are looked for again.
    Thoughts are never read: from <think> to the next </think> or to the end, and everything before
    a </think> that nothing opened.

    Args: as for `format`.
    """
    if isinstance(completion, Extracted):
        return completion
    first, *thoughts = _whole(completion, opens_think).split("<think>")
    spoken = [first.rpartition("</think>")[2]]
    spoken += [thought.partition("</think>")[2] for thought in thoughts]
    answer = _read("\n".join(spoken)[-READ_CHARACTERS:].translate(CHARACTERS))
    return Extracted(answer) if answer and len(answer) <= ANSWER_CHARACTERS else None


def _read(text: str, is_answer: bool = False) -> str | None:
    """The ordered rule. Of a text that `is_answer`, all of it is one if it has no marker."""
    if "<answer>" in text and not is_answer:
        start = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
        inside = text[start + len("<answer>") :].partition("</answer>")[0]
        return _read(inside, is_answer=True) if start >= 0 else None
    if BOX.search(text):
        return last_boxed(text)
    if "####" in text:
        line = text.rpartition("####")[2].strip().partition("\n")[0]
        return _read(line, is_answer=True)
    if not is_answer and (line := ANSWER_LINE.search(text)):
        return line[1]
    if CUE.search(text):
        return _after_cue(text)
    text = text.strip()
    if is_answer or ("\\" in text and "\n" not in text and not PROSE.search(TEXT.sub("", text))):
        return text  # of nothing but an expression, too: 2\sqrt{3} is not 3
    numbers = NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced \boxed{} or \fbox{}, or of "\boxed 12", or None.

    One pass with the open braces on a stack: an answer such as \frac{3}{8} has braces of its own.
    """
    start, content, braces = -1, None, []
    for token in BOX_TOKENS.finditer(text):
        if token["box"] or token["open"]:
            braces.append((token.end(), bool(token["box"])))
        elif token["bare"]:
            start, content = token.start(), token["bare"]
        elif token["close"] and braces:
            opened, is_box = braces.pop()
            if is_box and opened > start:  # of \boxed{\boxed{5}} the inner one starts last
                start, content = opened, text[opened : token.start()].strip()
    return content


def _after_cue(text: str) -> str | None:
    """What follows the last "answer is": a letter of a choice, an expression, or words."""
    *_, cue = CUE.finditer(text)
    line = text[cue.end() :].lstrip(" \t\n:*=")[:ANSWER_CHARACTERS].partition("\n")[0]
    sentence = TEXT.sub(r"\1", re.split(r"\.(?=\s|$)", line)[0]).strip(" *")
    letter = OPTION.match(sentence)
    if letter and (letter[1] != "A" or OPTION_A.match(sentence)):
        return letter[1]
    prose = PROSE.search(sentence, 1)
    expression = sentence[: prose.start()] if prose else sentence
    if not PROSE.match(sentence) and (re.search(r"[\d\\]", expression) or not prose):
        return expression.strip(" ,;:*")
    number = NUMBER.search(sentence)
    return number[0].rstrip(",") if number else sentence


# ---- Spelling: one way to write what can be written in many.

REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r",\\!\s*|\{,\}", ","),  # 11,\! 111 and 48{,}500
        (r"\\(?:left|right|displaystyle|[Bb]igg?[lr]?)(?![a-zA-Z])|(?<!\\)\\[!()\[\]]", ""),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![a-z]))|~|\s", " "),
        (r"\\?\$", ""),  # a delimiter or a currency
        (r"\\?%", " %"),
        (r"\*\*", "^"),
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\\frac\s*(\d)", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-z])", " degree"),
        (TEXT.pattern, r" \1 "),
        (r"√\s*\(?(\w+)\)?|(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"(?<![\\a-zA-Z])(pi|sin|cos|tan|cot|sec|csc|log|ln|infty)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
        (r"\\varnothing|\\\{ *\\\}", r"\\emptyset"),
        (r"\\langle(?![a-z])", "("),
        (r"\\rangle(?![a-z])", ")"),
        (r"\b(?:[Mm]inus|[Nn]egative)\s+(?=[\d.])", "-"),
        (r" +", " "),
        (r" \^", "^"),
        (r"([_^])\{(\w)\}(?!\d)", r"\1\2"),
        (r"^ ?([-+]) ", r"\1"),
        (
            r"(?<=\d) ?(?:\\times|\\cdot|\*|x) ?10\^ ?(?:\{ ?([-+]?\d{1,3}) ?\}|([-+]?\d{1,3})\b)",
            r"e\1\2",
        ),
        (r"(?<=\d)E(?=[-+]?\d)", "e"),
        (r"(?<=\d) thousand\b", "e3"),
        (r"(?<=\d) million\b", "e6"),
        (r"(?<=\d) billion\b", "e9"),
    )
]
GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!,?\d)|^[-+]?\d{1,3}(?: \d{3})+(?![\d,/])")


@functools.lru_cache(maxsize=4096)
def _normalise(text: str) -> str:
    text = text.translate(CHARACTERS).strip().strip("`*_")
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip(" ,;")
    text = text[:-1].rstrip() if text.endswith(".") else text
    if not re.search(r"[(\[]|\\\{", text):  # inside brackets a comma separates: (1,234) is a pair
        text = GROUPS.sub(lambda group: re.sub("[ ,]", "", group[0]), text)
    return text


# ---- Comparing, as far as it needs no algebra.

DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?")
POWER_OF_TEN = re.compile(r"(-?)10\^(?:\{([-+]?\d{1,3})\}|(\d{1,3}))")
LATEX_FRACTION = re.compile(r"\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}")
MIXED = re.compile(r"([-+]?)(?:(\d+) )?(-?[\d.]+)/(-?[\d.]+)")
REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\{(\d+)\}")
ARITHMETIC = re.compile(r"(?:[-+*/(){}\d. ]|\\times|\\cdot|\\div)+")
BASED = re.compile(r"(\d[\dA-F]*)_\{?(\d{1,2})\}?")
CHOICE = re.compile(r"\(?([A-Z])\)?")
CHOSEN = re.compile(r"(?:(?i:option|choice|answer):? )?\(?([A-Za-z])\)?[.:]?")
CHOSEN_WITH_TEXT = re.compile(  # of "A ..." nobody knows whether it is an article
    r"(?:(?i:option|choice|answer):? )?\(?"
    r"(?:([A-Z])(?:\)|[.:,]| -)|([B-HJ-Z])(?= (?:[a-z\d(\\]|[A-Z][A-Za-z])))"
    r"(?! ?(?:(?:and|or|&) )?\(?[A-Z]\)?(?:$|[ .,:;)]))"  # "B, C" and "B or C" choose nothing
)
ASSIGNED = re.compile(r"[A-Za-z](?:\([A-Za-z]\)|_\{?\w\}?)? ?(?:=|\\in(?![a-z])) ?")
BLANK = re.compile(r"(?<!\d) | (?!\d)")  # one that separates nothing; but 3 1/2 is not 31/2
EQUALS = re.compile(r"(?<![<>!\\])=")
WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:[abc]+|[xyz]+)(?![A-Za-z]))[A-Za-z]{3,}")  # abc is a*b*c
SHORT_WORD = re.compile(r"(?![abc]+$)(?=.?[aeiou])[a-z]{2}", re.IGNORECASE)  # no, on; but AB is BA
FORMULA = re.compile(r"(?=.*[a-z\d])(?:[A-Z][a-z]?(?:_?\{?\d+\}?)?)+")
ORDERED = [{"()"}, {"()", ""}, {"[]"}, {"(]"}, {"[)"}]  # brackets around lists that can be equal
UNORDERED = [{""}, {r"\{\}"}, {r"\{\}", ""}]
UNIT_WORD = re.compile(r"%|[A-Za-z]+\.?(?:/[A-Za-z]+)?(?:\^\{?[23]\}?)?")
GLUED_UNIT = re.compile(r"(?<=\d)(?=(?:[cmk]m|k?g|m[lL]|ft|mph)(?:\^\{?[23]\}?)?$)")
UNITS = {
    word: names.split()[0]
    for names in re.split(
        ",",
        """% percent percentage, degree degrees, mm millimeter millimeters,
        cm centimeter centimeters, m meter meters metre metres, km kilometer kilometers,
        in inch inches, ft foot feet, yd yard yards, mi mile miles, mg milligram milligrams,
        g gram grams, kg kgs kilogram kilograms, mL ml milliliter milliliters, L liter liters,
        s sec second seconds, min minute minutes, h hr hrs hour hours, day days, week weeks,
        month months, year years, dollar dollars, cent cents""",
    )
    for word in names.split()
}


def _number(text: str) -> Fraction | None:
    """The exact value of a plain number, a fraction or a mixed number."""
    text = LATEX_FRACTION.sub(r" \1/\2", text).replace("- ", "-").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    if DECIMAL.fullmatch(text):
        return Fraction(text)
    if (based := BASED.fullmatch(text)) and 2 <= int(based[2]) <= 16:
        base = int(based[2])
        return Fraction(int(based[1], base)) if int(max(based[1]), 16) < base else None
    if power := POWER_OF_TEN.fullmatch(text):
        return Fraction(f"{power[1]}1e{power[2] or power[3]}")
    if repeating := REPEATING.fullmatch(text):  # 0.1\overline{6} = (16 - 1) / 90
        before, cycle = repeating[2] + repeating[3], repeating[4]
        numerator = int(before + cycle) - int(before or 0)
        value = Fraction(numerator, 10 ** len(repeating[3]) * (10 ** len(cycle) - 1))
        return -value if repeating[1] else value
    mixed = MIXED.fullmatch(text)
    if not mixed or not all(DECIMAL.fullmatch(part) for part in mixed.group(3, 4)):
        return None
    if not Fraction(mixed[4]):
        return None
    value = Fraction(mixed[2] or 0) + Fraction(mixed[3]) / Fraction(mixed[4])
    return -value if mixed[1] == "-" else value


def _split_unit(text: str) -> tuple[str, str | None]:
    r"""Cuts the words after a value: "12\pi square cm" gives "12\pi" and, if known, "cm"."""
    words = GLUED_UNIT.sub(" ", text).split(" ")
    kept = len(words)
    while kept and UNIT_WORD.fullmatch(words[kept - 1]):
        kept -= 1
    value, names = " ".join(words[:kept]), [re.sub(r"\^.*|\.", "", word) for word in words[kept:]]
    if len(names) > 4 or any(len(name) == 1 and name not in UNITS for name in names):
        return text, None  # a sentence, or a variable: 5 x
    if not re.search(r"[\d})]$|\\pi$", value):
        return text, None
    return value, next((UNITS[name] for name in names if name in UNITS), None)


def _split_list(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a list, or "" for none, and its items; \pm makes two of one."""
    for opening, closing in ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            items = _split_commas(text[len(opening) : -len(closing)])
            if len(items) > 1:
                return opening + closing, items
    return "", _split_commas(re.sub(r",? (?:and|or) ", ",", text))


def _split_commas(text: str) -> list[str]:
    r"""The items between commas outside all brackets; none if the brackets are not balanced."""
    depth, items = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return []
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    signs = [("+", "-") if r"\pm" in item else ("",) for item in items]
    both = [
        re.sub(r"\\pm ?", s, item) for item, pair in zip(items, signs, strict=True) for s in pair
    ]
    return list(dict.fromkeys(item.strip() for item in both))


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    seen = set(verdicts)
    return False if False in seen else None if None in seen else True


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    seen = set(verdicts)
    return True if True in seen else None if None in seen else False


def _decide(answer: str, gold: str, algebra: Callable[[str, str], bool | None]) -> bool | None:
    """Whether two answers are equal; `algebra` is asked where spelling and arithmetic end."""
    answer, gold = _normalise(answer), _normalise(gold)
    if not answer or not gold:
        return False
    if choice := CHOICE.fullmatch(gold):
        if chosen := CHOSEN.fullmatch(answer):
            return chosen[1].upper() == choice[1]
        chosen = CHOSEN_WITH_TEXT.match(answer)
        return bool(chosen) and choice[1] in chosen.groups()
    if BLANK.sub("", answer) == BLANK.sub("", gold):
        return True
    if based := BASED.fullmatch(gold):
        return answer == based[1] or re.sub("[{}]", "", answer) == re.sub("[{}]", "", gold)
    if not EQUALS.search(gold) and len(_split_list(answer)[1]) == 1:
        answer = EQUALS.split(answer)[-1].strip()
    answer, gold = _drop_name(answer, gold), _drop_name(gold, answer)

    (kind, answers), (gold_kind, golds) = _split_list(answer), _split_list(gold)
    if len(answers) > 1 and len(golds) > 1:
        return _decide_lists(kind, answers, gold_kind, golds, algebra)
    (value, unit), (gold_value, gold_unit) = _split_unit(answer), _split_unit(gold)
    number, gold_number = _number(value), _number(gold_value)
    if unit and gold_unit and unit != gold_unit:
        return False
    if number is not None and gold_number is not None:
        if (unit == "%") == (gold_unit == "%"):
            return number == gold_number
        percent, plain = (number, gold_number) if unit == "%" else (gold_number, number)
        return plain in (percent, percent / 100)
    if gold_number is not None and (
        len(answers) > 1 or len(value) == 1 or ARITHMETIC.fullmatch(value)
    ):
        return False  # several answers, a letter, or work that is not done
    if number is not None and len(golds) > 1:
        return False
    if _is_text(value) or _is_text(gold_value):
        texts = [re.sub("[ _{}]", "", text) for text in (answer, gold)]
        if not all(FORMULA.fullmatch(text) for text in texts):
            texts = [text.casefold() for text in texts]
        return texts[0] == texts[1]
    if BLANK.sub("", value).casefold() == BLANK.sub("", gold_value).casefold():
        return value.replace(" ", "") == gold_value.replace(" ", "")  # 3r^2 is not 3R^2
    return algebra(value, gold_value)


def _drop_name(text: str, other: str) -> str:
    r"""The 5 of "x=5" and the interval of "x \in [1,2]", unless the other side is named too."""
    named = ASSIGNED.match(text)
    if not named or EQUALS.search(text, named.end()) or len(_split_list(text)[1]) != 1:
        return text
    return text if EQUALS.search(other) or ASSIGNED.match(other) else text[named.end() :]


def _decide_lists(kind, answers, gold_kind, golds, algebra) -> bool | None:
    kinds = {kind, gold_kind}
    if len(answers) != len(golds) or kinds not in ORDERED + UNORDERED:
        return False
    if kinds in ORDERED:
        return _all(_decide(a, g, algebra) for a, g in zip(answers, golds, strict=True))
    found = [_any(_decide(a, g, algebra) for a in answers) for g in golds]
    return _all(found + [_any(_decide(a, g, algebra) for g in golds) for a in answers])


def _is_text(value: str) -> bool:
    if FORMULA.fullmatch(value) or SHORT_WORD.fullmatch(value):
        return True
    return r"\begin" not in value and bool(WORD.search(value))


# ---- Algebra: by math-verify, in child processes of a process of its own.
#
# The trainer starts one server (this file as a script), which imports math-verify once and forks
# children that compare. The kernel ends a child that takes too long or too much, even in the middle
# of a big multiplication, and the next one costs milliseconds, not an import. The server ends when
# the pipe to the trainer closes, however the trainer ended.

TOWER = r"\d[)}\s]*\^[\s({+-]*\d+[)}\s]*\^"  # 9^{9^
HOSTILE = re.compile(
    TOWER + r"|\^[\s({+-]*\d{4}|\d{40}|\d{3,}[)}\s]*!|!.*!|\\binom\s*\{?\d{4}"
    r"|\\(?:sum|prod|int|lim)(?![a-z])"
)
NESTING = 12


def _is_tame(text: str) -> bool:
    """Whether math-verify can be asked: what surely is too big is refused before it costs time."""
    depth = deepest = 0
    for character in text[: ALGEBRA_CHARACTERS + 1]:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return len(text) <= ALGEBRA_CHARACTERS and deepest <= NESTING and not HOSTILE.search(text)


def _parse(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    latex_only = [LatexExtractionConfig()]  # its other readers take one number out of an expression
    return parse(rf"\boxed{{{text}}}", latex_only, "no_fallback", parsing_timeout=None)


def _algebra(answer: str, gold: str) -> bool:
    """Whether two expressions, sets, relations or matrices are equal, by math-verify.

    Numbers are looked at first, exactly: math-verify rounds (0.333333 equals 1/3 there, and 1/3^80
    equals 2/3^79), and takes a second to be sure that two polynomials differ.
    """
    from math_verify import verify

    answers, golds = _parse(answer), _parse(gold)
    if not answers or not golds or _differ(answers[0], golds[0]):
        return False
    return verify(golds, answers, allow_set_relation_comp=True, timeout_seconds=None)


def _differ(answer, gold) -> bool:
    """Whether two expressions surely differ: at one point in general position, to 20 digits."""
    from sympy import Expr, N, Rational, nsimplify

    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return False
    symbols = sorted(answer.free_symbols | gold.free_symbols, key=str)
    point = {symbol: Rational(7 * i + 23, 19) for i, symbol in enumerate(symbols)}
    exact = [nsimplify(side.doit().subs(point), rational=True) for side in (answer, gold)]
    gap, size = abs(N(exact[0] - exact[1], 30)), abs(N(exact[1], 30))
    return bool(gap.is_comparable and size.is_comparable and gap > size * Rational(1, 10**20))


def _judge_and_exit(
    pairs: Sequence[tuple[str, str | None]], pipe: int, spare: float, patience: float
) -> None:
    """In a forked child: writes "1" for equal, "0" for not, "x" for an error, a pair at a time.

    The kernel ends it at the first pair that takes too long, so that one has no verdict. A pair
    without a reference asks whether the answer can be parsed.
    """
    try:
        if sys.platform == "linux":  # macOS does not keep this limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_REAL, patience)
        for answer, gold in pairs:
            started = time.process_time()
            limit = ORDINARY_SECONDS + min(ANSWER_SECONDS, spare / 2)
            signal.setitimer(signal.ITIMER_PROF, limit)  # CPU time: a busy machine changes nothing
            try:
                right = _decide(answer, gold, _algebra) if gold else _parse(_normalise(answer))
                verdict = b"1" if right else b"0"
            except Exception:  # whatever sympy raises on nonsense; counted as failed by the trainer
                verdict = b"x"
            os.write(pipe, verdict)
            spare -= min(spare, max(0.0, time.process_time() - started - ORDINARY_SECONDS))
    finally:
        os._exit(0)  # never back into the server's loop


def _judge(pairs: Sequence[tuple[str, str | None]]) -> str:
    """In the server: for each pair "1" if equal, "0" if not, "x" if it failed."""
    verdicts, running = ["x"] * len(pairs), {}
    deadline = time.monotonic() + DEADLINE_SECONDS + ORDINARY_SECONDS * len(pairs)
    spare = BATCH_SECONDS  # slow pairs use it up; then the others still get the ordinary time
    processes = min(4, os.cpu_count() or 1)
    # Short answers first: poison tends to be long, and should not use up the others' time.
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index][0]))
    shares = deque(order[start::processes] for start in range(min(processes, len(order))))
    while shares or running:
        while shares:
            share, patience = shares.popleft(), max(0.01, deadline - time.monotonic())
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                _judge_and_exit([pairs[index] for index in share], writer, spare, patience)
            os.close(writer)
            running[child] = share, reader
        child, _, usage = os.wait4(-1, 0)
        share, reader = running.pop(child)
        with os.fdopen(reader) as answers:
            done = answers.read()
        for index, verdict in zip(share, done, strict=False):
            verdicts[index] = verdict
        rest = share[len(done) + 1 :]  # it died at the pair after the last verdict: go on behind it
        if rest and time.monotonic() < deadline:
            shares.append(rest)
        used = usage.ru_utime + usage.ru_stime
        spare -= min(spare, max(0.0, used - ORDINARY_SECONDS * (len(done) + 1)))
    return "".join(verdicts)


def _serve() -> None:
    """The server: one JSON line of pairs in, one line of verdicts out, until the pipe closes."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be a verdict
    logging.disable(logging.CRITICAL)
    # The parser learns its grammar as it goes; what it learns here, all children inherit.
    _decide(r"\frac{x^2+1}{2}", r"0.5x^2+\frac12", _algebra)
    _decide(r"[2,\sqrt{3}]", r"[2,3^{0.5}]", _algebra)
    gc.freeze()  # a child's collector then does not touch, and so copy, what it shares
    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(_judge(json.loads(line)) + "\n")


class _Grader:
    """The trainer's end of the pipe. Starts the server when first needed and when it has died."""

    def __init__(self) -> None:
        self.lock, self.server, self.counts = threading.Lock(), None, Counter()

    def ask(self, pairs: Sequence[tuple[str, str | None]]) -> str:
        """Verdicts as `_judge` gives them. Raises RuntimeError if the server cannot start."""
        request = (json.dumps(pairs) + "\n").encode()
        with self.lock:
            try:
                verdicts = self._exchange(request, len(pairs))
                verdicts = verdicts or self._exchange(request, len(pairs))
            except BaseException:  # Ctrl-C: the reply on its way would be taken for the next one's
                self.stop()
                raise
            verdicts = verdicts or "x" * len(pairs)
            self.counts["algebra"] += len(pairs)
            self.counts["failed"] += verdicts.count("x")
        return verdicts

    def _exchange(self, request: bytes, size: int) -> str:
        """One question to the server and its answer, or "" if it died over it, or hangs."""
        if self.server is None:
            self._start()
        try:
            self._send(request)
            verdicts = self._receive(seconds=60 + size)
        except BrokenPipeError:
            verdicts = ""
        if len(verdicts) != size:
            self.stop()
            self.counts["restarted"] += 1
            return ""
        return verdicts

    def _start(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # no buffers and no locks of their own, which a fork would copy half full
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        if self._receive(seconds=300) != "ready":
            self.stop()
            raise RuntimeError("the grader did not start: pip install math-verify")

    def _send(self, line: bytes) -> None:
        while line:
            line = line[self.server.stdin.write(line) :]

    def _receive(self, seconds: float) -> str:
        poll = select.poll()
        poll.register(self.server.stdout, select.POLLIN)
        return self.server.stdout.readline().decode().strip() if poll.poll(seconds * 1000) else ""

    def stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.leave()

    def leave(self) -> None:
        """Closes this process's ends of the pipes; the server ends when every process has."""
        if self.server is not None:
            self.server.stdin.close()
            self.server.stdout.close()
            self.server = None


_grader = _Grader()
atexit.register(_grader.stop)


def _after_fork() -> None:
    """A forked child talks to a server of its own: two on one pipe would mix up their verdicts."""
    _grader.leave()
    _grader.__init__()


os.register_at_fork(after_in_child=_after_fork)


def grader_stats() -> dict[str, int]:
    """Counts since the start, to tell a failing grader from a failing policy.

    `algebra`: comparisons by math-verify; `failed`: those of them that ran out of time or memory
    or raised, and scored 0; `refused`: scored 0 unseen, as too big; `restarted`: dead servers.
    """
    return {name: _grader.counts[name] for name in ("algebra", "failed", "refused", "restarted")}


# ---- Scores.


def accuracy(completion: str, answer: str, opens_think: bool = False) -> float:
    """1.0 if the answer read from the completion equals `answer`, else 0.0.

    Args: as for `format`; answer: the reference, as the data has it, without a marker around it.
    """
    return _grade([(extract_answer(completion, opens_think), answer)])[0]


def _grade(pairs: Sequence[tuple[str | None, str]]) -> list[float]:
    """Rewards in order. Equal pairs are compared once, and algebra is asked about in one batch."""
    verdicts: dict[tuple[str | None, str], bool | None] = {}
    for extracted, gold in dict.fromkeys(pairs):
        known = False
        if extracted is not None and len(gold) <= ANSWER_CHARACTERS:
            known = _decide(extracted, gold, lambda *_: None)
            if known is None and not all(_is_tame(_normalise(text)) for text in (extracted, gold)):
                known = False
                with _grader.lock:
                    _grader.counts["refused"] += 1
        verdicts[extracted, gold] = known
    open_pairs = [pair for pair, known in verdicts.items() if known is None]
    if open_pairs:
        replies = _grader.ask(open_pairs)
        verdicts.update(
            (pair, reply == "1") for pair, reply in zip(open_pairs, replies, strict=True)
        )
    return [float(verdicts[pair]) for pair in pairs]


def are_gradable(answers: Sequence[str]) -> list[bool]:
    """Which reference answers can be compared with: not blank, not cut, and parsed if algebra."""
    gradable = {}
    for answer in dict.fromkeys(answers):
        text = _normalise(answer) if len(answer) <= ANSWER_CHARACTERS else ""
        value = _split_unit(text)[0]
        if not re.search(r"[^\W_]", text) or text.count("{") != text.count("}"):
            gradable[answer] = False
        elif _number(value) is not None or _is_text(value) or CHOICE.fullmatch(text):
            gradable[answer] = True
        else:
            # Of what is never computed, at least the same spelling is right.
            gradable[answer] = None if _is_tame(text) else True
    unsure = [(answer, None) for answer, known in gradable.items() if known is None]
    if unsure:
        replies = _grader.ask(unsure)
        gradable |= {
            answer: reply == "1" for (answer, _), reply in zip(unsure, replies, strict=True)
        }
    return [gradable[answer] for answer in answers]


def is_gradable(answer: str) -> bool:
    """Whether a reference answer can be compared with. Many at once: `are_gradable`."""
    return are_gradable([answer])[0]


def score(
    completions: Sequence[str],
    answers: Sequence[str],
    weights: Sequence[float] | Mapping[str, float] = DEFAULT_WEIGHTS,
    opens_think: bool = False,
) -> dict[str, list[float]]:
    """The parts of the reward and their weighted `total`: a list each, one item per completion.

    Args:
        completions: what the policy wrote, without the prompts.
        answers: the reference answer for each completion.
        weights: of accuracy, format and tag count, in this order or by name; a name left out
            weighs 0. The weights matter: PODS keeps the rollouts whose totals vary most.
        opens_think: the rendered prompts already ended in <think>.

    Raises:
        ValueError: the lengths differ, or the weights are not those of the three parts.
        RuntimeError: math-verify is needed and cannot be started.
    """
    if len(completions) != len(answers):
        raise ValueError(
            f"{len(completions)} completions but {len(answers)} answers: give one each"
        )
    if not isinstance(weights, Mapping):
        if len(weights) != len(DEFAULT_WEIGHTS):
            raise ValueError(
                f"{len(weights)} weights: give one for each of {list(DEFAULT_WEIGHTS)}"
            )
        weights = dict(zip(DEFAULT_WEIGHTS, weights, strict=True))
    if unknown := weights.keys() - DEFAULT_WEIGHTS.keys():
        raise ValueError(f"no reward is called {sorted(unknown)}: weigh {list(DEFAULT_WEIGHTS)}")
    extracted = [extract_answer(completion, opens_think) for completion in completions]
    parts = {
        "accuracy": _grade(list(zip(extracted, answers, strict=True))),
        "format": [format(completion, opens_think) for completion in completions],
        "tag_count": [tag_count(completion, opens_think) for completion in completions],
    }
    totals = [
        sum(weight * parts[name][i] for name, weight in weights.items())
        for i in range(len(completions))
    ]
    return parts | {"total": totals}


if __name__ == "__main__":
    _serve()
