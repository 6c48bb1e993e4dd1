r"""Rewards: what is read out of a completion, what is well formed, what the parts add up to."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rewards import accuracy, extract_answer, format, last_boxed, score, tag_count

ROOT = Path(__file__).parents[1]
GOOD = "<think>\n6*7=42\n</think>\n<answer>42</answer>"

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


READ = [
    ("The answer is C or D.", "C", 0),
    ("So the answer is (A) or (B).", "A", 0),
    ("<answer>The answer is (A) or (B).</answer>", "A", 0),
    ("Answer: A, B", "A", 0),
    ("The final answer is \\text{C, F, H}.", "\\text{C, F, H}", 1),
    ("The answer is A (Viscoelasticity).", "A", 1),
    ('Answer: "C"', "C", 1),
    ("__Answer__: A", "A", 1),
    ("_Answer_: D", "D", 1),
    ("The correct answer is [D].", "D", 1),
    ("The answer is $x - 3$.", "x", 0),
    ("The final answer is $7(x+3) (x-3)$.", "7(x+3)(x-3)", 1),
    ("The answer is $(-\\infty,2]\\cup (3,4)$.", "(-\\infty,2]\\cup(3,4)", 1),
    (
        "The answer is $\\begin{pmatrix}1\\\\2\\end{pmatrix}$.",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        1,
    ),
    ("The answer is $3qr + 6q - 15r -30$.", "3", 0),
    ("The answer is 3qr + 6q", "3qr+6q", 1),
    ("The answer is $10\\;\\text{edges}$.", "10", 1),
    ("The answer is $\\overline{CD}$.", "\\overline{CD}", 1),
    ("The answer is $5$ or $6$.", "5,6", 1),
    ("The answer is \\(5\\).", "5", 1),
    ("The area is 12 cm^2.", "12", 1),
    ("The area is 12 cm^2.", "2", 0),
    ("The area is 25 cm².", "25", 1),
    ("$10^3$", "1000", 1),
    ("The result is 10^3.", "3", 0),
    ("x^2+1", "1", 0),
    ("So we get x^2 + 1.", "1", 0),
    ("So we get x^2 + 1.", "x^2+1", 1),
    ("so 3x", "3", 0),
    ("It is $[0,9)$.", "(0,9)", 0),
    ("It is (2, 5).", "(2,5)", 1),
    ("It is (2, 5).", "5", 0),
    ("He drank H2O", "2", 0),
    ("The ratio is 3:4", "4", 0),
    ("I have a 5 m rope", "5", 1),
    ("I think it's 5kg", "5", 1),
    ("They paid $3, $4 and $5", "5", 1),
    ("so the number is 10 which is 1,000.99m²", "1000.99", 1),
    ("The result is \\\\boxed{-3}", "-3", 1),
]


@pytest.mark.parametrize(("completion", "gold", "right"), READ)
def test_a_formula_or_a_choice_is_read_whole(completion, gold, right):
    assert accuracy(completion, gold) == right


def test_nothing_equals_nothing():
    assert accuracy("no idea", "no idea") == 0.0
    assert accuracy("", "") == 0.0
    assert accuracy("<answer> </answer>", " ") == 0.0


def test_last_boxed_counts_braces():
    assert last_boxed(r"odds \boxed{1} and \boxed{\frac{3}{8}} as claimed") == r"\frac{3}{8}"
    assert (
        last_boxed(r"\boxed{\left\{ \text{a } \{b\} \right\}}")
        == r"\left\{ \text{a } \{b\} \right\}"
    )
    assert last_boxed("none") is None


# ---- What users of such rewards tripped over, in public reports.


def test_comma_groups_are_one_number_and_signs_are_kept():
    assert accuracy("I get 1,234 dollars.", "1234") == 1
    assert accuracy("Total: 2,350", "350") == 0
    assert accuracy("... so he is at -15", "15") == 0
    assert accuracy("... so he is at -15", "-15") == 1


def test_the_last_box_corrects_the_first():
    text = r"first I get \boxed{4}, wait, a sign slip, so \boxed{5}"
    assert [accuracy(text, gold) for gold in ("5", "4")] == [1, 0]


def test_a_reference_needs_no_box_to_be_read_whole():
    for gold, part in ((r"2\sqrt{3}", "2"), (r"-2\sqrt{3}", "-2"), ("2^{10}", "2"), ("(1,2)", "1")):
        assert accuracy(rf"\boxed{{{gold}}}", gold) == 1
        assert accuracy(rf"\boxed{{{part}}}", gold) == 0


def test_a_full_stop_is_no_part_of_the_answer():
    for text in (r"\boxed{18.}", "<answer>18.</answer>", "The answer is 18."):
        assert accuracy(text, "18") == 1


def test_anagrams_and_unrelated_equations_are_not_equal():
    for gold, text in (("stop", "pots"), ("NaCl", "ClNa"), ("7", "seven")):
        assert accuracy(rf"\boxed{{{text}}}", gold) == 0
    assert accuracy("<answer>7x + 3y + 2=0</answer>", "2x-5y+11=0") == 0


def test_a_prefilled_tag_is_credited_and_repeated_blocks_are_not():
    text = "three and five make 8\n</think>\n<answer>8</answer>"
    assert (format(text, opens_think=True), tag_count(text, opens_think=True)) == (1, 1)
    twice = "<think>a</think><think>b</think>\n<answer>5</answer><answer>6</answer>"
    assert (format(twice), tag_count(twice)) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "<think>x</think><answer>y" * 160,
        "<think>x</think>\n<answer>" * 800,
        "<answer>1 " * 8000,
    ],
)
def test_degenerate_text_is_not_well_formed_and_costs_nothing(text):
    start = time.perf_counter()
    assert format(text) == 0
    assert time.perf_counter() - start < 0.5


def test_every_completion_gets_one_reward_in_its_place():
    texts = [r"\boxed{1}", "", "I don't know.", r"\boxed{2}"]
    assert score(texts, ["1", "1", "1", "2"])["accuracy"] == [1, 0, 0, 1]


def test_a_wrong_key_pays_nobody():
    assert accuracy("<answer>A</answer>", "E") == 0
    assert accuracy("no idea", "G (item has 7 options, parser knows A-F)") == 0


# ---- Cost.


def test_integers_need_no_server_and_no_libraries():
    code = (
        "import sys, rewards\n"
        "texts = [f'<think>a</think><answer>{a}</answer>' for a in "
        "('132', '47+85', '13=2', '', '1,2', 'x', '+', '132.0', '12 12')]\n"
        "print(rewards.score(texts, ['132'] * 9)['accuracy'])\n"
        "print({'torch', 'sympy', 'math_verify'} & set(sys.modules))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]", "set()"]


@pytest.mark.parametrize(
    "piece",
    [
        *"5-,()%$.=^}{ ",
        "<think>",
        "</answer>",
        "\\boxed{",
        "\\frac",
        "####",
        "answer is ",
        "\\text{",
        "\\(",
        "$x",
        "and",
        "7",
        "a",
        "\\",
        "1,",
        "²",
        "<think>x</think><answer>y",
        "<answer>1 ",
        "<|im_end|>",
    ],
)
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.perf_counter()
    assert (format(text), accuracy(text, "5")) == (0.0, 0.0)
    assert tag_count(text) in (0.0, 0.25)
    assert time.perf_counter() - start < 1.5


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
