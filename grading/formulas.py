r"""Formulas read and compared by their values: no algebra, no library that evaluates text.

    same("x^2+2x+1", "(x+1)^2")          # True
    same(r"1-\frac{1}{e}", "1-e^{-1}")   # True
    same("3t", "3")                      # False

Two formulas are equal if they have equal values wherever both are defined. Values at three random
points, to 100 digits, settle that: short formulas that agree there in 50 digits, and still differ,
do not occur (Schwartz 1980 and Zippel 1979, for polynomials). The work is linear in the text: each
token is read once for each point, and operands are bounded before each operation. So 9^{9^{9^9}} is
not computed, and (x+y)^{900} never expanded.

Two points are positive. The third is negative and counts only where both values are real: so
\sqrt{x^2} is not x, and \ln(x^2) is 2\ln(x). Equations are equal if one is a multiple of the other,
inequalities if by a positive factor; so y=2x+3 is 2x-y+3=0, but xy=1 is not y=1/x.

Notation: e is Euler's number and i the imaginary unit; 2\frac{1}{3} is 7/3; 1/2x is x/2; a function
takes the product that follows, \sin 2x+1 is \sin(2x)+1; x^10 is x^{10}. Sums and sets are left out.
"""

import functools
import math
import random
import re
import threading
from collections.abc import Callable

import mpmath

DIGITS = 100  # that are computed
MP = mpmath.mp.clone()  # a context of its own: the precision is ours alone
MP.dps = DIGITS
LOCK = threading.Lock()  # mpmath changes its precision while it computes
TOLERANCE = MP.mpf(10) ** -50  # in which values may differ, relative to the larger one
NEGLIGIBLE = MP.mpf(10) ** -80  # what is smaller is 0 up to rounding
LARGEST_LOG = 100_000  # a power whose logarithm is larger, or a function of more, is not computed
LARGEST_FACTORIAL = 1_000
NESTING = 40
POINTS = 3

ACCENTED = (
    r"\\(?:over[a-z]+|bar|vec|(?:wide)?(?:hat|tilde)|d?dot|mathbb|mathcal) ?(?:\{[^{}]*\}|[a-zA-Z])"
)
TOKEN = re.compile(
    rf"\d+(?:\.\d+)?|\.\d+|{ACCENTED}|\\[a-zA-Z]+|[a-zA-Z]'*|_(?:\{{[^{{}}]*\}}|\w)|\S"
)
RELATION = re.compile(r"(?<!\\)=|[<>]|\\(?:le|ge|ne)(?![a-z])")
MIXED = re.compile(r"(?<![\d.^_])(\d+) ?(\\frac\{\d+\}\{\d+\})")  # 2\frac{1}{3} is 7/3
TURNED = {">": "<", r"\ge": r"\le"}
SYMBOL = re.compile(
    rf"[a-zA-Z]'*|{ACCENTED}|\\(?:(?:var)?(?:epsilon|theta|phi)|alpha|beta|[gG]amma|[dD]elta|zeta"
    r"|eta|iota|kappa|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau|chi|[pP]si|[oO]mega|Theta|[pP]i|Phi"
    r"|ell|hbar|infty|emptyset)"
)
CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = {r"\exp": "exp", r"\ln": "log", r"\log": "log10"}
FUNCTIONS |= {rf"\{name}": name for name in (*CIRCULAR, "sinh", "cosh", "tanh")}
FUNCTIONS |= {rf"\arc{name}": "a" + name for name in CIRCULAR}
OF_INTEGERS = {r"\gcd": math.gcd, r"\lcm": math.lcm}
OF_SEVERAL = {**OF_INTEGERS, r"\max": max, r"\min": min}
CONSTANTS = {"e": +MP.e, "i": MP.mpc(0, 1), r"\pi": +MP.pi}
TIMES = {r"\cdot", r"\times", "*"}
OVER = {"/", r"\div"}
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
NO_FACTOR = {*CLOSING.values(), "+", "-", "!", "^", "_", ",", ";", ":", "&", "'", ""}
NO_FACTOR_OF_FUNCTION = NO_FACTOR | TIMES | OVER | FUNCTIONS.keys()


class Unreadable(Exception):
    """The text is no formula that is read here, or its value is too large to compute."""


def same(answer: str, gold: str) -> bool:
    """Whether two formulas, equations or inequalities are equal; what is not read here is not.

    Args: both as `grading.spelling.normalise` leaves them.
    """
    read, gold_read = values(answer), values(gold)
    if read is None or gold_read is None:
        return False
    (sign, at_points), (gold_sign, gold_at_points) = read, gold_read
    *pairs, negative = zip(at_points, gold_at_points, strict=True)
    if None not in negative and not any(value.imag for value in negative):
        pairs.append(negative)
    pairs = [pair for pair in pairs if None not in pair]
    if sign != gold_sign or not pairs:
        return False
    return _multiples(pairs, sign) if sign else all(close(a, b) for a, b in pairs)


@functools.lru_cache(maxsize=4096)
def values(text: str) -> tuple[str, list] | None:
    r"""What a formula says: the sign of a relation, or "", and its value at each point.

    Of a relation the value is left minus right, turned so that the sign is one of = < \le \ne.
    A value is None where there is none; if there is none at any point, None is returned.
    """
    signs, sides = RELATION.findall(text), RELATION.split(MIXED.sub(r"(\1+\2)", text))
    if len(signs) > 1:
        return None
    sign = signs[0] if signs else ""
    if sign in TURNED:
        sign, sides = TURNED[sign], sides[::-1]
    with LOCK:
        try:
            at_points = [_difference(sides, index) for index in range(POINTS)]
        except Unreadable:
            return None
    return None if at_points == [None] * POINTS else (sign, at_points)


def _difference(sides: list[str], index: int):
    try:
        left, *right = (_Reader(side, index).value() for side in sides)
        value = left - right[0] if right else left
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return value if MP.isfinite(value) else None


def close(a, b) -> bool:
    """Whether two values are equal up to rounding."""
    size = max(abs(a), abs(b))
    return abs(a - b) <= size * TOLERANCE or size < NEGLIGIBLE


def _multiples(pairs: list, sign: str) -> bool:
    """Whether one is a multiple of the other, by a positive factor if they are inequalities."""
    empty = [all(close(pair[i], 0) for pair in pairs) for i in (0, 1)]
    if any(empty) or any(close(b, 0) for _, b in pairs):  # 0=0 says nothing
        return all(empty)
    ratios = [a / b for a, b in pairs]
    positive = ratios[0].real > 0 and close(ratios[0].imag, 0)
    return all(close(ratio, ratios[0]) for ratio in ratios) and (sign in ("=", r"\ne") or positive)


def bounded(value, largest: int):
    """The value itself; Unreadable if it is larger: work stays bounded because numbers do."""
    if abs(value) > largest:
        raise Unreadable
    return value


def raised(base, exponent):
    """base ** exponent, asked for its size first: 9^{9^{9^9}} is Unreadable, not computed."""
    if base and exponent:
        bounded(MP.log(base) * exponent, LARGEST_LOG)
    return base**exponent


class _Reader:
    """Recursive descent over the tokens of one formula; every method returns a value."""

    def __init__(self, text: str, index: int) -> None:
        self.tokens, self.at, self.index = TOKEN.findall(text), 0, index
        self.open: list[str] = []  # what closes the brackets that are open
        self.depth = 0

    def value(self):
        value = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def take(self, token: str) -> bool:
        """Whether this token is next; it is then read."""
        found = self.peek() == token
        self.at += found
        return found

    def sum(self):
        value = self.signed(self.product)
        while self.peek() in ("+", "-"):
            value = value + self.signed(self.product)
        return value

    def signed(self, read: Callable):
        """What comes after some signs, with the sign that they make together."""
        minus = 0
        while self.peek() in ("+", "-"):
            minus += self.next() == "-"
        return -read() if minus % 2 else read()

    def product(self, of_function: bool = False):
        r"""Factors with or without a sign between them; of \sin 2x\cos y, 2x is the sine's."""
        value, ends = self.power(), NO_FACTOR_OF_FUNCTION if of_function else NO_FACTOR
        while (token := self.peek()) not in ends and token not in self.open:
            if token in TIMES | OVER:
                self.next()
                factor = self.signed(self.power)
                value = value / factor if token in OVER else value * factor
            elif token[0].isdigit() and self.tokens[self.at - 1][-1].isdigit():
                raise Unreadable  # two numbers side by side
            else:
                value = value * self.power()
        return value

    def power(self):
        base = self.atom()
        while self.peek() in ("!", "^"):
            if self.next() == "!":
                base = MP.factorial(bounded(base, LARGEST_FACTORIAL))
            elif self.take(r"\circ"):
                base = base * MP.pi / 180
            else:
                base = raised(base, self.signed(self.atom))
        return base

    def group(self, opening: str) -> list:
        """The values between brackets, of which the first is read, and commas."""
        self.open.append(CLOSING[opening])
        inside = [self.sum()]
        while self.take(","):
            inside.append(self.sum())
        if self.next() != self.open.pop():
            raise Unreadable
        return inside

    def argument(self):
        r"""What LaTeX gives to \frac: a group, or one digit, letter or command."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self):
        self.depth += 1
        if self.depth > NESTING:
            raise Unreadable
        value = self.unnested()
        self.depth -= 1
        return value

    def unnested(self):
        token = self.next()
        if token.lstrip(".")[:1].isdigit():
            return MP.mpf(token)
        if token in CLOSING:
            (value,) = self.group(token)
            parts = {"|": abs, r"\lfloor": MP.floor, r"\lceil": MP.ceil}
            return parts[token](value) if token in parts else value
        if token in (r"\frac", r"\binom"):
            upper, lower = self.argument(), self.argument()
            if token == r"\frac":
                return upper / lower
            return MP.binomial(*(bounded(n, LARGEST_FACTORIAL) for n in (upper, lower)))
        if token in OF_SEVERAL and self.peek() in ("(", "["):
            return self.of_several(token)
        if token == r"\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(token)
        return self.symbol(token)

    def root(self):
        (degree,) = self.group("[") if self.take("[") else (MP.mpf(2),)
        value = self.argument()
        if degree == 3 and not value.imag and value < 0:
            return -raised(-value, 1 / degree)  # the real one
        return raised(value, 1 / degree)

    def of_several(self, token: str):
        numbers = self.group(self.next())
        if any(number.imag or abs(number) > 10**DIGITS for number in numbers):
            raise Unreadable
        if token not in OF_INTEGERS:
            return OF_SEVERAL[token](numbers)
        integers = [int(number) for number in numbers]
        if integers != numbers:
            raise Unreadable
        return MP.mpf(OF_INTEGERS[token](*integers))

    def function(self, token: str):
        name, power, base = FUNCTIONS[token], None, None
        if token == r"\log" and self.peek()[:1] == "_":
            base = _Reader(self.next().strip("_{}"), self.index).value()
        if self.take("^"):
            power = self.signed(self.atom)
            if power == -1 and name in CIRCULAR:
                name, power = "a" + name, None
        bracketed = self.peek() in ("(", "{", "[")
        value = self.signed(self.power if bracketed else lambda: self.product(of_function=True))
        if not name.startswith("log"):
            bounded(value, LARGEST_LOG)
        result = getattr(MP, name)(value) if base is None else MP.log(value, base)
        return result if power is None else raised(result, power)

    def symbol(self, token: str):
        """A variable with its subscript, or a constant."""
        if not SYMBOL.fullmatch(token):
            raise Unreadable
        subscript = self.next() if re.match("_.", self.peek()) else ""
        name = re.sub("[{} ]", "", token + subscript)
        if name in CONSTANTS:
            return CONSTANTS[name]
        # The same in every formula, and nothing special.
        size = MP.mpf(random.Random(f"{name} {self.index}").random()) * 3 + MP.mpf(1) / 3
        return -size if self.index == POINTS - 1 else size
