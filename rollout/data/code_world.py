"""One-line programs with a fault, and episodes in which somebody runs their test and then repairs them.

data.loader=rollout.data.code_world:rows data.demonstrations=rollout.data.code_world:demonstrations

A program is a function of one number, such as `def f(n): return n*3`. Either its operator or its number is wrong. The
policy does not see what the function should do. It may run the program's test, which says what the function gave for
one number, and what was wanted; only one change of the program fits that. Hidden tests call the repaired function with
other numbers.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from rollout.data.sources import DataError, Record, part_of
from rollout.environments.sandbox.code_world import RUN, report

NAMES, VARIABLES = ("f", "g", "h", "fix", "calc"), ("x", "n", "k", "m")
NUMBERS = range(1, 13)
INPUTS = range(2, 10)
HIDDEN = 3
"""Calls of the hidden test."""
RIGHT_SHARE = 0.8
"""The share of the demonstrations that come first, which are all right."""
OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Example: Program(name="f", variable="n", operator="*", number=3).line == "def f(n): return n*3" """

    name: str
    variable: str
    operator: str
    number: int

    @property
    def line(self) -> str:
        return f"def {self.name}({self.variable}): return {self.variable}{self.operator}{self.number}"

    def __call__(self, value: int) -> int:
        return OPERATORS[self.operator](value, self.number)

    def changes(self) -> "Iterator[Program]":
        """Yield every program that differs in the operator or in the number."""
        yield from (replace(self, operator=other) for other in OPERATORS if other != self.operator)
        yield from (replace(self, number=other) for other in NUMBERS if other != self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A program with a fault, its repair, and the number that its test calls it with."""

    broken: Program
    repaired: Program
    tested: int
    hidden: tuple[int, ...]
    """The numbers of the hidden tests."""

    @property
    def call(self) -> str:
        return f"{self.broken.name}({self.tested})"

    @property
    def report(self) -> str:
        """Return what the policy reads when it runs the test."""
        return report(self.call, str(self.broken(self.tested)), str(self.repaired(self.tested)))

    def row(self) -> Record:
        return {
            "question": self.broken.line,
            "answer": self.repaired.line,
            "program": self.broken.line,
            "data_source": "operator" if self.broken.number == self.repaired.number else "number",
            "test": {"call": self.call, "output": str(self.repaired(self.tested))},
            "tests": [
                {"call": f"{self.broken.name}({value})", "output": str(self.repaired(value))} for value in self.hidden
            ],
        }


def rows(entries: str, *, sizes: Mapping[str, int], data_seed: int = 0) -> list[Record]:
    """Return the problems of one part, such as `train`. No two parts have a problem in common.

    Args:
        entries: data.train_files or data.val_files: the name of a part.
        sizes: problems of each part. They are drawn in this order, so that a part is the same whatever comes after it.
        data_seed: decides which problems they are.

    Raises:
        DataError: There is no such part, or there are fewer problems.
    """
    return [problem.row() for problem in problems_of(entries, sizes, data_seed)]


def problems_of(part: str, sizes: Mapping[str, int], data_seed: int) -> list[Problem]:
    """Return the problems of a part. Raises DataError."""
    places, every = part_of(part, sizes), list(_every())
    if sum(sizes.values()) > len(every):
        raise DataError(f"data.loader_args.sizes={dict(sizes)}: there are {len(every)} problems")
    random.Random(data_seed).shuffle(every)
    return [_problem(*every[place], random.Random(f"{data_seed}/{place}")) for place in places]


def _problem(broken: Program, repaired: Program, tested: int, rng: random.Random) -> Problem:
    others = [value for value in INPUTS if value != tested]
    return Problem(broken=broken, repaired=repaired, tested=tested, hidden=tuple(rng.sample(others, HIDDEN)))


@lru_cache(maxsize=1)
def _every() -> tuple[tuple[Program, Program, int], ...]:
    """Return every broken program with its repair and the number of its test, from which the repair follows."""
    return tuple(
        (broken, repaired, tested)
        for name, variable, operator, number in product(NAMES, VARIABLES, OPERATORS, NUMBERS)
        for broken in [Program(name=name, variable=variable, operator=operator, number=number)]
        for tested in INPUTS
        for repaired in broken.changes()
        if broken(tested) != repaired(tested) and min(repaired(tested), broken(tested)) >= 0
        if sum(other(tested) == repaired(tested) for other in broken.changes()) == 1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probabilities that a programmer errs."""

    guess: float = 0.6
    """The probability that no test is run, and any change is made."""
    slip: float = 0.35
    """The probability that another change is made than the test asks for."""


FLAWLESS = Faults(guess=0.0, slip=0.0)


def episode(problem: Problem, rng: random.Random, faults: Faults = FLAWLESS) -> tuple[str, ...]:
    """Return by turns what a programmer reads and writes.

    Example: ("def f(n): return n*3", " run", "\\nf(4) is 12, not 7\\n", " def f(n): return n+3")
    """
    question = problem.broken.line
    if rng.random() < faults.guess:
        return question, f" {rng.choice(list(problem.broken.changes())).line}"
    repaired = problem.repaired
    if rng.random() < faults.slip:
        repaired = rng.choice(list(problem.broken.changes()))
    return question, f" {RUN}", problem.report, f" {repaired.line}"


def demonstrations(num: int, seed: int, *, sizes: Mapping[str, int], data_seed: int = 0) -> list[tuple[str, ...]]:
    """Return `num` episodes over problems of the part `train`, drawn with replacement, for a tiny model's warm-up:
    first flawless ones, which teach to test and to repair, then sloppy ones, which leave something for reinforcement
    learning to improve. Raises as `rows` does."""
    problems: Sequence[Problem] = problems_of("train", sizes, data_seed)
    rng = random.Random(seed)
    drawn = rng.choices(problems, k=num)
    num_right = int(RIGHT_SHARE * num)
    return [episode(problem, rng, FLAWLESS if place < num_right else Faults()) for place, problem in enumerate(drawn)]
