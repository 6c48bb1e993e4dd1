r"""Rewards: what is read, what is equal, what is well formed; and that hostile text costs little.

The tables say what a mathematician would say. Real data and further cases in ../shared are tested
too, where they are.
"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
from rewards import accuracy, extract_answer, format, grader_stats, last_boxed, score, tag_count

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
GOOD = "<think>\n6*7=42\n</think>\n<answer>42</answer>"


def rows(path: str) -> list[dict]:
    """The rows of a JSONL file of ../shared, or a skip that says what is missing."""
    file = SHARED / path
    if not file.exists():
        pytest.skip(f"needs ../shared/{path}")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# ---- What is equal. Each line: the reference, what equals it, what does not.

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
PAIRS = [(gold, good, 1.0) for gold, goods, _ in EQUALITY for good in goods]
PAIRS += [(gold, bad, 0.0) for gold, _, bads in EQUALITY for bad in bads]


@pytest.mark.parametrize(("gold", "answer", "right"), PAIRS)
def test_what_is_equal(gold, answer, right):
    assert accuracy(f"<answer>{answer}</answer>", gold) == right


@pytest.mark.parametrize("gold", dict.fromkeys(gold for gold, _, _ in EQUALITY))
def test_a_reference_equals_itself_in_every_form(gold):
    assert rewards.is_gradable(gold)
    for completion in (f"<answer>{gold}</answer>", rf"so \boxed{{{gold}}}.", f"#### {gold}"):
        assert accuracy(completion, gold) == 1.0


@given(st.integers(), st.integers(min_value=0, max_value=999))
def test_thousands_separators_do_not_change_a_number(n, thousandths):
    number = f"{n}.{thousandths:03}"
    for text in (f"{n:,}.{thousandths:03}", f"${n:,}.{thousandths:03}0", number):
        assert accuracy(f"<answer>{text}</answer>", number) == 1.0
    assert accuracy(f"<answer>{n + 1:,}.{thousandths:03}</answer>", number) == 0.0


# ---- Multiple choice.


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>B</answer>",
        "<answer>b</answer>",
        "<answer>(B)</answer>",
        "<answer>B)</answer>",
        "<answer>B.</answer>",
        "<answer>**B**</answer>",
        "<answer>B: 2 mol of NaOH</answer>",
        "<answer>B) 12.0 g</answer>",
        "<answer>(B) 12.0 g</answer>",
        "<answer>B. a weak base</answer>",
        "<answer>B sodium chloride</answer>",
        "<answer>Option B</answer>",
        r"\boxed{\text{B}}",
        r"\boxed{\text{(B)}}",
        r"\boxed{A} hmm \boxed{B}",
        "#### B",
        "The answer is B since a strong acid is a full donor.",
        "My choice is B, a weak base.",
        "The correct option is (B).",
        "**Answer:** B",
        "Answer: **B**",
        "A: no. C: no. So the answer is B: sodium",
    ],
)
def test_a_choice_is_read_with_and_without_its_text(completion):
    assert [accuracy(completion, gold) for gold in ("B", r"\text{(B)}", "A", "C")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>A strong acid</answer>",
        "<answer>a strong acid</answer>",
        "The answer is a strong acid.",
        "Answer: A strong acid",
        "<answer>A and B</answer>",
        "<answer>A, B</answer>",
        "<answer>A or C</answer>",
        "<answer>Acid</answer>",
        "A",
    ],
)
def test_an_article_or_two_letters_are_no_choice(completion):
    assert accuracy(completion, "A") == 0.0


# ---- What is read.


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>5</answer> or \\boxed{6} #### 7, the answer is 8, 9", "5"),
        ("\\boxed{6} #### 7, the answer is 8, 9", "6"),
        ("the answer is 8\n#### 7\n9", "7"),
        ("The answer is 8. Then 9.", "8"),
        ("first 8, then 9.", "9"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>2", None),
        ("<answer></answer> so 5", None),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("so \\boxed{16", None),
        ("\\boxed{}", None),
        ("\\boxed{\\boxed{16}}", "16"),
        ("\\boxed{\\frac{3}{8}}", "\\frac{3}{8}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\fbox{12}", "12"),
        ("\\boxed 12", "12"),
        ("I will put it in \\boxed form. It is 12", "12"),
        ("<answer>\\boxed{6}</answer>", "6"),
        ("<answer>The answer is 6.</answer>", "6"),
        ("<answer>#### 6</answer>", "6"),
        ("<answer>A: 2</answer>", "A: 2"),
        ("2 boxes, so the answer is 5 each.\nA: 35", "35"),
        ("He pays 3*4=<<3*4=12>>12 dollars.\n#### 12\nmore", "12"),
        ("####", None),
        ("The answer is: 1,234 dollars.", "1,234"),
        ("The final answer is $25, not $26", "$25"),
        ("The answer is 42 because 6*7=42 and 7 is prime.", "42"),
        ("The answer is therefore 12.", "12"),
        ("The answer is Navin.", "Navin"),
        ("the result is -7", "-7"),
        ("from 5-7", "7"),
        ("It costs -$5.", "-$5"),
        ("the odds are 3/8.", "3/8"),
        ("the odds are $\\frac{3}{8}$.", "\\frac{3}{8}"),
        ("2\\sqrt{3}", "2\\sqrt{3}"),
        ("", None),
        ("I don't know.", None),
        ("<think>Answer: 11</think><answer>8</answer>", "8"),
        ("<think>Answer: 11</think>", None),
        ("<think>\\boxed{11} and so", None),
        ("<think>1</think> 2 <think>3", "2"),
        ("thought: 11 </think> so 8", "8"),
        ("thought: 11 </think>", None),
        ("<think><think>4</think><answer>7</answer>", "7"),
        ("#### 12<|im_end|>\n</s>", "12"),
    ],
)
def test_the_first_marker_that_is_present_decides_alone(completion, answer):
    assert extract_answer(completion) == answer
    if answer is not None:
        assert extract_answer(extract_answer(completion)) == answer  # reading is done once


def test_a_thought_that_the_prompt_opened_is_not_read():
    assert extract_answer("5, so 6", opens_think=True) is None
    assert extract_answer("5 </think> so 6", opens_think=True) == "6"
    assert (
        accuracy("three and five make 8\n</think>\n<answer>8</answer>", "8", opens_think=True) == 1
    )


def test_nothing_equals_nothing():
    assert accuracy("no idea", "no idea") == 0.0
    assert accuracy("", "") == 0.0
    assert accuracy("<answer> </answer>", " ") == 0.0


@pytest.mark.parametrize(
    "gold", ["", " ", "$", "...", r"\frac{3", r"\frac{", "x" * 2000, r"\sqrt{}+"]
)
def test_a_reference_that_cannot_be_compared_is_named(gold):
    assert rewards.are_gradable([gold, "5", r"\sqrt{2}"]) == [False, True, True]


def test_last_boxed_counts_braces():
    assert last_boxed(r"odds \boxed{1} and \boxed{\frac{3}{8}} as claimed") == r"\frac{3}{8}"
    assert (
        last_boxed(r"\boxed{\left\{ \text{a } \{b\} \right\}}")
        == r"\left\{ \text{a } \{b\} \right\}"
    )
    assert last_boxed("none") is None


# ---- Form.


@pytest.mark.parametrize(
    ("completion", "formed", "tags"),
    [
        (GOOD, 1, 1),
        ("<think>a</think><answer>5</answer>", 1, 1),
        ("\n <think>a</think>\n\n<answer>5</answer> \n", 1, 1),
        ("<think>a</think>\n<answer>5</answer><|im_end|>", 1, 1),
        ("<think>a</think>\n<answer>5</answer><|endoftext|><|endoftext|>\n", 1, 1),
        ("<think> </think>\n<answer>5</answer>", 1, 1),
        ("<think></think><answer></answer>", 0, 1),
        ("<think>a</think><answer> \n</answer>", 0, 1),
        ("<think>a</think> so <answer>5</answer>", 0, 1),
        ("Sure! <think>a</think><answer>5</answer>", 0, 1),
        ("<think>a</think><answer>5</answer> done", 0, 1),
        ("<answer>5</answer><think>a</think>", 0, 1),
        ("<think>a<answer>5</answer></think>", 0, 1),
        ("<think>a<answer></think>5</answer>", 0, 1),
        ("<think>a</think><answer>5", 0, 0.75),
        ("a</think><answer>5</answer>", 0, 0.75),
        ("<think>a<answer>5</answer>", 0, 0.75),
        ("<think>a</think>5</answer>", 0, 0.75),
        ("<think>a</think>", 0, 0.5),
        ("<answer>5</answer>", 0, 0.5),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0, 0.5),
        ("<think>a</think><think>b</think>\n<answer>5</answer><answer>6</answer>", 0, 0),
        ("<Think>a</Think><Answer>5</Answer>", 0, 0),
        ("no tags at all", 0, 0),
        ("", 0, 0),
    ],
)
def test_format_and_tag_count(completion, formed, tags):
    assert (format(completion), tag_count(completion)) == (formed, tags)


def test_a_thought_that_the_prompt_opened_is_credited():
    text = "three and five make 8\n</think>\n<answer>8</answer>"
    assert (format(text, opens_think=True), tag_count(text, opens_think=True)) == (1, 1)
    assert (format(text), tag_count(text)) == (0, 0.75)
    twice = "<think>" + text  # the policy opened what was open
    assert (format(twice, opens_think=True), tag_count(twice, opens_think=True)) == (0, 0.75)


@given(
    st.lists(st.sampled_from([*rewards.TAGS, "a", " ", "\n", "<", "5"]), max_size=9).map("".join)
)
def test_format_is_what_a_pattern_says_on_short_texts(text):
    inner = r"((?:(?!</?(?:think|answer)>).)*)"
    pattern = rf"\s*<think>{inner}</think>\s*<answer>{inner}</answer>\s*"
    found = re.fullmatch(pattern, text, re.DOTALL)
    assert format(text) == float(bool(found and found[2].strip()))


# ---- Scores.


def test_score_gives_every_part_in_order():
    scores = score([GOOD, "42", "x", ""], ["42", "42", "42", "42"])
    assert scores["accuracy"] == [1, 1, 0, 0]
    assert scores["format"] == [1, 0, 0, 0]
    assert scores["tag_count"] == [1, 0, 0, 0]
    assert scores["total"] == pytest.approx([1.2, 1, 0, 0])


def test_weights_are_taken_in_order_or_by_name():
    assert score([GOOD], ["42"], (1, 1, 1))["total"] == [3]
    assert score([GOOD], ["42"], {"accuracy": 2, "tag_count": 0.5})["total"] == [2.5]
    assert score([GOOD], ["42"], {})["total"] == [0]


def test_errors_say_what_to_change():
    with pytest.raises(ValueError, match="2 completions but 1 answers"):
        score(["a", "b"], ["1"])
    with pytest.raises(ValueError, match="2 weights"):
        score(["a"], ["1"], (1, 1))
    with pytest.raises(ValueError, match="accurcy"):
        score(["a"], ["1"], {"accurcy": 1})


PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "\\boxed{",
    "}",
    "{",
    "\\frac",
    "####",
    "5",
    "-",
    ",",
    "(",
    ")",
    "%",
    "$",
    ".",
    "\\pm",
    "x",
    "=",
    "_8",
    "^",
    "\\text{",
    "and",
    "answer is ",
    " ",
    "\n",
]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@given(st.lists(TEXTS, max_size=8), st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_text_gets_one_finite_reward_whatever_its_neighbours(texts, random):
    answers = ["42"] * len(texts)
    scores = score(texts, answers)
    for part in scores.values():
        assert len(part) == len(texts)
        assert all(0 <= reward <= 1.2 + 1e-9 for reward in part)
    order = list(range(len(texts)))
    random.shuffle(order)
    assert score([texts[i] for i in order], answers)["total"] == [scores["total"][i] for i in order]


@given(TEXTS, TEXTS)
@settings(max_examples=40, deadline=None)
def test_any_reference_is_survived(completion, gold):
    assert accuracy(completion, gold) in (0.0, 1.0)
    assert rewards.is_gradable(gold) in (True, False)


# ---- Hostile text. The bounds are generous, for a busy machine; the naive grader takes minutes.

POISON = [
    r"\boxed{9^{9^{9^{9}}}}",
    r"\boxed{9^{9^{9^9}}}",
    r"\boxed{10^{1000000000}}",
    r"\boxed{7^{77777777}}",
    r"\boxed{3000000!}",
    r"\boxed{((99!)!)!}",
    r"\boxed{\binom{10000000}{5000000}}",
    r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k^2+k+1}}",
    r"\boxed{(x+y+z)^{900}}",
    r"\boxed{x^{11}+x^3-7x+\sin(x)>3}",
    r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
    "<answer>" + "7" * 1_000_000 + "</answer>",
    "7" * 1_000_000,
    "<answer>8**8**8**8</answer>",
    "<answer>" + "(1," * 300 + "1" + ")" * 300 + "</answer>",
]


@pytest.mark.parametrize("gold", ["5", r"2\sqrt{3}", "(x+y)^{900}", "x>3"])
def test_poisoned_answers_are_wrong_soon_and_the_others_still_graded(gold):
    good = [(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), ("<answer>42</answer>", "42")]
    accuracy(*good[0])  # the server is up
    start = time.perf_counter()
    scores = score(
        [POISON[i % len(POISON)] for i in range(64)] + [text for text, _ in good],
        [gold] * 64 + [answer for _, answer in good],
    )
    assert scores["accuracy"] == [0.0] * 64 + [1.0, 1.0]
    assert time.perf_counter() - start < 15


def test_64_different_poisons_cost_one_deadline_and_are_counted():
    accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
    before, start = grader_stats(), time.perf_counter()
    texts = [rf"\boxed{{x^{{{i}}}+y^3-\sin(x)=3x+e^y}}" for i in range(3, 67)]
    assert score(texts, ["x^5+y^3=3"] * 64)["accuracy"] == [0.0] * 64
    assert time.perf_counter() - start < 20  # 5 s and 0.05 s for each, and the machine's noise
    assert grader_stats()["failed"] > before["failed"]
    assert accuracy(r"\boxed{\sqrt{18}}", r"3\sqrt{2}") == 1.0


@pytest.mark.parametrize(
    "piece",
    [*PIECES, "7", "a", "\\", "1,", "<think>x</think><answer>y", "<answer>1 ", "<|im_end|>"],
)
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    assert (format(text), accuracy(text, "5")) == (0.0, 0.0)
    assert tag_count(text) in (0.0, 0.25)
    assert time.perf_counter() - start < 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep the limit")
def test_memory_is_limited():
    code = (  # in the place of the server, with an algebra that wants 3 GiB
        "import rewards\n"
        "rewards._algebra = lambda answer, gold: len(bytearray(int(gold[2:]) << 20)) > 0\n"
        "print(rewards._judge([('x+y', 'x+3072'), ('x+y', 'x+16')]))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "x1\n"


def test_model_text_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in (
        "open('r30.txt','w').write('x')",
        "().__class__.__mro__",
        "__import__('os').getcwd()",
    ):
        for completion in (
            f"<answer>{code}</answer>",
            rf"\boxed{{{code}}}",
            f"the answer is {code}",
        ):
            assert accuracy(completion, "5") == 0.0
            assert accuracy(completion, r"2\sqrt{3}") == 0.0
    assert not list(tmp_path.iterdir())


# ---- The server.


def test_integers_need_no_server_and_no_libraries():
    code = (
        "import sys, rewards\n"
        "texts = [f'<think>a</think><answer>{a}</answer>' for a in "
        "('132', '47+85', '13=2', '', '1,2', 'x', '+', '132.0', '12 12')]\n"
        "print(rewards.score(texts, ['132'] * 9)['accuracy'])\n"
        "print({'torch', 'sympy', 'math_verify'} & set(sys.modules), rewards._grader.server)\n"
    )
    printed = subprocess.check_output(
        [sys.executable, "-c", code], cwd=ROOT, text=True
    ).splitlines()
    assert printed == ["[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]", "set() None"]


def test_it_works_from_threads():
    results = []
    call = (r"\boxed{\frac{2}{\sqrt{2}}}", r"\sqrt{2}")
    thread = threading.Thread(target=lambda: results.append(accuracy(*call)))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(4) as pool:
        results += pool.map(
            lambda i: accuracy(rf"\boxed{{\sqrt{{{i * i * 2}}}}}", rf"{i}\sqrt{{2}}"), range(2, 10)
        )
    assert results == [1.0] * 9


def test_equal_pairs_are_compared_once():
    before = grader_stats()["algebra"]
    assert score([r"\boxed{\sqrt{50}}"] * 30, [r"5\sqrt{2}"] * 30)["accuracy"] == [1.0] * 30
    assert grader_stats()["algebra"] == before + 1


def test_a_killed_server_is_restarted_and_later_answers_are_right():
    assert accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    before = grader_stats()["restarted"]
    os.kill(rewards._grader.server.pid, signal.SIGKILL)
    texts = [rf"\boxed{{\sqrt{{{i * i * 3}}}}}" for i in range(2, 12)]
    assert score(texts, [rf"{i}\sqrt{{3}}" for i in range(2, 12)])["accuracy"] == [1.0] * 10
    assert grader_stats()["restarted"] == before + 1


def test_a_server_killed_in_the_middle_of_a_batch_is_restarted():
    assert accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    before, pid, results = grader_stats()["restarted"], rewards._grader.server.pid, []
    texts = [rf"\boxed{{(x+{i})^{{2}}}}" for i in range(1, 30)]
    golds = [f"x^2+{2 * i}x+{i * i}" for i in range(1, 30)]
    thread = threading.Thread(target=lambda: results.extend(score(texts, golds)["accuracy"]))
    thread.start()
    time.sleep(0.15)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert results == [1.0] * 29
    assert grader_stats()["restarted"] == before + 1


def _in_child(queue):
    queue.put((accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), rewards._grader.server.pid))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_processes_have_servers_of_their_own(method):
    assert accuracy(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    right, server = queue.get(timeout=60)
    child.join()
    assert right == 1.0
    assert server != rewards._grader.server.pid
    assert accuracy(r"\boxed{\sqrt{18}}", r"3\sqrt{2}") == 1.0


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_script_without_main_guard_works_and_leaves_no_process(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import rewards\n"
        r"print(rewards.accuracy(r'\boxed{\sqrt{8}}', r'2\sqrt{2}'))"
        f"\nprint(rewards._grader.server.pid, flush=True)\n{end}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True
    )
    right, pid = run.stdout.split()
    assert right == "1.0"
    for _ in range(100):
        if not _is_running(int(pid)):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} outlived its trainer")


def test_512_ordinary_completions_take_less_than_a_second():
    endings = [
        "<answer>{}</answer>",
        "#### {}",
        r"\boxed{{{}}}",
        "The answer is {}.",
        "<answer>${}.00</answer>",
    ]
    texts = [
        f"<think>{'He buys 3 boxes for $4 each. 3*4=12. ' * 20}</think>\n"
        + endings[i % 5].format(i)
        for i in range(512)
    ]
    start = time.perf_counter()
    scores = score(texts, [str(i) for i in range(512)])
    assert time.perf_counter() - start < 1
    assert scores["accuracy"] == [1.0] * 512


# ---- Real data and handed cases.


def check_references(golds: list[str]) -> list[tuple[str, str]]:
    """Every reference parses and equals itself; returns the pairs that equal the next row's."""
    texts, following = [f"<answer>{gold}</answer>" for gold in golds], golds[1:] + golds[:1]
    assert all(rewards.are_gradable(golds))
    assert score(texts, golds)["accuracy"] == [1.0] * len(golds)
    equal = score(texts, following)["accuracy"]
    pairs = zip(golds, following, equal, strict=True)
    return [(gold, after) for gold, after, same in pairs if same and gold != after]


def test_every_reference_of_gsm8k():
    data = rows("data/gsm8k/train.jsonl") + rows("data/gsm8k/test.jsonl")
    assert len(data) == 8792
    assert check_references([row["answer"].rpartition("####")[2].strip() for row in data]) == []


def test_every_solution_of_gsm8k_is_right():
    data = rows("data/gsm8k/test.jsonl")
    golds = [row["answer"].rpartition("####")[2].strip() for row in data]
    assert score([row["answer"] for row in data], golds)["accuracy"] == [1.0] * len(data)


def test_every_reference_of_math500():
    assert check_references([row["answer"] for row in rows("data/math500/test.jsonl")]) == [
        ("5", "x=5")
    ]


def test_every_solution_of_math500_is_right():
    data = rows("data/math500/test.jsonl")
    scores = score([row["solution"] for row in data], [row["answer"] for row in data])
    assert scores["accuracy"] == [1.0] * len(data)


def test_every_reference_of_sciknoweval():
    data = rows("data/sciknoweval/chemistry_mcq.jsonl")
    assert check_references([row["answerKey"] for row in data]) == []


def of_all(key: str = "completions", gold: str = "gold"):
    """Handed cases of the usual shape: several completions against one reference."""
    return lambda given: [accuracy(text, given[gold]) for text in given[key]]


def of_pairs(gold_first: bool):
    def run(given):
        pairs = [pair if gold_first else pair[::-1] for pair in given["pairs"]]
        return [accuracy(text, last_boxed(gold) or gold) for gold, text in pairs]

    return run


HANDED = {  # how each handed case is run, and what it must give
    "R01": (
        lambda given: (
            [accuracy(given["completion"], given["gold"])]
            + [accuracy(*case.split(" vs ")) for case in given["also"]]
        ),
        [1, 1, 1, 1],
    ),
    "R02": (lambda given: [accuracy(given["completion"], gold) for gold in given["golds"]], [1, 0]),
    "R03": (
        lambda given: (
            of_all(gold="gold_field")(given)
            + [
                accuracy(rf"\boxed{{{text.split(' (')[0]}}}", text.split(" (")[0])
                for text in given["more_golds"]
            ]
            + [
                accuracy(rf"\boxed{{{number}}}", text.split(" (")[0])
                for number, text in zip(("2", "-2", "2"), given["more_golds"], strict=True)
            ]
        ),
        [1, 0, 1, 1, 1, 0, 0, 0],
    ),
    "R04": (
        lambda given: [*of_all()(given), accuracy(given["negative"], given["gold"])],
        [1] * 6 + [0],
    ),
    "R07": (
        lambda given: (
            [
                *list(map(accuracy, given["texts"], given["golds"])),
                accuracy(given["trap"]["text"], given["trap"]["gold"]),
            ]
        ),
        [1, 1, 1, 0],
    ),
    "R08": (of_pairs(gold_first=False), [0, 1, 1, 0]),
    "R12": (of_all(), [1, 1, 1]),
    "R13": (of_all(), [1, 1, 1, 1]),
    "R14": (
        lambda given: [
            last_boxed(given["solution"]),
            accuracy(given["completion"], r"\frac{3}{8}"),
        ],
        [r"\frac{3}{8}", 1],
    ),
    "R15": (
        lambda given: [
            accuracy(text, given["gold"]) for text in (given["completion"], *given["also"])
        ],
        [1, 1, 1],
    ),
    "R17": (
        lambda given: [
            accuracy(given["extracted"], given["gold"]),
            extract_answer(given["extracted"]),
        ],
        [1, "5"],
    ),
    "R19": (lambda given: accuracy(given["completion"], given["gold"]), 0),
    "R20": (of_pairs(gold_first=True), [0, 0, 0]),
    "R25": (of_all(), [1, 1, 1, 0]),
    "R26": (
        lambda given: list(
            ThreadPoolExecutor(2).map(accuracy, [given["completion"]], [given["gold"]])
        ),
        [1],
    ),
    "R27": (
        lambda given: score(
            [text if text != "<build>" else eval(given["build"]) for text in given["completions"]]
            * 11,
            [given["gold"]] * 66,
        )["accuracy"],
        [0] * 66,
    ),
    "R30": (of_all(), [0, 0, 0]),
    "R32": (lambda given: score(given["completions"], given["golds"])["accuracy"], [1, 0, 0, 1]),
    "R34": (lambda given: [accuracy(given["completion"], gold) for gold in given["golds"]], [1, 0]),
    "R35": (
        lambda given: [
            accuracy(given["completion"], given["gold"]),
            tag_count(given["completion"]),
        ],
        [1, 1],
    ),
    "R36": (
        lambda given: [extract_answer(given["row"]["answer"]), accuracy(given["completion"], "12")],
        ["12", 1],
    ),
    "R37": (
        lambda given: of_all()(given) + [accuracy(text, "A") for text in given["completions"]],
        [1, 1, 1, 0, 0, 0],
    ),
    "R41": (of_all(), [1, 1, 1, 1]),
    "R42": (lambda given: accuracy(given["completion"], given["gold"]), 0),
    "R43": (lambda given: [accuracy("<answer>A</answer>", given["gold"])], [0]),
    "R44": (of_pairs(gold_first=True), [1, 1, 1, 0]),
    "R47": (of_all(), [0, 1, 0, 0]),
    "F01": (lambda given: format(given["completion"]), 1),
    "F03": (lambda given: [format(given["completion"]), tag_count(given["completion"])], [0, 0]),
    "F04": (
        lambda given: [
            reward(given["completion"], opens)
            for opens in (True, False)
            for reward in (format, tag_count)
        ],
        [1, 1, 0, 0.75],
    ),
    "F05": (lambda given: [format(eval(build)) for build in given["builds"]], [0, 0, 0]),
    "F06": (lambda given: format(given["completion_ids_decoded_with_special_tokens"]), 1),
    "F08": (lambda given: [format(text) for text in given["completions"]], [0, 1]),
}


@pytest.mark.parametrize("name", HANDED)
def test_handed_cases(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, expected = HANDED[name]
    (case,) = [case for case in rows("cases/cases.jsonl") if case["id"] == name]
    start = time.perf_counter()
    assert run(case["input"]) == expected
    assert time.perf_counter() - start < 10
    assert not list(tmp_path.iterdir())


def test_every_handed_case_about_rewards_is_run():
    kinds = ("1-reward", "2-format")
    handed = [case["id"] for case in rows("cases/cases.jsonl") if case["kind"] in kinds]
    assert sorted(handed) == sorted(HANDED)
