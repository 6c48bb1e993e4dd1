r"""Form and scores: what is well formed, and that every part is in its place."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
from rewards import accuracy, format, score, tag_count

GOOD = "<think>\n6*7=42\n</think>\n<answer>42</answer>"
# A completion => its format and its tag count. Four blanks between two of these, ⏎ is a new line.
FORMS = """
<think>a</think><answer>5</answer> => 1 1    ⏎ <think>a</think>⏎⏎<answer>5</answer> ⏎ => 1 1
<think>a</think>⏎<answer>5</answer><|im_end|> => 1 1    <think> </think>⏎<answer>5</answer> => 1 1
<think>a</think>⏎<answer>5</answer><|endoftext|><|endoftext|>⏎ => 1 1
<think></think><answer></answer> => 0 1    <think>a</think><answer> ⏎</answer> => 0 1
<think>a</think> so <answer>5</answer> => 0 1    Sure! <think>a</think><answer>5</answer> => 0 1
<think>a</think><answer>5</answer> done => 0 1    <answer>5</answer><think>a</think> => 0 1
<think>a<answer>5</answer></think> => 0 1    <think>a<answer></think>5</answer> => 0 1
<think>a</think><answer>5 => 0 0.75    a</think><answer>5</answer> => 0 0.75
<think>a<answer>5</answer> => 0 0.75    <think>a</think>5</answer> => 0 0.75
<think>a</think> => 0 0.5    <answer>5</answer> => 0 0.5    no tags at all => 0 0
<think>a</think><answer>5</answer><answer>6</answer> => 0 0.5
<think>a</think><think>b</think>⏎<answer>5</answer><answer>6</answer> => 0 0
<Think>a</Think><Answer>5</Answer> => 0 0
"""


@pytest.mark.parametrize("case", re.split(r"\n| {4}", FORMS.strip()))
def test_format_and_tag_count(case):
    completion, _, worth = case.replace("⏎", "\n").partition(" => ")
    assert [format(completion), tag_count(completion)] == [*map(float, worth.split())]


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


PIECES = r"\boxed{ } { \frac #### 5 - , ( ) % $ . \pm x = _8 ^ \text{ and \cup [ < \infty \{ \}"
PIECES += r" \mathbb{R} \setminus | \approx ; & é"
PIECES = [*PIECES.split(), *rewards.TAGS, "answer is ", " ", "\n"]
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
