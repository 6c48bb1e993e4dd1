r"""What is equal and what is not: tables that say what a mathematician would say.

Each line: the reference, what equals it, what does not. References must equal themselves.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.equality import NeedsAlgebra, chosen, equal, gradable, is_tame
from rewards import accuracy, is_gradable

EQUALITY = [
    ("5", ["5", "5.", "5.0", "+5", "x=5", "2+3=5", "(5)", "**5**", "$5$", r"\(5\)"], ["6", "five"]),
    (
        "5",
        ["5 apples", "$5", "€5", "5%", r"\text{5}", "005"],
        ["5x", "5 x", "-5", r"\pm 5", "x", ""],
    ),
    ("-7", ["-7", "−7", "–7", "minus 7", "- 7"], ["7", "7-"]),
    ("132", ["132"], ["47+85", "130 + 2", r"11 \times 12", "1,32", "1 32"]),
    (
        "48500",
        ["48,500", "$48,500.00", r"48{,}500", r"48\,500", "48 500", "48.5 thousand"],
        ["48,50"],
    ),
    ("1234567", ["1,234,567", r"1\,234\,567", "1 234 567"], ["1,234,56", "12,34,567", "802"]),
    ("3000000", ["3 million", "3e6", r"3\times10^6", r"3 \cdot 10^{6}", "3E6"], ["3"]),
    ("0.00012", ["1.2e-4", r"1.2\times 10^{-4}", ".00012"], ["1.2", "1.2e4"]),
    (r"6.02\times 10^{23}", ["6.02e23", "6.02*10^23"], [r"6.022\times 10^{23}", "6.02e22"]),
    ("100000", ["1e5", "10^5", r"10^{5}"], ["1e", "15"]),
    (
        r"\frac{14}{3}",
        ["14/3", r"\dfrac{14}{3}", r"\frac{28}{6}", r"4\frac{2}{3}", "4 2/3"],
        ["4.6667"],
    ),
    (r"\frac43", [r"\tfrac43", "4/3", r"1\frac13"], ["43", "4.3", "1.333333"]),
    (r"-\frac{1}{2}", ["-0.5", r"\frac{-1}{2}", r"\frac{1}{-2}", "-1/2", "-½"], ["0.5"]),
    (r"-1\frac{1}{2}", ["-1.5", "-3/2", "-1 1/2"], ["-0.5", "-11/2"]),
    (r"\frac{1}{6}", [r"0.1\overline{6}", r".1\overline{66}"], ["0.16", r"0.\overline{16}"]),
    (r"-1.2\overline{34}", [r"-\frac{611}{495}"], [r"1.2\overline{34}", "-1.234"]),
    (r"\frac{1}{3}", ["1/3", "2/6"], ["0.333333", "0.3333333333333333", "3"]),
    ("1/3^80", [r"\frac{1}{3^{80}}", "3/3^81"], ["2/3^79", "0"]),
    (r"45\%", ["45%", "45", "0.45", "45 percent"], ["4.5", "0.45%", "450"]),
    ("0.45", ["45%", ".45"], ["45"]),
    (
        "18",
        ["18 cm", r"18\text{ dollars}", "18 square meters", "18cm", "18 miles per hour"],
        ["18 18"],
    ),
    (
        r"18\text{ cm}",
        ["18", "18 cm", "18 centimeters", r"18\mbox{ cm}"],
        ["18 m", "18 kg", "19 cm"],
    ),
    (r"864 \mbox{ inches}^2", ["864", "864 in^2", "864 square inches"], ["864 feet"]),
    (r"90^\circ", ["90", "90°", "90 degrees", r"90^{\circ}"], [r"\frac{\pi}{2}", "9"]),
    (r"\$32,\!348", ["32348", "32,348", "$32,348"], ["32"]),
    (r"11,\! 111,\! 100", ["11111100", "11,111,100"], [r"\frac{1}{2}\pi"]),
    ("52_8", ["52_{8}", "52"], ["52_9", "42", "25_8"]),
    ("42", ["52_8"], ["42_8", "42_5"]),
    (r"2\sqrt{3}", [r"\sqrt{12}", "2√3", "2sqrt(3)", r"2\sqrt3", "12^{1/2}"], ["2", "3", "3.4641"]),
    (r"2\pi", ["2pi", "2π", r"2 \pi"], ["6.283185", "6.2831853071795865"]),
    ("6 - 5i", ["-5i+6", "6-5i"], ["6+5i", "5i-6"]),
    ("(x+1)^2", ["x^2+2x+1", "(1+x)^2"], ["x^2+2x+2", "(x-1)^2", "(y+1)^2"]),
    ("x=5", ["5", "x = 5"], ["y=5", "x=6"]),
    ("y = 2x + 3", ["2x+3", "y=3+2x"], ["y=2x-3", "2x"]),
    ("2x-5y+11=0", ["4x-10y+22=0", "2x = 5y - 11"], ["7x+3y+2=0", "0"]),
    (r"x \in [-2,7]", ["[-2,7]", r"-2 \le x \le 7"], ["(-2,7)", "[-2,7)"]),
    (
        "1,-2",
        ["-2,1", r"\{1,-2\}", "1 and -2", "x=1 or x=-2", "(1,-2)"],
        ["1", "1,2", "(-2,1)", "-1"],
    ),
    (
        "(1,2)",
        ["(1, 2)", r"\left(1,2\right)", "1,2"],
        ["(2,1)", r"\{1,2\}", "[1,2]", "(1,2]", "2,1"],
    ),
    (r"\{1,2\}", [r"\{2,1\}", "2,1", r"\{1,1,2\}"], ["(1,2)", "[1,2]", r"\{1,2,3\}"]),
    (r"\{1,2,3\}", [r"\{1,2\}\cup\{3\}"], [r"\{1,2\}\cup\{4\}"]),
    (r"(2,\infty)", ["x>2", "(2,∞)", "2<x"], [r"[2,\infty)", r"x\ge 2", "x<2"]),
    (r"(0,9) \cup (9,36)", [r"(9,36)\cup(0,9)"], [r"(0,9]\cup(9,36)", "(0,36)"]),
    (r"1 \pm \sqrt{19}", [r"1-\sqrt{19},1+\sqrt{19}", r"x=1\pm\sqrt{19}"], [r"1+\sqrt{19}"]),
    (
        r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}",
        [r"\begin{bmatrix}-\frac13\\2\end{bmatrix}"],
        ["2"],
    ),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", [], [r"\begin{pmatrix}2\\1\end{pmatrix}"]),
    (r"\text{east}", ["east", "East.", r"\textbf{East}"], ["seat", "eats", "west"]),
    ("stop", ["Stop", r"\text{stop}"], ["pots", "s t"]),
    (r"\text{Evelyn}", ["Evelyn"], ["Eve"]),
    ("no", ["No", r"\text{no}"], ["on"]),
    ("NaCl", [r"\text{NaCl}", r"\mathrm{NaCl}"], ["ClNa", "Na"]),
    ("H_2O", ["H2O", r"\text{H}_2\text{O}"], ["OH_2", "H_2O_2"]),
    ("k", ["k"], ["K", "2k"]),
    ("3R^2", ["3 R^2"], ["3r^2"]),
    (r"\emptyset", [r"\varnothing", "∅", r"\{\}"], ["0"]),
    (r"\cot x", [r"\cot(x)", r"\frac{\cos x}{\sin x}"], [r"\tan x"]),
    (r"\text{(C)}", ["C", "(C)", r"\textbf{(C)}", r"\text{(C) } 5"], ["(D)", "5"]),
    (r"137 \frac{1}{2}", ["137.5", r"\frac{275}{2}"], ["1371/2", "137"]),
    (r"2^{2^{3}}", [r"2^{2^3}"], ["64"]),
    ("ab", ["ba", r"a \cdot b"], ["a", "a+b"]),
]


PAIRS = [(gold, good, True) for gold, goods, _ in EQUALITY for good in goods]
PAIRS += [(gold, bad, False) for gold, _, bads in EQUALITY for bad in bads]


@pytest.mark.parametrize(("gold", "answer", "right"), PAIRS)
def test_what_is_equal(gold, answer, right):
    assert accuracy(f"<answer>{answer}</answer>", gold) == right


@pytest.mark.parametrize("gold", dict.fromkeys(gold for gold, _, _ in EQUALITY))
def test_a_reference_equals_itself_in_every_form(gold):
    assert is_gradable(gold)
    for completion in (f"<answer>{gold}</answer>", rf"so \boxed{{{gold}}}.", f"#### {gold}"):
        assert accuracy(completion, gold) == 1.0


@given(st.integers(), st.integers(min_value=0, max_value=999))
def test_thousands_separators_do_not_change_a_number(n, thousandths):
    number = f"{n}.{thousandths:03}"
    for text in (f"{n:,}.{thousandths:03}", f"${n:,}.{thousandths:03}0", number):
        assert equal(text, number)
    assert not equal(f"{n + 1:,}.{thousandths:03}", number)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=5), st.randoms())
def test_brackets_keep_order_and_repeats_and_sets_do_not(items, random):
    def written(numbers, brackets):
        return brackets[0] + ",".join(map(str, numbers)) + brackets[1]

    other = random.sample(items, len(items)) + random.sample(items, 1) * random.randint(0, 1)
    ordered, sets = ("()", "[]"), ((r"\{", r"\}"), ("", ""))
    for brackets in ordered:
        assert equal(written(other, brackets), written(items, brackets)) == (other == items)
    for brackets in sets:
        assert equal(written(other, brackets), written(items, brackets))
        assert not equal(written([*other, 9], brackets), written(items, brackets))


@given(st.sampled_from("ABCDEFGH"), st.sampled_from("ABCDEFGH"))
def test_every_letter_is_chosen_alike_and_never_by_a_hedge(letter, other):
    forms = ("{}", "({})", "[{}]", '"{}"', "{}.", "{}) text", "{}: text", "{}. A text", "{} (text)")
    forms += (
        "Option {}",
        "{} is correct",
        "{} because",
        "{} - the text",
        "{}, since",
        "{}) X rays",
    )
    for form in forms:
        assert chosen(form.format(letter)) == letter
    for hedge in ("{} or {}", "{}, {}", "{} and {}", "{}/{}", "({}) ({})", "{}; {}", "{} & {}"):
        assert chosen(hedge.format(letter, other)) is None


def test_what_no_rule_reads_is_a_question_of_algebra():
    answer, gold = r"\mathbb{R}\setminus\{1\}", r"x \ne 1"
    with pytest.raises(NeedsAlgebra):
        equal(answer, gold)
    assert equal(answer, gold, lambda *_: True)
    assert not equal(answer, gold, lambda *_: False)


def test_work_against_a_value_is_no_question_of_algebra():
    assert not equal(r"\sum_{k=0}^{3} k", "6")
    assert not equal(r"\max(x, y)", "x+y")


def test_too_long_is_unequal_even_to_itself():
    assert not equal("x" * 1001, "x" * 1001)


@pytest.mark.parametrize(
    "gold",
    [
        *("", " ", "$", "...", r"\frac{3", r"\frac{", "x" * 2000, r"\sqrt{}+", "(1,2", "3+", "x^"),
        *(r"\frac{1}", r"\frac{}{2}", "5="),
    ],
)
def test_a_reference_that_cannot_be_compared_with_is_named(gold):
    assert not gradable(gold)


@pytest.mark.parametrize(
    "gold",
    [
        *(
            r"2007 + \frac\pi 2",
            r"\frac \pi4 + 2 - \sqrt2",
            r"\frac{1+a+b+c}c",
            r"1-\frac{1}{\mathrm{e}}",
        ),
        *(r"4\!:\!51\!:\!06 \text{ p.m.}", r"\text{4:30 p.m.}", r"9\text{ a.m.}", "3:4"),
        *(r"81 \mathrm{~km} / \mathrm{hr}", r"x\in\mathbb{R}", "f(x)=x^2", r"\ln|x|+C", r"\vec{v}"),
        *(r"\sum_{n=1}^\infty \frac{1}{n^2}", r"\{x : x>2\}", r"\frac{dy}{dx}=2x", "[0,1)"),
        *(r"a \equiv 3 \pmod 5", r"A\cup B", "10^{100}", r"\emptyset", r"\$5"),
    ],
)
def test_a_sound_reference_is_kept_and_equals_itself(gold):
    assert gradable(gold)
    assert equal(gold, gold)


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9^9}}", "10^{1000000}", "7" * 40, "1000!", "(3!)!", r"\binom{10000}{3}"),
        *(r"\sum_k k", "(" * 6 + ")" * 6, "x" * 151, "a_{b_{c}}", "|x|" * 4, r"\{x : x>2\}"),
    ],
)
def test_what_is_too_big_for_algebra(text):
    assert not is_tame(text)
    assert is_tame(r"\mathbb{R}\setminus\{-2, 2\}")
