r"""When two answers are equal.

    equal("0.5", r"\frac{1}{2}")                        # True
    equal("(2,1)", "(1,2)")                             # False: brackets keep their order
    equal("B) sodium", "B")                             # True
    equal(r"\mathbb{R}\setminus\{1\}", r"x \ne 1")     # raises NeedsAlgebra

Both are spelled alike first (`grading.spelling`). Then the rules of this file are asked in turn,
and the first that knows decides: names, lists, numbers with their units, words, formulas
(`grading.expressions`). Whatever none of them can read is a question of algebra, which is not
answered here: `grading.judges` asks math-verify, in a process that may be killed.

What counts as equal, where a mathematician has to decide:

    numbers    exact: 0.5 is 1/2, but 0.333333 is not 1/3; 1,234 and 1\,234 and 1 234 are 1234, and
               48,50 is not a number; 1e5 is 100000; 1\frac{1}{2} is 3/2; 2 million is 2000000
    percent    45% is 45 and is 0.45, whichever side has the sign; without a sign 45 is not 0.45
    units      18 cm and 18cm are 18, not 18 m; $18/day is 18; 90^\circ is 90; nothing is converted.
               One glued letter is a variable: 5t is not 5; but 20L is 20 where a number is wanted
    bases      52_8 is matched by 52_8 and by 52, as its question names the base; not 52_9 or 42
    work       47+85 is not 132 and 6*7 is not 42, or copying a question would pay; 2^{10} is 1024;
               an answer with \sum, \prod, \int or \lim must be spelled like the reference
    equations  x=5 is 5 and 5+7=12 is 12 if the other side is no equation; x=5 is not y=5
    lists      1,2 is 2,1 and \{2,1\} and 1,2,2; (1,2) is ordered: it is 1,2, but not \{1,2\},
               [1,2], (2,1) or (1,2,2); \pm 1 is 1,-1, and (\pm 1,0) is two pairs
    intervals  (2,\infty) is x>2; x<1 or x>2 is a union; the kind of bracket matters
    words      letter by letter but for case: stop is not pots, and 7 is not seven
    formulas   NaCl is not ClNa, and H_2O is H2O
    choices    B is matched by B, (B), [B], B) text, B: text, Option B, B is right, and by a lone b;
               not by B or C. A is matched likewise, but "A strong acid" begins with an article
"""

import re
from collections.abc import Callable

from grading import expressions
from grading.lists import as_ranges, split_list
from grading.quantities import BASED, number, split_unit
from grading.spelling import normalise

ANSWER_CHARACTERS = 1_000  # a longer answer is no answer


class NeedsAlgebra(Exception):
    """None of the rules here can tell; the question is for math-verify."""


def _nobody(answer: str, gold: str) -> bool:
    raise NeedsAlgebra


Algebra = Callable[[str, str], bool]


def equal(answer: str, gold: str, algebra: Algebra = _nobody) -> bool:
    """Whether an answer is worth what the reference is.

    Args:
        answer: as it was read, in any spelling.
        gold: the reference, without a marker around it.
        algebra: asked about two normalised texts that no rule can read.
    Raises:
        NeedsAlgebra: there is such a question, and no `algebra` to ask.
    """
    if max(len(answer), len(gold)) > ANSWER_CHARACTERS:
        return False
    answer, gold = normalise(answer), normalise(gold)
    if not answer or not gold:
        return False
    if choice := CHOICE.fullmatch(gold):
        return (chosen(answer) or "").upper() == choice[1]
    if _joined(answer) == _joined(gold):
        return True
    answer, gold = _without_names(answer, gold)
    for rule in (_by_base, _by_list, _by_number, _by_words):
        verdict = rule(answer, gold, algebra)
        if verdict is not None:
            return verdict
    (answer, _), (gold, _) = split_unit(answer), split_unit(gold)
    if _joined(answer) == _joined(gold):
        return True
    same = expressions.same(answer, gold)
    if same is None and (expressions.readable(answer) or expressions.readable(gold)):
        return False  # one is a value and the other none, or work that is not done
    return algebra(answer, gold) if same is None else same


def gradable(text: str) -> bool:
    """Whether a reference can be compared with: neither blank, nor cut, nor unfinished.

    Of what no rule can read, at least the same spelling is right, and math-verify is asked.
    """
    value = normalise(text) if len(text) <= ANSWER_CHARACTERS else ""
    opened, closed = (sum(map(value.count, brackets)) for brackets in ("([{", ")]}"))
    finished = opened == closed and not UNFINISHED.search(value)
    return finished and bool(re.search(r"[^\W_]", value))


UNFINISHED = re.compile(  # 5+; \sqrt{}; \frac{1}
    r"[-+*/^_=<>,\\]$|(?<=[\^_}a-z])\{ *\}|\\frac ?(?:\{[^{}]*\}|\w)?$"
)


# ---- What is never computed.

HOSTILE = re.compile(
    r"\d[)}\s]*\^[\s({+-]*\d+[)}\s]*\^"  # 9^{9^
    r"|\^[\s({+-]*\d{4}|\d{40}|\d{3,}[)}\s]*!|!.*!|\\binom\s*\{?\d{4}"
    r"|\\(?:sum|prod|int|lim)(?![a-z])|_\{[^{}]*_|(?:\|[^|]*){7}"
    r"|\\\{[^{}]*[:|]"  # \{x : x>2\}, which math-verify does not know
)
ALGEBRA_CHARACTERS = 150
ALGEBRA_NESTING = 5


def is_tame(text: str) -> bool:
    """Whether math-verify can be asked: what surely is too big is refused before it costs time."""
    depth = deepest = 0
    for character in text[: ALGEBRA_CHARACTERS + 1]:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    small = len(text) <= ALGEBRA_CHARACTERS and deepest <= ALGEBRA_NESTING
    return small and not HOSTILE.search(text)


# ---- Choices.

CHOICE = re.compile(r"\(?([A-Z])\)?")
_LABEL = r"[\[({\"']*(?:(?i:option|choice|answer)\b:? ?)?[\[({\"']*"
LONE = re.compile(_LABEL + r"([A-Za-z])[\])}\"'.:*]*")
LABELLED = re.compile(
    _LABEL
    + r"([A-Za-z])(?:[\"']?[)\]}](?![a-z+*/^=-])|:|\.(?= )|(?<=[A-Z]) ?[-\u2014] (?=[A-Za-z]{2}))"
)  # b) weak
NAMED = re.compile(_LABEL + r"([A-Z])(?:, | (?=[a-z\d(\\]|[A-Z][A-Za-z]))")  # B, weak; B weak
ARTICLE = re.compile(  # of "A ..." and "I ..." only this says that a choice is meant
    r"[AI](?!,| \(| (?:is|was|seems|must|would|since|because|as|for|due)\b)"
)
HEDGED = re.compile(  # B or C; B, C; B/C; (B) (C); but not "B, a base" nor "B) (S)-butanol"
    r"[\[({\"']*[A-Za-z][\])}\"'.]*\s*"
    r"(?:(?:\(?or|and)\b|[/&]"
    r"|[,;+]\s*(?:or |and )?(?![Aa] [a-z])[\[(\"']*[A-Za-z](?![\w'-])(?![)\]]-)"
    r"|[\[(]?[A-Z][)\]](?!-))"
)


def chosen(text: str) -> str | None:
    """The one letter that a text chooses, alone or before the text of the choice, or None."""
    if letter := LONE.fullmatch(text):
        return letter[1]
    letter = LABELLED.match(text) or NAMED.match(text)
    if not letter or HEDGED.match(text, letter.start(1)):
        return None
    if letter.re is NAMED and ARTICLE.match(text, letter.start(1)):
        return None
    return letter[1]


# ---- Names: x=5.

NAME = (
    r"(?:[A-Za-z](?:\([A-Za-z]\)|_\{?\w+\}?)?|[A-Z]{2,3}|\\overline\{[A-Z]{2}\}"
    r"|\\angle ?[A-Z]{1,3})"
)
ASSIGNED = re.compile(NAME + r" ?(?:=|\\in(?![a-z])) ?")
EQUALS = re.compile(r"(?<![<>!\\])=")


def _without_names(answer: str, gold: str) -> tuple[str, str]:
    r"""The 5 of "x=5", of "5+7=12" the 12, and the interval of "x \in [1,2]"."""
    if not EQUALS.search(gold) and len(split_list(answer)[1]) == 1:
        answer = EQUALS.split(answer)[-1].strip()
    return _without_name(answer, gold), _without_name(gold, answer)


def _without_name(text: str, other: str) -> str:
    """The value of a named one, unless the other side is named too."""
    named = ASSIGNED.match(text)
    if not named or EQUALS.search(text, named.end()) or len(split_list(text)[1]) != 1:
        return text
    return text if EQUALS.search(other) or ASSIGNED.match(other) else text[named.end() :]


# ---- Bases.


def _by_base(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """52_8 is 52_{8} and 52. Of a reference without a base, the answer's value counts."""
    based, gold_based = BASED.fullmatch(answer), BASED.fullmatch(gold)
    if not gold_based:
        return None
    return based.groups() == gold_based.groups() if based else answer == gold_based[1]


# ---- Lists, intervals, matrices.

ORDERED = [{"()"}, {"()", ""}, {"[]"}, {"(]"}, {"[)"}]  # kinds of lists that can be equal
SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|\{)")
UNORDERED = [{""}, {r"\{\}"}, {r"\{\}", ""}, {r"\cup"}]


def _by_list(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Lists item by item. Orders and repeats count inside brackets, but for those of sets."""
    (variable, ranges), (gold_variable, gold_ranges) = as_ranges(answer), as_ranges(gold)
    if ranges and gold_ranges:
        if variable and gold_variable and variable != gold_variable:
            return False  # x>2 is not y>2
        answer, gold = ranges, gold_ranges
    (kind, answers), (gold_kind, golds) = split_list(answer), split_list(gold)
    kinds = {kind, gold_kind}
    if kinds == {""} and len(answers) == len(golds) == 1:
        return None
    if kinds in UNORDERED:
        return _equal_sets(answers, golds, algebra)
    if kinds == {r"\cup", r"\{\}"}:
        return None  # \{1,2\}\cup\{3\} may be \{1,2,3\}
    if len(answers) > 1 and len(golds) > 1:
        matrices = len(kinds) == 1 and kind.startswith("matrix")
        if (kinds not in ORDERED and not matrices) or len(answers) != len(golds):
            return False
        return all(equal(a, g, algebra) for a, g in zip(answers, golds, strict=True))
    # A list is not one thing, unless that is a set spelled in another way: \mathbb{R}, \{x : x>1\}.
    return None if SET.search(answer + " " + gold) else False


def _equal_sets(answers: list[str], golds: list[str], algebra: Algebra) -> bool:
    """Whether each item has an equal one on the other side, however often it is repeated."""
    answers, golds = list(dict.fromkeys(answers)), list(dict.fromkeys(golds))
    if len(answers) > 2 * len(golds) or not answers:
        return False
    rows = [[equal(a, g, algebra) for g in golds] for a in answers]
    return all(map(any, rows)) and all(map(any, zip(*rows, strict=True)))


# ---- Numbers and words.

CLOSED = re.compile(r"[A-Za-z]|(?:[-+*/(){}\d. ]|\\times|\\cdot|\\div)+")  # a letter; work
WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:[abc]+|[xyz]+)(?![A-Za-z]))[A-Za-z]{3,}")  # abc is a*b*c
SHORT_WORD = re.compile(r"(?![abc]+$)(?=.?[aeiou])[a-z]{2}", re.IGNORECASE)  # no, on; but AB is BA
FORMULA = re.compile(r"(?=.*[a-z\d])(?:[A-Z][a-z]?(?:_?\{?\d+\}?)?)+")  # NaCl, H_2O


def _by_number(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Exact numbers; a percentage is its number and its hundredth."""
    gold_value, gold_unit = split_unit(gold)
    gold_number = number(gold_value)
    value, unit = split_unit(answer, letters=gold_number is not None)
    if unit and gold_unit and unit != gold_unit:
        return False
    if gold_number is None:
        return None
    given = number(value)
    if given is None:
        return False if CLOSED.fullmatch(value) else None
    if (unit == "%") == (gold_unit == "%"):
        return given == gold_number
    percent, decimal = (given, gold_number) if unit == "%" else (gold_number, given)
    return decimal in (percent, percent / 100)


def _by_words(answer: str, gold: str, algebra: Algebra) -> bool | None:
    """Letter by letter: never by algebra, to which words are products of letters."""
    (value, _), (gold_value, _) = split_unit(answer), split_unit(gold)
    if not _is_words(value) and not _is_words(gold_value):
        return None
    if FORMULA.fullmatch(_joined(answer)) and FORMULA.fullmatch(_joined(gold)):
        return re.sub("[_{}]", "", _joined(answer)) == re.sub("[_{}]", "", _joined(gold))
    return answer.replace(" ", "").casefold() == gold.replace(" ", "").casefold()


def _is_words(value: str) -> bool:
    if FORMULA.fullmatch(value) or SHORT_WORD.fullmatch(value):
        return True
    return r"\begin" not in value and bool(WORD.search(ACCENTED.sub("", value)))


ACCENTED = re.compile(r"\\(?:overline|vec|hat|angle) ?\{?[A-Z]{1,4}\}?")  # \overline{ABC}
BLANK = re.compile(r"(?<!\d) | (?!\d)")  # one that separates nothing; but 3 1/2 is not 31/2


def _joined(text: str) -> str:
    return BLANK.sub("", text)
