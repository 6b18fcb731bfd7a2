"""DAPO's `Answer:` rule, with the values that verl's math_dapo gives, and its penalty for overlong responses."""

import pytest

from rollout.rewards.base import RewardResult
from rollout.rewards.dapo import BOXED_TAIL_CHARS, TAIL_CHARS, dapo, extract_answer, normalize, overlong_penalty
from rollout.types import Prompt


def score(ground_truth: str, text: str) -> RewardResult:
    return dapo(Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth), text)


def test_right_is_one_and_wrong_is_minus_one() -> None:
    right = {"reward": 1.0, "accuracy": 1.0, "metrics": {"accuracy": 1.0, "format": 1.0}}
    wrong = {"reward": -1.0, "accuracy": 0.0, "metrics": {"accuracy": 0.0, "format": 1.0}}
    assert score("34", "So it is.\nAnswer: 34") == RewardResult(answer="34", **right)
    assert score("34", "So it is.\nAnswer: 35") == RewardResult(answer="35", **wrong)
    silent = {"accuracy": 0.0, "format": 0.0}
    assert score("34", "It is 34.") == RewardResult(reward=-1.0, accuracy=0.0, answer=None, metrics=silent)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 34", "34"),
        ("answer :  34  ", "34"),
        ("ANSWER:34\nThat is all.", "34"),
        ("Answer: 1\nNo.\nAnswer: 2", "2"),
        ("Answer: $34$", "34"),
        ("Answer: \\boxed{34}", "34"),
        ("Answer: $\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("Answer: x = 34", "34"),
        ("Answer: 34.", "34."),  # so verl has it: a full stop is part of the answer
        ("**Answer:** 34", "**34"),  # and bold text is too
        ("Answer: \\(34\\)", "\\(34\\)"),  # nor is the other mathematics
        ("Answer: 34.0", "34.0"),
        ("Answer: \\fbox{34}", "\\fbox{34}"),
        ("Answer:", None),
        ("The result is \\fbox{34}.", "34"),  # without `Answer:`, where verl reads nothing
        ("\\fbox{3} or \\boxed{4}", "4"),
        ("The result is \\boxed{34}.", "34"),
        ("\\boxed{1} or \\boxed{\\frac{3}{4}}", "\\frac{3}{4}"),
        ("\\boxed{34", None),
        ("34", None),
    ],
)
def test_what_is_read_as_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_an_answer_goes_before_a_box() -> None:
    assert extract_answer("Answer: 3\nor \\boxed{4}") == "3"


@pytest.mark.parametrize(("answer", "limit"), [("Answer: 7 ", TAIL_CHARS), ("\\boxed{7}", BOXED_TAIL_CHARS)])
def test_only_the_end_of_a_response_is_read(answer: str, limit: int) -> None:
    assert extract_answer(answer.ljust(limit, "x").replace("7 x", "7\nx")) == "7"
    assert extract_answer(answer + "x" * limit) is None


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("1,234", "1234"),
        ("1{,}234", "1234"),
        ("(1,2)", "(1,2)"),
        ("5 \\text{ cm}", "5"),
        ("5 cm", "5"),
        ("90^\\circ", "90"),
        ("45^{\\circ}", "45"),
        ("12 square inches", "12"),
        ("\\$18", "18"),
        ("about $34$ of them", "34"),
        ("the area is $x = 1{,}234$ \\text{ cm}", "1234"),
        ("\\frac12", "\\frac{1}{2}"),
        ("\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\sqrt2", "\\sqrt{2}"),
        ("\\sqrt{2}", "\\sqrt{2}"),
        ("\\text{Monday}", "Monday"),
        ("\\textbf{7}", "7"),
        ("\\overline{AB}", "AB"),
        ("$ x \\text{and} y $", "x,y"),
        ("-3", "-3"),
        ("0.5", "0.5"),
    ],
)
def test_answers_are_normalized(text: str, normal: str) -> None:
    assert normalize(text) == normal
    assert normalize(normal) == normal


def test_the_reference_is_normalized_too() -> None:
    assert score("1,234", "Answer: $1234$").reward == 1.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1), (107, -1)]
)
def test_the_overlong_penalty_is_linear_in_the_buffer(num_tokens: int, penalty: float) -> None:
    """DAPO's equation 13 with L_max = 100 and L_cache = 20."""
    assert overlong_penalty(num_tokens, 100, 20, 1.0) == pytest.approx(penalty)
    assert overlong_penalty(num_tokens, 100, 20, 0.5) == pytest.approx(penalty / 2)
    assert overlong_penalty(num_tokens, 100, 0, 1.0) == 0
