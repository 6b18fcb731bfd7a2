"""One-line programs with a fault: a test tells the repair, hidden tests judge it, and parts share no problem."""

import random
from typing import Any

import pytest

from rollout.data.code_world import FLAWLESS, Faults, demonstrations, episode, problems_of, rows
from rollout.data.sources import DataError

SIZES = {"test": 200, "train": 1000}


def value_of(line: str, call: str) -> Any:
    names: dict[str, Any] = {}
    exec(line, names)
    return eval(call, names)


def test_only_the_repair_passes_the_test_and_it_passes_the_hidden_tests() -> None:
    for problem in problems_of("train", SIZES, 0)[:300]:
        row = problem.row()
        test, hidden = row["test"], row["tests"]
        passing = [
            change.line
            for change in problem.broken.changes()
            if repr(value_of(change.line, test["call"])) == test["output"]
        ]
        assert passing == [row["answer"]]
        assert all(repr(value_of(row["answer"], each["call"])) == each["output"] for each in hidden)
        assert test["call"] not in [each["call"] for each in hidden] and len(hidden) == 3
        assert value_of(row["program"], test["call"]) != int(test["output"])
        assert row["data_source"] in ("operator", "number") and row["question"] == row["program"]


def test_parts_share_no_problem_and_a_part_is_the_same_whatever_follows_it() -> None:
    keys = {part: {(row["program"], str(row["test"])) for row in rows(part, sizes=SIZES)} for part in SIZES}
    assert [len(keys[part]) for part in SIZES] == [200, 1000] and not keys["test"] & keys["train"]
    assert rows("test", sizes=SIZES)[:50] != rows("test", sizes=SIZES, data_seed=1)[:50]
    assert rows("test", sizes={"test": 200}) == rows("test", sizes=SIZES)


def test_a_flawless_episode_runs_the_test_and_repairs_the_program() -> None:
    problem = problems_of("train", SIZES, 0)[0]
    question, run, report, repaired = episode(problem, random.Random(0), FLAWLESS)
    assert (question, run, repaired) == (problem.broken.line, " run", f" {problem.repaired.line}")
    wanted, was = problem.row()["test"]["output"], value_of(question, problem.call)
    assert report == f"\n{problem.call} is {was}, not {wanted}\n"


def test_sloppy_episodes_guess_and_slip_as_often_as_they_should() -> None:
    problem, rng = problems_of("train", SIZES, 0)[0], random.Random(0)
    episodes = [episode(problem, rng, Faults(guess=0.4, slip=0.5)) for _ in range(2000)]
    guessed = sum(len(texts) == 2 for texts in episodes) / 2000
    right = sum(texts[-1] == f" {problem.repaired.line}" for texts in episodes if len(texts) == 4)
    assert guessed == pytest.approx(0.4, abs=0.05)
    assert right / 2000 == pytest.approx(0.6 * (0.5 + 0.5 / 13), abs=0.05)


def test_demonstrations_are_flawless_first_and_of_the_training_problems_only() -> None:
    made = demonstrations(500, 0, sizes=SIZES)
    assert made == demonstrations(500, 0, sizes=SIZES) != demonstrations(500, 1, sizes=SIZES)
    assert all(len(texts) == 4 for texts in made[:400]) and any(len(texts) == 2 for texts in made[400:])
    train = {row["question"] for row in rows("train", sizes=SIZES)}
    assert {texts[0] for texts in made} <= train


@pytest.mark.parametrize(
    ("part", "sizes", "problem"),
    [("dev", SIZES, "has test, train"), ("train", {"train": 10**6}, "there are 52800 problems")],
)
def test_a_part_that_there_is_not_is_refused(part: str, sizes: dict[str, int], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows(part, sizes=sizes)
