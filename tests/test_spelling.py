"""One spelling: every rewrite does what its example says, and none touches what is normal."""

import pytest

from grading.spelling import REWRITES, normalise, plain


@pytest.mark.parametrize(("pattern", "before", "after"), [(p, b, a) for p, _, b, a in REWRITES])
def test_every_rewrite_does_what_its_example_says(pattern, before, after):
    assert normalise(before) == after
    assert before != after


@pytest.mark.parametrize("after", [after for *_, after in REWRITES])
def test_what_is_normal_stays_as_it_is(after):
    assert normalise(after) == after


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("x⁴", "x^{4}"),
        ("10⁻³", "10^{-3}"),
        ("52₈", "52_{8}"),
        ("1½", r"1\frac{1}{2}"),
        ("⅓ and ⅞", r"\frac{1}{3} and \frac{7}{8}"),
        ("√12", r"\sqrt{12}"),
        ("√(x+1)", r"\sqrt (x+1)"),
        ("−7 – 3", "-7 - 3"),
        ("₹20, €5, 7¢", "20, 5, 7 cents"),
        ("％５", "%5"),
        ("𝑥 ≤ π", r"x \le  \pi "),
        ("90°", r"90^\circ "),
        ("\u201cB\u201d", '"B"'),
        ("plain (ASCII) \\text", "plain (ASCII) \\text"),
    ],
)
def test_what_people_type_is_spelled_in_latex(text, latex):
    assert plain(text) == latex


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("1,234,567.5", "1234567.5"),
        ("(1,234)", "(1,234)"),
        ("**5.**", "5"),
        ("'B'", "B"),
        ("f'", "f'"),
        ("30 sec", "30 sec"),
        ("30 min", "30 min"),
        (r"a\ b~c", "a b c"),
        (r"\textit{no} \emph{way}", "no way"),
    ],
)
def test_the_rest_of_normal_form(text, normal):
    assert normalise(text) == normal
