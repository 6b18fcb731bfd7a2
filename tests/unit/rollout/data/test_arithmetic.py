"""The word problems: right, distinct, repeatable, and sloppily answered as often as asked."""

import random
import re

import pytest

from rollout.data.arithmetic import MAX_NUMBER, Problem, demonstrations, num_problems, sloppy_answer, split_problems

PROBLEM = Problem(question="Tom has 7 apples. Tom wins 2 more. Tom sells 4. How many?", answer="7+2=9\n9-4=5\n#### 5")


def marked_number(answer: str) -> int | None:
    match = re.search(r"#### (\d+)$", answer)
    return int(match[1]) if match else None


def read_question(question: str) -> int:
    """Works the problem out from its English alone."""
    total = 0
    for sentence in question.split(". "):
        for number in re.findall(r"\d+", sentence):
            takes_away = re.search(r"loses|gives away|sells|breaks", sentence)
            total += -int(number) if takes_away else int(number)
    return total


def test_worked_answers_are_right_line_by_line_and_agree_with_the_question():
    for problem in split_problems(500, 0, seed=3)[0]:
        *steps, last = problem.answer.split("\n")
        carried = None
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)
            assert carried is None or left.startswith(f"{carried}+") or left.startswith(f"{carried}-")
            carried = int(right)
        assert len(steps) == 2
        assert last == f"#### {carried}"
        assert carried == read_question(problem.question)
        assert carried is not None and carried >= 0
        assert all(1 <= int(number) <= MAX_NUMBER for number in re.findall(r"\d+", problem.question))


def test_train_and_val_are_distinct_by_question_and_the_seed_decides_them():
    train, val = split_problems(3000, 500, seed=0)
    assert (train, val) == split_problems(3000, 500, seed=0) != split_problems(3000, 500, seed=1)
    assert (len(train), len(val)) == (3000, 500)
    assert len({problem.question for problem in train + val}) == 3500


def test_every_kind_of_problem_is_drawn():
    questions = [problem.question for problem in split_problems(2000, 0, seed=0)[0]]
    for word in ("gives Ann", "breaks", "starts with", "picked", "left with Sue?", "marbles", " 1", " 9"):
        assert any(word in question for question in questions), word


def test_more_than_exist_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=rf"num_train=\d+ and num_val=1: .* at most {num_problems()}"):
        split_problems(num_problems(), 1, seed=0)


@pytest.mark.parametrize(
    ("faults", "answer"),
    [
        ({}, "7+2=9\n9-4=5\n#### 5"),
        ({"stop_early": 1.0}, "7+2=9\n#### 9"),
        ({"forget_marker": 1.0}, "7+2=9\n9-4=5\n5"),
    ],
)
def test_each_fault_alone(faults: dict[str, float], answer: str):
    flawless = {"stop_early": 0.0, "slip": 0.0, "forget_marker": 0.0}
    assert sloppy_answer(PROBLEM, random.Random(0), **(flawless | faults)) == answer


def test_a_slip_is_carried_on_and_stays_a_natural_number():
    low = Problem(question="", answer="1-1=0\n0+1=1\n#### 1")
    rng = random.Random(0)
    seen = {sloppy_answer(low, rng, stop_early=0.0, slip=1.0, forget_marker=0.0) for _ in range(200)}
    for answer in seen:
        first, second, last = answer.split("\n")
        assert second.startswith(first.split("=")[1] + "+1=")
        assert last == "#### " + second.split("=")[1]
        assert int(last.split()[1]) >= 0
    assert len(seen) > 4


def test_faults_come_as_often_as_asked():
    rng = random.Random(0)
    answers = [sloppy_answer(PROBLEM, rng, stop_early=0.4, slip=0.0, forget_marker=0.2) for _ in range(4000)]
    assert sum(answer.count("=") == 1 for answer in answers) / 4000 == pytest.approx(0.4, abs=0.04)
    assert sum(marked_number(answer) is None for answer in answers) / 4000 == pytest.approx(0.2, abs=0.04)
    usual = [marked_number(sloppy_answer(PROBLEM, rng)) == 5 for _ in range(4000)]
    assert 0.1 < sum(usual) / 4000 < 0.45


def test_demonstrations_are_clean_first_then_sloppy():
    train, _ = split_problems(100, 0, seed=0)
    worked = {problem.question: problem.answer for problem in train}
    pairs = demonstrations(train, num_clean=200, num_sloppy=300, seed=5)
    assert pairs == demonstrations(train, num_clean=200, num_sloppy=300, seed=5)
    right = [worked[question] == answer for question, answer in pairs]
    assert len(pairs) == 500
    assert all(right[:200])
    assert 0.1 < sum(right[200:]) / 300 < 0.5
