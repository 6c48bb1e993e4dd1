r"""Rewards: what is read out of a completion, what is well formed, what the parts add up to."""

import subprocess
import sys

import pytest
from conftest import ROOT

from rewards import TAGS, accuracy, extract_answer, format, lenient_accuracy, tag_count

CHOICES = ["B", "b", "(B)", "B)", "B.", "**B**", "B: 2 mol of NaOH", "B) 12.0 g", "Option B"]
CHOICES += ["B. a weak base", "B sodium chloride", "B, and I am sure"]
CHOICES = [f"<answer>{choice}</answer>" for choice in CHOICES]
CHOICES += [r"\boxed{\text{B}}", r"\boxed{\text{(B)}}", r"\boxed{A} hmm \boxed{B}", "#### B"]
CHOICES += ["The answer is B since a strong acid is a full donor.", "My choice is B, a weak base."]
CHOICES += ["The correct option is (B).", "**Answer:** B", "Answer: **B**"]
CHOICES += ["A: no. C: no. So the answer is B: sodium", "The answer is B and I balanced it twice."]


@pytest.mark.parametrize("completion", CHOICES)
def test_a_choice_is_read_with_and_without_its_text(completion):
    assert [accuracy(completion, gold) for gold in ("B", r"\text{(B)}", "A", "C")] == [1, 1, 0, 0]


NO_CHOICE = ["A strong acid", "a strong acid", "A and B", "A, B", "A or C", "Acid"]
NO_CHOICE = [f"<answer>{text}</answer>" for text in NO_CHOICE]
NO_CHOICE += ["The answer is a strong acid.", "Answer: A strong acid", "A"]
NO_CHOICE += [r"\boxed{A} or \boxed{B}", "The answer is A and B."]


@pytest.mark.parametrize("completion", NO_CHOICE)
def test_an_article_or_two_letters_are_no_choice(completion):
    assert accuracy(completion, "A") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>5</answer> or \\boxed{6} #### 7, the answer is 8, 9", "5"),
        ("\\boxed{6} #### 7, the answer is 8, 9", "6"),
        ("the answer is 8\n#### 7\n9", "7"),
        ("The answer is 8. Then 9.", "8"),
        ("first 8, then 9.", "9"),
        ("first \\boxed{4}, wait, a sign slip, so \\boxed{5}", "5"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer>2", None),
        ("<answer></answer> so 5", None),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("so \\boxed{16", None),
        ("\\boxed{}", None),
        ("\\boxed{\\boxed{16}}", "16"),
        ("\\boxed{2}, \\boxed{3} and \\boxed{5}", "2, 3, 5"),
        ("$\\boxed{2} \\quad \\text{and} \\quad \\boxed{5}$.", "2, 5"),
        ("\\boxed{(3,3)} \\text{ for part (a) and } \\boxed{(1,1)}", "(3,3), (1,1)"),
        ("\\(y_1 = \\boxed{x+5}\\) and \\( y_2 = \\boxed{3x-2}\\)", "x+5, 3x-2"),
        ("\\boxed{1} papers and \\boxed{2} bins", "1, 2"),
        ("\\boxed{1}\\boxed{2}", "1, 2"),
        ("\\boxed{2}, \\boxed{3}. So it is \\boxed{5}", "5"),
        ("\\boxed{1} no no no no no \\boxed{2}", "2"),
        ("\\[\\boxed{7}\\]\n\n**Final Answer**\n\\boxed{7}", "7"),
        ("\\boxed{\\frac{3}{8}}", "\\frac{3}{8}"),
        ("\\boxed{\\left\\{ \\{b\\} \\right\\}}", "\\left\\{ \\{b\\} \\right\\}"),
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


def test_a_thought_that_the_prompt_opened_is_not_read():
    assert extract_answer("5, so 6", opens_think=True) is None
    assert extract_answer("5 </think> so 6", opens_think=True) == "6"
    assert accuracy("5+3=8\n</think>\n<answer>8</answer>", "8", opens_think=True) == 1


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
    ("It is $\\begin{pmatrix}1\\\\2\\end{pmatrix}$.", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", 1),
    ("The answer is $3qr + 6q - 15r -30$.", "3", 0),
    ("The answer is 3qr + 6q", "3qr+6q", 1),
    ("The answer is $10\\;\\text{edges}$.", "10", 1),
    ("The answer is $\\overline{CD}$.", "\\overline{CD}", 1),
    ("The answer is $5$ or $6$.", "5,6", 1),
    ("The answer is \\(5\\).", "5", 1),
    ("The answer is \\(\n 9 \n\\).", "9", 1),
    ("The answer is:\n\\[\n9\n\\]", "9", 1),
    ("We have 12 345 apples", "12345", 1),
    ("${-2021, 2021}$", "\\pm 2021", 1),
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
    ("no idea", "no idea", 0),
    ("", "", 0),
    ("<answer> </answer>", " ", 0),
    ("no idea", "G (item has 7 options, parser knows A-F)", 0),
    ("Total: 2,350", "350", 0),
    ("... so he is at -15", "15", 0),
    ("\\boxed{18.}", "18", 1),
]


@pytest.mark.parametrize(("completion", "gold", "right"), READ)
def test_a_formula_or_a_choice_is_read_whole(completion, gold, right):
    assert accuracy(completion, gold) == right


def test_a_reference_needs_no_box_to_be_read_whole():
    for gold, part in ((r"2\sqrt{3}", "2"), (r"-2\sqrt{3}", "-2"), ("2^{10}", "2"), ("(1,2)", "1")):
        assert accuracy(rf"\boxed{{{gold}}}", gold) == 1
        assert accuracy(rf"\boxed{{{part}}}", gold) == 0


def test_the_lenient_reading_finds_the_answer_anywhere_outside_thoughts():
    text = "<think>7</think>First I had 4 and $x^2$, then B. So \\boxed{5}."
    for gold, found in (("4", 1), ("x^2", 1), ("B", 1), ("5", 1), ("7", 0), ("6", 0)):
        assert lenient_accuracy(text, gold) == found
    assert accuracy(text, "4") == 0


def test_no_library_is_loaded_for_integers():
    code = (
        "import sys, rewards\n"
        "texts = [f'<think>a</think><answer>{a}</answer>' for a in "
        "('132', '47+85', '13=2', '', '1,2', 'x', '+', '132.0', '12 12')]\n"
        "print(rewards.score(texts, ['132'] * 9)['accuracy'])\n"
        "print({'torch', 'sympy', 'mpmath', 'fcntl', 'resource'} & set(sys.modules))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]", "set()"]


PIECES = [*"5-,()%$.=^}{ \n7a\\²", *TAGS[:1], "</answer>", "\\boxed{", "\\boxed{1}, ", "\\frac"]
PIECES += ["####", "answer is ", "\\text{", "\\(", "$x", "and ", "1,", "1 000 ", "<answer>1 "]
PIECES += ["<think>x</think><answer>y", "<|im_end|>"]


@pytest.mark.parametrize("piece", PIECES)
def test_a_megabyte_of_anything_is_worth_nothing_and_soon_read(piece):
    text = piece * (1_000_000 // len(piece))
    assert (format(text), accuracy(text, "5"), lenient_accuracy(text, "q")) == (0, 0, 0)
    assert tag_count(text) in (0.0, 0.25)


def test_model_text_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes = ["open('r30.txt','w').write('x')", "().__class__", "__import__('os').getcwd()"]
    for code in codes:
        for text in (f"<answer>{code}</answer>", rf"\boxed{{{code}}}", f"the answer is {code}"):
            assert [accuracy(text, gold) for gold in ("5", r"2\sqrt{3}")] == [0, 0]
    assert not list(tmp_path.iterdir())
