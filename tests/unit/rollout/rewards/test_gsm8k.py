"""GSM8K's rewards, held against every reference answer of its test set and against wrong numbers near them."""

import json
import re

import pytest

from rollout.data.rows import final_answer
from rollout.rewards.base import RewardResult
from rollout.rewards.gsm8k import TAIL_CHARS, gsm8k, gsm8k_flexible
from rollout.types import Prompt
from tests.support.paths import GSM8K


def ask(ground_truth: str) -> Prompt:
    return Prompt(ordinal=0, text="", token_ids=(), ground_truth=ground_truth)


def perturbed(truth: str) -> set[str]:
    """Numbers that are not `truth`: one more or less, the other sign, two neighbouring digits swapped, a digit more,
    less or other, a fraction."""
    number = int(truth)
    swaps = {truth[:i] + truth[i + 1] + truth[i] + truth[i + 2 :] for i in range(len(truth) - 1)}
    others = {f"{number + 1}", f"{number - 1}", f"{-number}", f"{truth}0", f"{truth}.5", f"1{truth.lstrip('-')}"}
    others |= {truth[:-1] + str((int(truth[-1]) + 5) % 10), truth[:-1]}
    return {wrong for wrong in others | swaps if re.fullmatch(r"-?[0-9]+(\.5)?", wrong) and float(wrong) != number}


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"no {GSM8K}")
def test_every_reference_answer_is_right_and_every_perturbed_one_wrong() -> None:
    lines = (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1319
    num_perturbed = 0
    for answer in (json.loads(line)["answer"] for line in lines):
        truth = final_answer(answer)
        worked, _, _ = answer.rpartition("####")
        assert gsm8k(ask(truth), answer).reward == 1.0, answer
        assert gsm8k_flexible(ask(truth), answer).reward == 1.0, answer
        assert gsm8k(ask(truth), f"{worked}{truth}").reward == 0.0, "without the mark"
        assert gsm8k_flexible(ask(truth), f"{worked}So it is {truth}.").reward == 1.0, answer
        for wrong in perturbed(truth):
            num_perturbed += 1
            assert gsm8k(ask(truth), f"{worked}#### {wrong}").reward == 0.0, (answer, wrong)
            assert gsm8k_flexible(ask(truth), f"{worked}So it is {wrong}.").reward == 0.0, (answer, wrong)
    assert num_perturbed > 7 * 1319


@pytest.mark.parametrize(
    ("ground_truth", "text", "answer", "is_right"),
    [
        ("1234", "so #### 1,234", "1234", True),
        ("1,234", "#### 1234", "1234", True),
        ("18", "#### $18", "18", True),
        ("18", "####18", "18", True),
        ("18", "#### 18.00", "18", True),
        ("18", "#### 18.", "18", True),
        ("2.5", "#### 2.50", "2.5", True),
        ("100", "#### 100", "100", True),
        ("-3", "#### -3", "-3", True),
        ("7", "#### 6\nNo, wait.\n#### 7", "7", True),
        ("7", "#### 7\n\nThat is 7 apples.", "7", True),
        ("7", "#### 7\n#### 8", "8", False),
        ("3", "#### -3", "-3", False),
        ("100", "#### 1", "1", False),
        ("1", "#### 100", "100", False),
        ("25", "#### 2.5", "2.5", False),
        ("5", "#### +5", "5", True),
        ("5", "#### **5**", "5", True),
        ("-18", "#### -$18", "-18", True),
        ("-18", "#### $-18", "-18", True),
        ("18", "#### -$18", "-18", False),
        ("18", "#### \\$18", "18", True),
        ("5", "#### \\boxed{5}", "5", True),
        ("-5", "#### $\\boxed{-5}$", "-5", True),
        ("5", "#### \\(5\\)", "5", True),
        ("5", "####**5**", "5", True),
        ("-3", "#### \N{MINUS SIGN}3", "-3", True),
        ("1234", "#### **$1,234.00**", "1234", True),
        ("+5", "#### 5", "5", True),
    ],
)
def test_the_strict_form_takes_the_last_marked_number(
    ground_truth: str, text: str, answer: str, is_right: bool
) -> None:
    expected = RewardResult(reward=is_right, accuracy=is_right, answer=answer, metrics={"format": 1.0})
    assert gsm8k(ask(ground_truth), text) == expected


@pytest.mark.parametrize(
    "text", ["", "7", "The answer is 7.", "### 7", "#### seven", "####", "7 ####", "#### x7", "#### n=7"]
)
def test_a_number_without_the_mark_is_no_answer(text: str) -> None:
    assert gsm8k(ask("7"), text) == RewardResult(reward=0.0, accuracy=0.0, metrics={"format": 0.0})


def test_only_the_end_of_a_response_is_an_answer() -> None:
    answer = "#### 7"
    assert gsm8k(ask("7"), answer + "x" * (TAIL_CHARS - len(answer))).reward == 1.0
    assert gsm8k(ask("7"), answer + "x" * TAIL_CHARS).reward == 0.0


@pytest.mark.parametrize("number", ["-5", "1,234", "-$12.5", "10-7"])
def test_a_number_at_the_border_of_the_end_is_read_as_a_whole(number: str) -> None:
    """Half of it would be another number, which may be the right one."""
    whole = gsm8k_flexible(ask("0"), number).answer
    assert gsm8k_flexible(ask("0"), f"{number}{'-' * TAIL_CHARS}").answer is None
    for inside in range(1, len(number)):
        assert gsm8k_flexible(ask("0"), f"{number}{'x' * (TAIL_CHARS - inside)}").answer == whole


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7.", "7"),
        ("She has 12, then 1,234 eggs", "1234"),
        ("so 10-3 = 7", "7"),
        ("10-3", "3"),  # a minus between numbers is an operator
        ("it fell to -3 degrees", "-3"),
        ("$18", "18"),
        ("it costs -$18.", "-18"),
        ("$20-$18", "18"),
        ("it fell to \N{MINUS SIGN}3", "-3"),
        ("+5", "5"),
        ("2.50 dollars.", "2.5"),
        ("答案是18", "18"),
        ("答案是-18。", "-18"),
        ("_18_", "18"),
        ("USD18", "18"),
        ("so...18", "18"),
        ("it is .50", "0.5"),
        ("x2 and v1.5", "1.5"),
        ("seven", None),
    ],
)
def test_the_flexible_form_takes_the_last_number(text: str, answer: str | None) -> None:
    assert gsm8k_flexible(ask("0"), text).answer == answer


def as_verl(text: str, ground_truth: str, *, flexible: bool) -> float:
    """Score as verl's utils/reward_score/gsm8k.py does."""
    matches = re.findall(r"(-?[0-9.,]+)" if flexible else r"#### (-?[0-9.,]+)", text[-300:])
    numbers = [number for number in matches if number != "."] if flexible else [n.replace(",", "") for n in matches]
    return float(bool(numbers) and numbers[-1] == ground_truth)


@pytest.mark.parametrize(
    ("text", "ground_truth", "verl", "here"),
    [  # (strict, flexible)
        ("#### 18", "18", (1, 1), (1, 1)),
        ("#### 1,800", "1800", (1, 0), (1, 1)),
        ("#### -3", "-3", (1, 1), (1, 1)),
        ("x18", "18", (0, 1), (0, 1)),
        ("####18", "18", (0, 1), (1, 1)),
        ("#### $18", "18", (0, 1), (1, 1)),
        ("#### 18.", "18", (0, 0), (1, 1)),
        ("#### 18.00", "18", (0, 0), (1, 1)),
        ("#### 1800", "1,800", (0, 0), (1, 1)),
        ("#### +5", "5", (0, 1), (1, 1)),
        ("#### **5**", "5", (0, 1), (1, 1)),
        ("#### \\boxed{5}", "5", (0, 1), (1, 1)),
        ("#### -$18", "-18", (0, 0), (1, 1)),
        ("#### -$18", "18", (0, 1), (0, 0)),
        ("10-3", "-3", (0, 1), (0, 0)),
        ("18 or 19", "18", (0, 0), (0, 0)),
    ],
)
def test_the_differences_from_verl_are_those_that_are_stated(
    text: str, ground_truth: str, verl: tuple[int, int], here: tuple[int, int]
) -> None:
    assert tuple(as_verl(text, ground_truth, flexible=flexible) for flexible in (False, True)) == verl
    assert tuple(rule(ask(ground_truth), text).reward for rule in (gsm8k, gsm8k_flexible)) == here
