"""Numbers are exact, and units are cut off but never a variable."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.quantities import UNITS, number, split_unit

SIGNED = st.integers(-(10**12), 10**12)


@given(SIGNED, st.integers(1, 10**6))
def test_a_fraction_is_read_in_every_spelling(a, b):
    value = Fraction(a, b)
    for text in (f"{a}/{b}", rf"\frac{{{a}}}{{{b}}}", f"({a})/({b})", f"{{{a}/{b}}}", f"({a}/{b})"):
        assert number(text) == value
    assert number(f"-({a}/{b})") == -value


@given(st.integers(0, 10**6), st.integers(1, 99), st.integers(100, 999))
def test_a_mixed_number_is_a_sum(whole, a, b):
    assert number(f"{whole} {a}/{b}") == whole + Fraction(a, b)
    assert number(rf"-{whole}\frac{{{a}}}{{{b}}}") == -(whole + Fraction(a, b))


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9))
def test_a_decimal_is_exact(decimal):
    assert number(f"{decimal:f}") == Fraction(decimal)


@given(st.integers(1, 10**9), st.integers(-90, 90))
def test_a_power_of_ten_is_exact(digits, exponent):
    value = digits * Fraction(10) ** exponent
    for times in (r"\times", r" \times ", r"\cdot ", "*", "x"):
        assert number(rf"{digits}{times}10^{{{exponent}}}") == value
    assert number(f"{digits}e{exponent}") == value


@given(st.integers(0, 99), st.integers(1, 999))
def test_a_repeating_decimal_is_what_long_division_gives(whole, cycle):
    text = rf"{whole}.\overline{{{cycle}}}"
    value, scale = number(text), 10 ** len(str(cycle))
    assert value * scale - value == whole * (scale - 1) + cycle


@pytest.mark.parametrize(
    "text", ["", "x", "47+85", "6*7", "3(4)", "1/0", "1,2", "1 2", "--5", "5!", "3_2", "four", "1e"]
)
def test_what_is_no_plain_number(text):
    assert number(text) is None


UNITED = r"""
18 cm = 18 cm    18cm = 18 cm    60 km/h = 60 km/h    60 miles/hour = 60 mi/h    5 (cm) = 5 cm
864 inches^2 = 864 in^2    12\pi square meters = 12\pi m^2    10 sq cm = 10 cm^2    5 J = 5 J
10 cm^{3} = 10 cm^3    90^\circ = 90 degree    20^\circ C = 20 degreeC    20hrs = 20 h
27 miles from City A = 27 mi    8 \frac{km}{h} = 8 km/h    5 kJ/mol = 5 kJ/mol    45 % = 45 %
9 positive whole-number divisors = 9    18/day = 18    9 (apples) = 9    1/3 of the cake = 1/3
12元 = 12    12 mètres = 12
"""


@pytest.mark.parametrize("row", re.split(r"\n| {4}", UNITED.strip()))
def test_units_are_cut_off(row):
    text, _, value_and_unit = row.partition(" = ")
    value, _, unit = value_and_unit.partition(" ")
    assert split_unit(text) == (value, unit or None)


ALONE = ["5", "5x", "5 x", "3ab", "3 ab/c", "5t", "5g", "2s", "5 squared", "9 or so", "2 thirds"]
ALONE += ["20L", "5m^2", "x cm", r"\tan 20^\circ", "5 and a half", "3 xyz", "5 m/n", "5 (x)"]


@pytest.mark.parametrize("text", ALONE)
def test_variables_and_number_words_are_not(text):
    assert split_unit(text) == (text, None)


@pytest.mark.parametrize(
    ("text", "parts"),
    [("20L", ("20", "L")), ("5m^2", ("5", "m^2")), ("20in", ("20", "in")), ("5t", ("5t", None))],
)
def test_where_a_number_is_wanted_one_letter_may_be_a_unit(text, parts):
    assert split_unit(text, letters=True) == parts


@pytest.mark.parametrize("word", sorted(UNITS.keys() - {"degree", "degreeC", "degreeF", "degreeK"}))
def test_every_unit_is_cut_off_and_has_one_name(word):
    value, unit = split_unit(f"7 {word}")
    assert (value, unit) == ("7", UNITS[word])
    assert UNITS[unit] == unit
