r"""When two answers are equal.

    equal("0.5", r"\frac{1}{2}")             # True
    equal("(2,1)", "(1,2)")                  # False: brackets keep their order
    equal("B) sodium", "B")                  # True
    equal(r"a \equiv 3", r"3 \equiv a")      # False: no rule reads these; they are spelled apart

Both are spelled alike first (`grading.spelling`). Then the rules are asked in turn, and the first
that knows decides: names, lists, numbers with their units, words, formulas. The work is bounded:
texts are short, each rule reads them once, and sets compare only so many pairs of items.

What counts as equal where a mathematician has to decide (sets and units, percent and bases) is a
table in docs/questions.md.
"""

import re
from fractions import Fraction

from grading.lists import as_intervals, is_name, split, split_list
from grading.quantities import BASED, number, split_unit
from grading.spelling import normalise

ANSWER_CHARACTERS = 1_000  # a longer answer is no answer
PAIRS = (1_000, 16, 0)  # of items that are compared in sets, in sets inside lists, and below


def equal(answer: str, gold: str, depth: int = 0) -> bool:
    """Whether an answer is worth what the reference is; `depth` counts the lists around them."""
    if max(len(answer), len(gold)) > ANSWER_CHARACTERS or depth >= len(PAIRS):
        return False
    answer, gold = normalise(answer), normalise(gold)
    if not answer or not gold:
        return False
    if choice := CHOICE.fullmatch(gold):
        return (chosen(answer) or "").upper() == choice[1]
    if _joined(answer) == _joined(gold):
        return True
    answer, gold = _without_names(answer, gold)
    if (verdict := _by_list(answer, gold, depth)) is not None:
        return verdict
    if based := BASED.fullmatch(gold):  # 52_8 is 52_{8}, and 52 where the question names the base
        given = BASED.fullmatch(answer)
        return given.groups() == based.groups() if given else answer == based[1]
    gold_value, gold_unit = split_unit(gold)
    gold_number = number(gold_value)
    value, unit = split_unit(answer, letters=gold_number is not None)
    if unit and gold_unit and unit != gold_unit:
        return False
    if gold_number is not None:
        if (given := number(value)) is not None:
            percent = (unit == "%") - (gold_unit == "%")  # on which side alone the sign is
            return given == gold_number or given == gold_number * Fraction(100) ** percent
        if CLOSED.fullmatch(value):
            return False
    if _is_words(value) or _is_words(gold_value):
        return _same_words(answer, gold)
    if _joined(value) == _joined(gold_value):
        return True
    from grading import formulas  # loads mpmath, which few answers need

    return formulas.same(value, gold_value)


def gradable(text: str) -> bool:
    """Whether a reference can be compared with: neither blank, nor cut, nor unfinished."""
    value = normalise(text) if len(text) <= ANSWER_CHARACTERS else ""
    opened, closed = (sum(map(value.count, brackets)) for brackets in ("([{", ")]}"))
    finished = opened == closed and not UNFINISHED.search(value)
    return finished and bool(re.search(r"[^\W_]", value))


UNFINISHED = re.compile(  # 5+; \sqrt{}; \frac{1}
    r"[-+*/^_=<>,\\]$|(?<=[\^_}a-z])\{ *\}|\\frac ?(?:\{[^{}]*\}|\w)?$"
)

CHOICE = re.compile(r"\(?([A-Z])\)?")
_LABEL = r"[\[({\"']*(?:(?i:option|choice|answer)\b:? ?)?[\[({\"']*"
LONE = re.compile(_LABEL + r"([A-Za-z])[\])}\"'.:*]*")
LABELLED = re.compile(
    _LABEL
    + r"([A-Za-z])(?:[\"']?[)\]}](?![a-z+*/^=-])|:|\.(?= )|(?<=[A-Z]) ?[-\u2014] (?=[A-Za-z]{2}))"
)  # b) weak
# "A ..." and "I ..." begin a sentence, unless one of these follows.
_ARTICLE = r"[AI](?!,| \(| (?:is|was|seems|must|would|since|because|as|for|due|and)\b)"
NAMED = re.compile(  # B, weak; B weak
    rf"{_LABEL}(?!{_ARTICLE})([A-Z])(?:, | (?=[a-z\d(\\]|[A-Z][A-Za-z]))"
)
OTHER = r"[\[({\"']*(?!I [a-z])(?:[A-Z]\b(?!['-])|[a-z][)\]])"  # "B and I think": I am no choice
HEDGED = re.compile(  # B or C; B, C; B/C; (B) (C); but not "B, a base" nor "B) (S)-butanol"
    r"[\[({\"']*[A-Za-z][\])}\"'.]*\s*"
    rf"(?:\(?(?:or|and)\b(?=.*?(?<![\w-]){OTHER})|[/&]"
    r"|[,;+]\s*(?:or |and )?(?![AaI] [a-z])[\[(\"']*[A-Za-z](?![\w'-])(?![)\]]-)"
    r"|[\[(]?[A-Z][)\]](?!-))"
)


def chosen(text: str) -> str | None:
    """The one letter that a text chooses, alone or before the text of the choice, or None."""
    if letter := LONE.fullmatch(text):
        return letter[1]
    letter = LABELLED.match(text) or NAMED.match(text)
    return letter[1] if letter and not HEDGED.match(text, letter.start(1)) else None


IS_IN = re.compile(r"\\in(?![a-z])")


def _without_names(answer: str, gold: str) -> tuple[str, str]:
    r"""The 5 of "x=5", of "5+7=12" the 12, and the interval of "x \in [1,2]".

    A name is taken off if the other side has none or the same; x=5 against y=5 stays as it is.
    """
    (*names, value), (*gold_names, gold_value) = _sides(answer), _sides(gold)
    if not gold_names or names == gold_names or (not names and is_name(gold_names[0])):
        return value, gold_value
    return answer, gold


def _sides(text: str) -> list[str]:
    r"""x and 5 of "x=5", "x=2+3=5", "x\approx 5", "x=5\approx 5.0"; 5 alone of "2+3=4+1=5"."""
    exact, *rounded = re.split(r" ?\\approx ?", text)
    name, *values = split(IS_IN.sub("=", exact), "=") or [exact]
    if rounded and not values and is_name(name):
        values = rounded
    if len(split_list(text)[1]) != 1:
        return [text]
    named = len(values) == 1 or is_name(name)
    return [name, *values[-1:]] if named else values[-1:] or [exact]


ORDERED = [{"()"}, {"()", ""}, {"[]"}, {"(]"}, {"[)"}]  # kinds of lists that can be equal
UNORDERED = [{""}, {r"\{\}"}, {r"\{\}", ""}]


def _by_list(answer: str, gold: str, depth: int) -> bool | None:
    """Lists item by item. Order and repeats count inside brackets, except those of sets."""
    variable, intervals = as_intervals(answer)
    gold_variable, gold_intervals = as_intervals(gold)
    if intervals and gold_intervals and (not variable or gold_variable in (variable, "")):
        answer, gold = intervals, gold_intervals  # but x>2 is not y>2
    (kind, answers), (gold_kind, golds) = split_list(answer), split_list(gold)
    kinds = {kind, gold_kind}
    if kinds == {""} and len(answers) == len(golds) == 1:
        return None
    if kinds in UNORDERED and golds:
        return _same_items(answers, golds, depth)
    matrices = kind == gold_kind and kind.startswith("matrix")
    if not (kinds in ORDERED or matrices) or not 1 < len(answers) == len(golds):
        return False  # a list is not one thing
    return all(equal(a, g, depth + 1) for a, g in zip(answers, golds))


def _same_items(answers: list[str], golds: list[str], depth: int) -> bool:
    """Whether each item has an equal one on the other side, however often it is repeated."""
    answers, golds = list(dict.fromkeys(answers)), list(dict.fromkeys(golds))
    rest, gold_rest = set(answers) - set(golds), set(golds) - set(answers)
    if len(rest) * len(golds) + len(gold_rest) * len(answers) > PAIRS[depth]:
        return False
    return all(any(equal(a, g, depth + 1) for g in golds) for a in rest) and all(
        any(equal(a, g, depth + 1) for a in answers) for g in gold_rest
    )


CLOSED = re.compile(r"[A-Za-z]|(?:[-+*/(){}\d. ]|\\times|\\cdot|\\div)+")  # a letter; work
LETTER = r"[^\W\d_]"
WORD = re.compile(rf"(?<!\\)(?<!{LETTER})(?!(?:[abc]+|[xyz]+)(?!{LETTER})){LETTER}{{3,}}")
SHORT_WORD = re.compile(r"(?![abc]+$)(?=.?[aeiou])[a-z]{2}", re.IGNORECASE)  # no, on; but AB is BA
ACCENTED = re.compile(r"\\(?:overline|vec|hat|angle) ?\{?[A-Z]{1,4}\}?")  # \overline{ABC}
BLANK = re.compile(r"(?<!\d) | (?!\d)")  # one that separates nothing; but 3 1/2 is not 31/2
MOLECULE = re.compile(r"(?=.*[a-z\d])(?:[A-Z][a-z]?(?:_?\{?\d+\}?)?)+")  # NaCl, H_2O


def _same_words(answer: str, gold: str) -> bool:
    """Letter by letter, never by values: to those, words are products of letters."""
    answer, gold = answer.replace(" ", ""), gold.replace(" ", "")
    if MOLECULE.fullmatch(answer) and MOLECULE.fullmatch(gold):
        return re.sub("[_{}]", "", answer) == re.sub("[_{}]", "", gold)
    return answer.casefold() == gold.casefold()


def _is_words(value: str) -> bool:
    if MOLECULE.fullmatch(value) or SHORT_WORD.fullmatch(value):
        return True
    return r"\begin" not in value and bool(WORD.search(ACCENTED.sub("", value)))


def _joined(text: str) -> str:
    return BLANK.sub("", text)
