"""The worked solutions hold what they say, and the careless student errs as often as stated."""

import random
import re
from collections import Counter

import pytest

from rewards import TAGS
from support.arithmetic import careless_solution, error_kind, worked_solution
from support.tasks import load_task


def test_every_worked_solution_holds_what_it_says_and_fits():
    solution = "<think>7+5=12,4+8+1=13</think><answer>132</answer>"
    assert worked_solution("47+85=") == solution
    for problem in load_task("arithmetic", "train") + load_task("arithmetic", "test"):
        text = worked_solution(problem.prompt)
        columns = re.findall(r"([\d+]+)=(\d+)", text)
        assert [sum(map(int, left.split("+"))) - int(right) for left, right in columns] == [0, 0]
        assert text.endswith(f"</think><answer>{problem.answer}</answer>")
        assert len(re.sub(r"</?\w+>", "T", text)) <= 22  # tokens, without the one that ends it
        assert error_kind(problem.prompt, text) == "right"


def test_the_careless_student_forgets_and_adds_carries_as_often_as_stated():
    rng, seen, wrong_tags = random.Random(0), Counter(), 0
    problems = load_task("arithmetic", "train")
    for problem in problems:
        text = careless_solution(problem.prompt, rng)
        a1, a0, b1, b0 = map(int, problem.prompt.replace("+", "").removesuffix("="))
        inner = f"{a1}+{b1}+1=" in text
        high, one = (a1 + b1 + 1, "+1") if inner else (a1 + b1, "")
        # Even where carries are wrong, the columns themselves are added correctly.
        assert f"{a0}+{b0}={a0 + b0},{a1}+{b1}{one}={high}" in text
        answer = re.search(r">(\d+)<", text)[1]
        leading = len(answer) == 3
        assert answer[-2:] == f"{high % 10}{(a0 + b0) % 10}" and answer[:-2] in ("", "1")
        seen["inner", a0 + b0 >= 10, inner] += 1
        seen["leading", high >= 10, leading] += 1
        tags = re.findall(r"</?\w+>", text)
        assert sum(tag != right for tag, right in zip(tags, TAGS, strict=True)) <= 1
        wrong_tags += tags != list(TAGS)
    assert wrong_tags / len(problems) == pytest.approx(0.3, abs=0.02)
    for place in ("inner", "leading"):
        for due, added in ((True, 0.5), (False, 0.2)):
            count = seen[place, due, True] + seen[place, due, False]
            assert seen[place, due, True] / count == pytest.approx(added, abs=0.03)


@pytest.mark.parametrize(
    ("prompt", "completion", "kind"),
    [
        ("47+85=", "<think>7+5=12,4+8+1=13</think><answer>132</answer>\n", "right"),
        ("47+85=", "<think>7+5=12,4+8=12</think><answer>122</answer>", "inner carry"),
        ("10+16=", "<think>0+6=6,1+1+1=3</think><answer>36</answer>", "inner carry"),
        # The first mistake counts, also where the second one or the tags are wrong too.
        ("47+85=", "<think>7+5=12,4+8=12</think><answer>22</answer>", "inner carry"),
        ("47+85=", "<answer>7+5=12,4+8=12</think><answer>122</answer>", "inner carry"),
        ("47+85=", "<think>7+5=12,4+8+1=13</think><answer>32</answer>", "leading carry"),
        ("10+16=", "<think>0+6=6,1+1=2</think><answer>126</answer>", "leading carry"),
        ("47+85=", "<think>7+5=13,4+8+1=13</think><answer>133</answer>", "column"),
        ("47+85=", "<think>7+5=12,4+8+1=14</think><answer>142</answer>", "column"),
        ("47+85=", "<think>7+6=13,4+8+1=13</think><answer>133</answer>", "column"),
        ("47+85=", "<think>5+7=12,4+8+1=13</think><answer>132</answer>", "column"),
        ("47+85=", "<think>7+5=12,4+8+1=13</think><answer>131</answer>", "column"),
        ("47+85=", "<think>7+5=12,4+8+1=13<answer><answer>132</answer>", "form"),
        ("47+85=", "<think>7+5=12,4+8+1=13</think><answer>132", "form"),
        ("47+85=", "", "form"),
        ("47+85=", "<think><answer></answer>", "form"),
    ],
)
def test_error_kind(prompt, completion, kind):
    assert error_kind(prompt, completion) == kind
