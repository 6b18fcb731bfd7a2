"""The problems for the calculator: right, distinct, repeatable, and sloppily answered as often as asked."""

import random
import re

import pytest

from rollout.data.arithmetic import Problem
from rollout.data.calculator import conversation, demonstrations, sloppy_answer, split_problems

PROBLEM = Problem(question="?", answer="34*27=918\n918-215=703\n703+100=803\n#### 803")
FLAWLESS = {"stop_early": 0.0, "slip": 0.0, "by_head": 0.0, "forget_marker": 0.0}


def read_question(question: str) -> int:
    """Works the problem out from its English alone."""
    first, *events, _ = question.split(". ")
    left, right = map(int, re.findall(r"\d+", first))
    total = left * right if re.search("boxes|days", first) else left + right
    for event in events:
        number = int(re.findall(r"\d+", event)[0])
        total += -number if re.search("sells|loses|gives away", event) else number
    return total


def test_worked_answers_are_right_line_by_line_and_agree_with_the_question():
    lengths: set[int] = set()
    for problem in split_problems(500, 0, seed=3)[0]:
        *steps, last = problem.answer.split("\n")
        carried = None
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right) >= 0
            assert carried is None or re.match(rf"{carried}[-+]\d", left)
            carried = int(right)
        assert last == f"#### {carried}" == f"#### {read_question(problem.question)}"
        lengths.add(len(steps))
    assert lengths == {2, 3, 4}


def test_train_and_val_share_no_question_and_the_seed_decides_them():
    train, val = split_problems(3000, 256, seed=0)
    assert (train, val) == split_problems(3000, 256, seed=0) != split_problems(3000, 256, seed=1)
    assert (len(train), len(val)) == (3000, 256)
    assert len({problem.question for problem in train + val}) == 3256


def test_a_conversation_calls_the_calculator_for_each_step_and_ends_with_the_answer():
    question, call, result, *_, answer = conversation("How many?", PROBLEM.answer)
    assert (question, answer) == (
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "#### 803"},
    )
    assert call["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "34*27"}}
    assert result == {"role": "tool", "content": "918"}
    assert [message["role"] for message in conversation("?", "#### 5")] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("faults", "answer"),
    [
        ({}, PROBLEM.answer),
        ({"stop_early": 1.0}, "34*27=918\n918-215=703\n#### 703"),
        ({"forget_marker": 1.0}, PROBLEM.answer.replace("#### ", "")),
    ],
)
def test_each_fault_alone(faults: dict[str, float], answer: str):
    assert sloppy_answer(PROBLEM, random.Random(0), **(FLAWLESS | faults)) == answer


def test_a_slip_is_carried_on_and_a_guess_calls_nothing():
    rng = random.Random(0)
    for _ in range(50):
        *steps, last = sloppy_answer(PROBLEM, rng, **(FLAWLESS | {"slip": 1.0})).split("\n")
        assert len(steps) == 3 and last == f"#### {steps[-1].split('=')[1]}" != "#### 803"
        assert all(eval(step.replace("=", "==")) for step in steps), "the calculator itself is never wrong"
        assert re.fullmatch(r"#### \d+", sloppy_answer(PROBLEM, rng, **(FLAWLESS | {"by_head": 1.0})))


def test_demonstrations_are_right_first_then_sloppy():
    train, _ = split_problems(100, 0, seed=0)
    answers = {problem.question: problem.answer.rpartition("\n")[2] for problem in train}
    conversations = demonstrations(train, num_clean=200, num_sloppy=300, seed=5)
    assert conversations == demonstrations(train, num_clean=200, num_sloppy=300, seed=5)
    right = [answers[messages[0]["content"]] == messages[-1]["content"] for messages in conversations]
    assert all(right[:200]) and 0.1 < sum(right[200:]) / 300 < 0.6
