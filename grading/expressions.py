r"""Formulas read and compared by their values: no algebra, no library that evaluates text.

    same("x^2+2x+1", "(x+1)^2")          # True
    same(r"1-\frac{1}{e}", "1-e^{-1}")   # True
    same("3t", "3")                      # False
    same(r"\sum_n a_n", "5")             # None: not a formula that is read here

Two formulas are equal if they have equal values wherever both are defined. Values at three points
in general position, to 100 digits, settle that: formulas as short as answers are that agree in 50
digits at random points, and still differ, do not occur (Schwartz 1980 and Zippel 1979, for
polynomials). The cost is linear in the text whatever it says, which no simplifying algebra can
promise: 9^{9^{9^9}} is not computed, and (x+y)^{900} never expanded.

Two points are positive. The third is negative and counts only where both values are real: so
\sqrt{x^2} is not x, and \ln(x^2) is 2\ln(x). Equations are equal if one is a multiple of the other,
inequalities if by a positive factor; so y=2x+3 is 2x-y+3=0, but xy=1 is not y=1/x.

Notation: e is Euler's number and i the imaginary unit; 2\frac{1}{3} is 7/3; 1/2x is x/2; a function
takes the product that follows, \sin 2x+1 is \sin(2x)+1; x^10 is x^{10}. Sums and sets are left out.
"""

import functools
import hashlib
import re
import threading
from collections.abc import Callable
from fractions import Fraction

DIGITS = 100  # that are computed
TOLERANCE = 50  # digits that must agree, relative to the larger value
NEGLIGIBLE = 80  # digits behind the point: what is smaller is 0 up to rounding
LARGEST_LOG = 100_000  # a power whose logarithm is larger is not computed
LARGEST_FACTORIAL = 1_000
NESTING = 40
POINTS = 3

TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|[a-zA-Z]|\S")
RELATION = re.compile(r"(?<!\\)=|[<>]|\\(?:le|ge)(?![a-z])")
SYMBOL = re.compile(
    r"[a-zA-Z]|\\(?:(?:var)?epsilon|(?:var)?theta|(?:var)?phi|alpha|beta|[gG]amma|[dD]elta|zeta|eta"
    r"|iota|kappa|[lL]ambda|mu|nu|[xX]i|rho|[sS]igma|tau|chi|[pP]si|[oO]mega|Theta|Pi|Phi|ell|hbar"
    r"|infty|emptyset)"
)
ACCENTS = {r"\overline", r"\bar", r"\vec", r"\hat", r"\tilde", r"\mathbb", r"\mathcal"}
CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = {r"\exp": "exp", r"\ln": "log", r"\log": "log10"}
FUNCTIONS |= {rf"\{name}": name for name in (*CIRCULAR, "sinh", "cosh", "tanh")}
FUNCTIONS |= {rf"\arc{name}": "a" + name for name in CIRCULAR}
TIMES = {r"\cdot", r"\times", "*"}
OVER = {"/", r"\div"}
CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
NO_FACTOR = {*CLOSING.values(), *TIMES, *OVER, "+", "-", "!", "^", "_", ",", ";", ":", "&", "'"}


class Unreadable(Exception):
    """The text is no formula that is read here."""


class TooLarge(Unreadable):
    """The text is a formula with a value too large to compute."""


def same(answer: str, gold: str) -> bool | None:
    """Whether two formulas, equations or inequalities are equal; None if one is not read here.

    Args: both as `grading.spelling.normalise` leaves them.
    """
    try:
        (left, sign), (right, gold_sign) = _sides(answer), _sides(gold)
        pairs = list(_at_points(left, right))
    except TooLarge:  # for one of them: what is too large is not equal to what is not
        return False if readable(answer) or readable(gold) else None
    except Unreadable:
        return None
    if not pairs:
        return None
    if sign != gold_sign:
        return False
    return _multiples(pairs, sign) if sign else all(_close(a, b) for a, b in pairs)


def readable(text: str) -> bool:
    """Whether the text is a formula, equation or inequality that has a value at some point."""
    try:
        sides, _ = _sides(text)
        return any(_value(sides, index) is not None for index in range(POINTS))
    except Unreadable:
        return False


def _sides(text: str) -> tuple[tuple[str, ...], str]:
    """Both sides of a relation and its sign, turned so that it is =, < or \\le; or one side, ""."""
    signs = RELATION.findall(text)
    if len(signs) > 1:
        raise Unreadable(text)
    sides = tuple(RELATION.split(text))
    if not signs or signs[0] in ("=", "<", r"\le"):
        return sides, signs[0] if signs else ""
    return sides[::-1], {">": "<", r"\ge": r"\le"}[signs[0]]


@functools.cache
def _mpmath():
    """A context of its own: the precision is ours alone. Imported when first needed."""
    import mpmath

    context = mpmath.mp.clone()
    context.dps = DIGITS
    return context


_lock = threading.Lock()  # mpmath changes its precision while it computes


@functools.lru_cache(maxsize=4096)
def _value(sides: tuple[str, ...], index: int):
    """The value of a formula, or of left minus right, at a point; None where it has none."""
    with _lock:
        try:
            values = [_Reader(side, index).value() for side in sides]
            value = values[0] - values[1] if len(values) == 2 else values[0]
        except (ZeroDivisionError, OverflowError, ValueError):
            return None
        return value if _mpmath().isfinite(value) else None


def _at_points(left: tuple[str, ...], right: tuple[str, ...]):
    """The pairs of values at the points that count."""
    for index in range(POINTS):
        pair = _value(left, index), _value(right, index)
        if None not in pair and (index < POINTS - 1 or not any(_mpmath().im(v) for v in pair)):
            yield pair


def _close(a, b) -> bool:
    gap, size, ten = abs(a - b), max(abs(a), abs(b)), _mpmath().mpf(10)
    return gap <= size * ten**-TOLERANCE or size < ten**-NEGLIGIBLE


def _multiples(pairs: list, sign: str) -> bool:
    """Whether one is a multiple of the other, by a positive factor if they are inequalities."""
    empty = [all(_close(pair[i], 0) for pair in pairs) for i in (0, 1)]
    if any(empty) or any(_close(b, 0) for _, b in pairs):  # 0=0 says nothing
        return all(empty)
    ratios, context = [a / b for a, b in pairs], _mpmath()
    positive = context.re(ratios[0]) > 0 and _close(context.im(ratios[0]), 0)
    return all(_close(ratio, ratios[0]) for ratio in ratios) and (sign == "=" or positive)


def _coordinate(name: str, index: int):
    """The value of a variable at a point: the same in every formula, and nothing special."""
    digest = int.from_bytes(hashlib.sha256(f"{name} {index}".encode()).digest()[:8], "big")
    size = _mpmath().mpf(digest) / 2**64 * 3 + _mpmath().mpf(1) / 3
    return -size if index == POINTS - 1 else size


class _Reader:
    """Recursive descent over the tokens of one formula; every method returns a value."""

    def __init__(self, text: str, index: int) -> None:
        self.tokens, self.at, self.index = TOKEN.findall(text), 0, index
        self.open: list[str] = []  # what closes the brackets that are open
        self.depth = 0

    def value(self):
        value = self.sum()
        if self.at < len(self.tokens):
            raise Unreadable(self.peek())
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self):
        value = self.signed(self.product)
        while self.peek() in ("+", "-"):
            value = value + self.signed(self.product)
        return value

    def signed(self, read: Callable):
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.next() == "-"
        return -read() if negative else read()

    def product(self, of_function: bool = False):
        """Factors with or without a sign between them; of \\sin 2x\\cos y, 2x is the sine's."""
        value = self.power()
        while True:
            token = self.peek()
            if token in TIMES | OVER and not of_function:
                self.next()
                factor = self.signed(self.power)
                value = value / factor if token in OVER else value * factor
            elif self.starts_factor(token) and not (of_function and token in FUNCTIONS):
                if token[0].isdigit() and self.tokens[self.at - 1][-1].isdigit():
                    raise Unreadable("two numbers side by side")
                mixed = token == r"\frac" and self.tokens[self.at - 1].isdigit()
                start, factor = self.at, self.power()
                digits = self.tokens[start + 1 : self.at]
                mixed = mixed and all(digit.isdigit() or digit in "{}" for digit in digits)
                value = value + factor if mixed else value * factor  # 2\frac{1}{3} is 7/3
            else:
                return value

    def starts_factor(self, token: str) -> bool:
        return token not in NO_FACTOR and token != "" and token not in self.open

    def power(self):
        base = self.atom()
        while True:
            token = self.peek()
            if token == "!":
                self.next()
                base = self.factorial(base)
            elif token == "^":
                self.next()
                if self.peek() == r"\circ":
                    self.next()
                    base = base * _mpmath().pi / 180
                else:
                    base = self.raised(base, self.signed(self.atom))
            else:
                return base

    def factorial(self, value):
        if abs(value) > LARGEST_FACTORIAL:
            raise TooLarge("a factorial")
        return _mpmath().factorial(value)

    def raised(self, base, exponent):
        if base and exponent:
            size = abs(_mpmath().log(base)) * abs(exponent)
            if size > LARGEST_LOG:
                raise TooLarge("a power")
        return base**exponent

    def group(self, opening: str):
        self.open.append(CLOSING[opening])
        value = self.sum()
        if self.next() != self.open.pop():
            raise Unreadable("brackets")
        return value

    def argument(self):
        r"""What LaTeX gives to \frac: a group, or one digit, letter or command."""
        token = self.peek()
        if token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self):
        self.depth += 1
        if self.depth > NESTING:
            raise Unreadable("too deep")
        value = self.unnested()
        self.depth -= 1
        return value

    def unnested(self):
        context, token = _mpmath(), self.next()
        if not token:
            raise Unreadable("the end")
        if token.lstrip(".")[:1].isdigit():
            exact = Fraction(token)
            return context.mpf(exact.numerator) / exact.denominator
        if token in CLOSING:
            value = self.group(token)
            if token == "|":
                return abs(value)
            if token in (r"\lfloor", r"\lceil"):
                return context.floor(value) if token == r"\lfloor" else context.ceil(value)
            return value
        if token == r"\frac":
            numerator = self.argument()
            return numerator / self.argument()
        if token == r"\binom":
            return self.binomial(self.argument(), self.argument())
        if token == r"\sqrt":
            return self.root()
        if token in FUNCTIONS:
            return self.function(token)
        if token == r"\pi":
            return +context.pi
        return self.symbol(token)

    def binomial(self, n, k):
        if max(abs(n), abs(k)) > LARGEST_FACTORIAL:
            raise TooLarge("a binomial coefficient")
        return _mpmath().binomial(n, k)

    def root(self):
        degree = _mpmath().mpf(2)
        if self.peek() == "[":
            self.next()
            degree = self.group("[")
        value = self.argument()
        if degree == 3 and not _mpmath().im(value) and value < 0:
            return -self.raised(-value, 1 / degree)  # the real one
        return self.raised(value, 1 / degree)

    def function(self, token: str):
        context, name, power, base = _mpmath(), FUNCTIONS[token], None, None
        if token == r"\log" and self.peek() == "_":
            self.next()
            base = self.argument()
        if self.peek() == "^":
            self.next()
            power = self.signed(self.atom)
            if power == -1 and name in CIRCULAR:
                name, power = "a" + name, None
        bracketed = self.peek() in ("(", "{", "[")
        value = self.signed(self.power if bracketed else lambda: self.product(of_function=True))
        if name in ("exp", "sinh", "cosh", "tanh") and abs(value) > LARGEST_LOG:
            raise TooLarge(token)
        result = getattr(context, name)(value)
        if base is not None:
            result = context.log(value) / context.log(base)
        return result if power is None else self.raised(result, power)

    def symbol(self, token: str):
        """A variable with its subscript and primes, or a constant."""
        name = token
        if token in ACCENTS:
            name += self.raw_argument()
        elif not SYMBOL.fullmatch(token):
            raise Unreadable(token)
        if self.peek() == "_":
            self.next()
            name += "_" + self.raw_argument().strip("{}")
        while self.peek() == "'":
            name += self.next()
        if name == "e":
            return +_mpmath().e
        return _mpmath().mpc(0, 1) if name == "i" else _coordinate(name, self.index)

    def raw_argument(self) -> str:
        """The text of a group without other groups in it, or one token."""
        start = self.at
        if self.next() == "{":
            while self.peek() not in ("{", "}", ""):
                self.next()
            if self.next() != "}":
                raise Unreadable("a group in a subscript")
        return "".join(self.tokens[start : self.at])
