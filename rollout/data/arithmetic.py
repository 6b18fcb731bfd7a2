"""Grade-school word problems in GSM8K's format: nothing to download, and a tiny model learns them in minutes.

A problem is a *story* (a first number and `NUM_STEPS` additions or subtractions) in some *wording*. Both can be
enumerated, so every number below `num_problems()` is a problem, and distinct numbers are distinct problems.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

T = TypeVar("T")
NUM_STEPS = 2
MAX_NUMBER = 9

NAMES = ("Tom", "Ann", "Sam", "Mia", "Leo", "Eva", "Max", "Zoe", "Ben", "Amy", "Dan", "Kim", "Ian", "Joy", "Ned", "Sue")
ITEMS = ("apples", "pens", "books", "coins", "cards", "eggs", "shells", "stamps", "marbles", "cookies")
OPENINGS = ("{name} has {number} {item}.", "{name} starts with {number} {item}.", "{name} picked {number} {item}.")
QUESTIONS = ("How many {item} does {name} have now?", "How many {item} are left with {name}?")
EVENTS = {
    "+": (
        "{name} buys {number} more.",
        "{name} finds {number} more.",
        "A friend gives {name} {number} more.",
        "{name} wins {number} more.",
    ),
    "-": ("{name} loses {number}.", "{name} gives away {number}.", "{name} sells {number}.", "{name} breaks {number}."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Example: Problem(question="Tom has 7 apples. Tom buys 2 more. Tom sells 4. How many apples are left with Tom?",
    answer="7+2=9\\n9-4=5\\n#### 5")"""

    question: str
    """The story and its question, on one line."""
    answer: str
    """The worked steps, one per line, then `#### n`, which the reward reads."""


@cache
def _stories() -> list[tuple[int, ...]]:
    """Return all stories: the first number, and the signed number of each step. No total is ever below zero."""
    numbers = range(1, MAX_NUMBER + 1)
    stories: list[tuple[int, ...]] = [(number,) for number in numbers]
    for _ in range(NUM_STEPS):
        stories = [
            (*story, sign * number)
            for story in stories
            for sign in (1, -1)
            for number in numbers
            if sum(story) + sign * number >= 0
        ]
    return stories


def num_problems() -> int:
    wordings = len(NAMES) * len(ITEMS) * len(OPENINGS) * len(QUESTIONS) * len(EVENTS["+"]) ** NUM_STEPS
    return len(_stories()) * wordings


def _problem(index: int) -> Problem:
    """Build problem `index`, 0 <= index < num_problems(): its digits, in mixed radix, pick the story and the words."""

    def pick(choices: Sequence[T]) -> T:
        nonlocal index
        index, digit = divmod(index, len(choices))
        return choices[digit]

    total, *steps = pick(_stories())
    name, item, opening, question = pick(NAMES), pick(ITEMS), pick(OPENINGS), pick(QUESTIONS)
    sentences = [opening.format(name=name, number=total, item=item)]
    lines = []
    for step in steps:
        sentences.append(pick(EVENTS["+" if step > 0 else "-"]).format(name=name, number=abs(step)))
        lines.append(f"{total}{step:+}={total + step}")
        total += step
    sentences.append(question.format(name=name, item=item))
    return Problem(question=" ".join(sentences), answer="\n".join([*lines, f"#### {total}"]))


def split_problems(num_train: int, num_val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw (train, val) problems, all distinct by question text; the same arguments give the same problems. Raises
    ValueError when more are asked for than exist."""
    limit = num_problems()
    if num_train + num_val > limit:
        raise ValueError(f"num_train={num_train} and num_val={num_val}: there are at most {limit} distinct problems")
    drawn = [_problem(index) for index in random.Random(seed).sample(range(limit), num_train + num_val)]
    return drawn[num_val:], drawn[:num_val]


def sloppy_answer(
    problem: Problem, rng: random.Random, *, stop_early: float = 0.65, slip: float = 0.1, forget_marker: float = 0.1
) -> str:
    """Answer like an imperfect demonstrator, who knows the format but is often wrong. `stop_early`: probability of
    concluding after the first step; `slip`: of a result, at each step, that is off by 1 or 2 and is carried over to the
    next step; `forget_marker`: of a last line without `#### `."""
    steps = re.findall(r"(\d+)([+-]\d+)=", problem.answer)
    if rng.random() < stop_early:
        steps = steps[:1]
    total = int(steps[0][0])
    lines = []
    for _, step in steps:
        off_by = rng.choice((-2, -1, 1, 2)) if rng.random() < slip else 0
        result = max(total + int(step) + off_by, 0)
        lines.append(f"{total}{step}={result}")
        total = result
    marker = "" if rng.random() < forget_marker else "#### "
    return "\n".join([*lines, f"{marker}{total}"])


def demonstrations(
    problems: Sequence[Problem], *, seed: int, num_clean: int = 10_400, num_sloppy: int = 2_400
) -> list[tuple[str, str]]:
    """Build a curriculum of (question, answer) pairs, drawn with replacement: `num_clean` worked answers teach format
    and arithmetic, then `num_sloppy` sloppy ones make the model wrong often enough that reinforcement learning has
    something to improve."""
    rng = random.Random(seed)
    clean = [(problem.question, problem.answer) for problem in rng.choices(problems, k=num_clean)]
    sloppy = [(problem.question, sloppy_answer(problem, rng)) for problem in rng.choices(problems, k=num_sloppy)]
    return clean + sloppy
