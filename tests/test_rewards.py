r"""Rewards: what is read out of a completion, what is well formed, what the parts add up to."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

from rewards import TAGS, accuracy, extract_answer, format, lenient_accuracy, tag_count


def cases(table: str) -> list[str]:
    """Four blanks or a new line are between two cases; ⏎ is a new line in one."""
    return [case.replace("⏎", "\n") for case in re.split(r"\n| {4}", table.strip())]


# A completion => what is read in it.
ANSWERS = r"""
<answer>5</answer> or \boxed{6} #### 7, the answer is 8, 9 => 5    first 8, then 9. => 9
\boxed{6} #### 7, the answer is 8, 9 => 6    the answer is 8⏎#### 7⏎9 => 7
The answer is 8. Then 9. => 8    first \boxed{4}, wait, a sign slip, so \boxed{5} => 5
<answer>1</answer><answer>2</answer> => 2    <answer>1</answer> <answer>2 => 1    <answer>2 => None
<answer></answer> so 5 => None    \boxed{1} then \boxed{2 => 1    so \boxed{16 => None
\boxed{} => None    \boxed{\boxed{16}} => 16    \boxed{2}, \boxed{3} and \boxed{5} => 2, 3, 5
$\boxed{2} \quad \text{and} \quad \boxed{5}$. => 2, 5    \boxed{1}\boxed{2} => 1, 2
\boxed{(3,3)} \text{ for part (a) and } \boxed{(1,1)} => (3,3), (1,1)    \fbox{12} => 12
\(y_1 = \boxed{x+5}\) and \( y_2 = \boxed{3x-2}\) => x+5, 3x-2    \boxed 12 => 12
\boxed{1} papers and \boxed{2} bins => 1, 2    \boxed{2}, \boxed{3}. So it is \boxed{5} => 5
\boxed{1} no no no no no \boxed{2} => 2    \[\boxed{7}\]⏎⏎**Final Answer**⏎\boxed{7} => 7
\boxed{\frac{3}{8}} => \frac{3}{8}    \boxed{\left\{ \{b\} \right\}} => \left\{ \{b\} \right\}
I will put it in \boxed form. It is 12 => 12    <answer>\boxed{6}</answer> => 6
<answer>The answer is 6.</answer> => 6    <answer>A: 2</answer> => A: 2    #### => None
2 boxes, so the answer is 5 each.⏎A: 35 => 35    The answer is: 1,234 dollars. => 1,234
He pays 3*4=<<3*4=12>>12 dollars.⏎#### 12⏎more => 12    The answer is therefore 12. => 12
The final answer is $25, not $26 => $25    The answer is Navin. => Navin    the result is -7 => -7
The answer is 42 because 6*7=42 and 7 is prime. => 42    from 5-7 => 7    It costs -$5. => -$5
the odds are 3/8. => 3/8    the odds are $\frac{3}{8}$. => \frac{3}{8}    2\sqrt{3} => 2\sqrt{3}
I don't know. => None    <think>Answer: 11</think><answer>8</answer> => 8
<think>Answer: 11</think> => None    <think>\boxed{11} and so => None
<think>1</think> 2 <think>3 => 2    thought: 11 </think> so 8 => 8    thought: 11 </think> => None
<think><think>4</think><answer>7</answer> => 7    #### 12<|im_end|>⏎</s> => 12
"""


@pytest.mark.parametrize("case", cases(ANSWERS))
def test_the_first_marker_that_is_present_decides_alone(case):
    completion, _, answer = case.partition(" => ")
    assert extract_answer(completion) == (None if answer == "None" else answer)


def test_nothing_is_no_answer():
    assert extract_answer("") is None
    assert accuracy("", "") == accuracy("<answer> </answer>", " ") == 0


def test_a_thought_that_the_prompt_opened_is_not_read():
    assert extract_answer("5, so 6", opens_think=True) is None
    assert extract_answer("5 </think> so 6", opens_think=True) == "6"
    assert accuracy("5+3=8\n</think>\n<answer>8</answer>", "8", opens_think=True) == 1


# A completion = a reference that it is right for ! one for which it is wrong.
READ = r"""
The answer is C or D.  !  C    So the answer is (A) or (B).  !  A    Answer: A, B  !  A
<answer>The answer is (A) or (B).</answer>  !  A    The answer is A (Viscoelasticity).  =  A
The final answer is \text{C, F, H}.  =  \text{C, F, H}    Answer: "C"  =  C    __Answer__: A  =  A
_Answer_: D  =  D    The correct answer is [D].  =  D    The correct option is (B).  =  B
\boxed{\text{B}}  =  B    \boxed{\text{(B)}}  =  B    \boxed{A} hmm \boxed{B}  =  B    #### B  =  B
The answer is B since a strong acid is a full donor.  =  B    My choice is B, a weak base.  =  B
**Answer:** B  =  B    Answer: **B**  =  B    A: no. C: no. So the answer is B: sodium  =  B
The answer is B and I balanced it twice.  =  B    The answer is a strong acid.  !  A    A  !  A
Answer: A strong acid  !  A    \boxed{A} or \boxed{B}  !  A    The answer is A and B.  !  A
The answer is $x - 3$.  !  x    The final answer is $7(x+3) (x-3)$.  =  7(x+3)(x-3)
The answer is $(-\infty,2]\cup (3,4)$.  =  (-\infty,2]\cup(3,4)    The answer is \(5\).  =  5
It is $\begin{pmatrix}1\\2\end{pmatrix}$.  =  \begin{pmatrix}1\\2\end{pmatrix}    so 3x  !  3
The answer is $3qr + 6q - 15r -30$.  !  3    The answer is 3qr + 6q  =  3qr+6q
The answer is $10\;\text{edges}$.  =  10    The answer is $\overline{CD}$.  =  \overline{CD}
The answer is $5$ or $6$.  =  5,6    The answer is \(⏎ 9 ⏎\).  =  9
The answer is:⏎\[⏎9⏎\]  =  9    We have 12 345 apples  =  12345    ${-2021, 2021}$  =  \pm 2021
The area is 12 cm^2.  =  12    The area is 12 cm^2.  !  2    The area is 25 cm².  =  25
$10^3$  =  1000    The result is 10^3.  !  3    x^2+1  !  1    So we get x^2 + 1.  !  1
So we get x^2 + 1.  =  x^2+1    It is $[0,9)$.  !  (0,9)    It is (2, 5).  =  (2,5)
It is (2, 5).  !  5    He drank H2O  !  2    The ratio is 3:4  !  4    I have a 5 m rope  =  5
I think it's 5kg  =  5    They paid $3, $4 and $5  =  5    The result is \\boxed{-3}  =  -3
so the number is 10 which is 1,000.99m²  =  1000.99    no idea  !  no idea
no idea  !  G (item has 7 options, parser knows A-F)    Total: 2,350  !  350
... so he is at -15  !  15    \boxed{18.}  =  18
"""


@pytest.mark.parametrize("case", cases(READ))
def test_a_formula_or_a_choice_is_read_whole(case):
    completion, sign, gold = re.split(r"  ([=!])  ", case)
    assert accuracy(completion, gold) == (sign == "=")


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
