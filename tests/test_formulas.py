"""Formulas by their values, against sympy's algebra on formulas small enough for it."""

import re

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.formulas import same, values
from grading.spelling import normalise

X, Y = sympy.symbols("x y")
LEAVES = st.sampled_from([X, Y, sympy.Integer(1), sympy.Integer(2), sympy.Rational(3, 5), sympy.pi])
FORMULAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, b: a - b, inner, inner),
        st.builds(lambda a, b: a * b, inner, inner),
        st.builds(lambda a, n: a**n, inner, st.integers(1, 3)),
    ),
    max_leaves=6,
)


@given(FORMULAS, FORMULAS)
@settings(max_examples=150, deadline=None)
def test_polynomials_are_equal_when_their_difference_expands_to_nothing(a, b):
    for left, right in ((a, b), (a, sympy.expand(a)), (b, sympy.factor(b))):
        written = [normalise(sympy.latex(side)) for side in (left, right)]
        assert same(*written) == (sympy.expand(left - right) == 0)


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_numbers_are_equal_when_their_fractions_are(a, b):
    def written(value):
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"

    assert same(written(a), written(b)) == (a == b)
    assert same(f"{written(a)}+{written(b)}", written(a + b))


PAIRS = r"""
\sin^2 x+\cos^2 x  =  1    \sin 2x  =  2\sin x\cos x    \tan x  =  \frac{\sin x}{\cos x}
\sin^{-1} x  =  \arcsin x    \sec x  =  \frac{1}{\cos(x)}    \tan 20^\circ  =  \tan(\frac{\pi}{9})
\ln(x^2)  =  2\ln x    \log_2 8  =  3    \log 1000  =  3    e^{i\pi}  =  -1    \sqrt[3]{-8}  =  -2
\sqrt{2.5}  =  \frac{\sqrt{10}}{2}    \frac\pi2  =  \pi/2    \frac12x  =  x/2    2^{-1}  =  2^-1
x^10  =  x^{10}    2\frac{1}{3}  =  7/3    -2^2  =  -4    --2  =  2    5!  =  120
\binom{5}{2}  =  10    |-3|  =  3    \lfloor 2.7\rfloor  =  2    \gcd(18,12)+\max(1,x-x)  =  7
x\ne 3  =  2x\ne 6    a_1a_{12}  =  a_{12}a_1    \overline{AB}+1  =  1+\overline{AB}
2x-5y+11=0  =  2x=5y-11    4x=2  =  2x=1    2x>4  =  x>2    -x>2  =  x<-2    x\ge 2  =  2\le x
3t  !  3    |x|  !  x    \sqrt{x^2}  !  x    x  !  X    x_1  !  x_2    1/3^{80}  !  2/3^{79}
0.3333333333333333x  !  x/3    e^{\pi\sqrt{163}}  !  262537412640768744    (x+y+z)^{900}  !  5
9^{9^{9^9}}  !  5    7^{77777777}  !  x    x=2  !  x    x=2  !  y=2    x>2  !  x<2
x>2  !  x\ge 2    x\ne 2  !  x=2    xy=1  !  y=1/x    0=0  !  x=2
"""


@pytest.mark.parametrize("pair", re.split(r"\n| {4}", PAIRS.strip()))
def test_what_is_equal_both_ways(pair):
    left, sign, right = re.split(r"  ([=!])  ", pair)
    assert same(left, right) is same(right, left) is (sign == "=")


def test_math_verify_says_the_same():
    math_verify = pytest.importorskip("math_verify", reason="needs math-verify, an oracle")
    texts = (
        r"(x+1)^2  x^2+2x+1  x^2-1  (x-1)(x+1)  \frac{x}{2}+\frac{1}{2}  \frac{x+1}{2}  2\sqrt{3}x"
    )
    texts += r"  \sqrt{12}x  \frac{1}{\sqrt{3}}  \frac{\sqrt{3}}{3}  2\sqrt{3}"
    texts = texts.split("  ")
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in texts]
    for left, read in zip(texts, parsed, strict=True):
        for right, gold in zip(texts, parsed, strict=True):
            assert same(left, right) == math_verify.verify(gold, read, timeout_seconds=None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "+", "x+", "18 18", "(x", "x)", "[x)", "1,2", r"\frac{1}", r"\sqrt{}", r"\sum_n a_n"),
        *("3000000!", r"\binom{10000000}{5000000}", "x=y=z", r"\unknown", "a_{b_{c}}", "5%", "é"),
        *("(" * 300 + "x" + ")" * 300, "|" * 300, "1/0", "2^" * 100 + "2", r"\gcd(x,2)"),
        *("9^{9^{9^9}}", "10^{1000000000}", "((99!)!)!", r"\sin(9^{9999})", r"\exp(9^{9})"),
    ],
)
def test_what_has_no_value_equals_nothing_that_has_one(text):
    assert values(text) is None
    assert same(text, "x") is False
    assert same("x", text) is False
    assert same(text, text) is False
