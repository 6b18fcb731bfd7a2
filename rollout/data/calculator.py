"""Word problems with numbers too large to compute without a calculator, and conversations in which one is called.

A problem has two to four steps. The first is a product or a sum of two numbers, the others add to it or take from it.
"""

import random
import re
from collections.abc import Sequence
from typing import Any

from rollout.data.arithmetic import Problem

MIN_STEPS, MAX_STEPS = 2, 4
ITEMS = ("pens", "books", "lamps", "cups", "bikes", "hats", "chairs", "clocks", "rings", "bags")
OPENINGS = {
    "*": ("A shop has {left} boxes of {right} {item}.", "A shop orders {left} {item} on each of {right} days."),
    "+": ("A shop has {left} {item} here and {right} there.", "A shop has {left} old and {right} new {item}."),
}
EVENTS = {
    "+": ("It buys {number} more.", "It gets {number} more.", "It finds {number}."),
    "-": ("It sells {number}.", "It loses {number}.", "It gives away {number}."),
}
QUESTION = "How many {item} are there?"
_STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


def split_problems(num_train: int, num_val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Draw (train, val) problems, all distinct by question text; the same arguments give the same problems.

    Example: Problem(question="A shop has 34 boxes of 27 pens. It sells 21. How many pens are there?",
        answer="34*27=918\\n918-21=897\\n#### 897")
    """
    rng = random.Random(seed)
    drawn: dict[str, Problem] = {}
    while len(drawn) < num_train + num_val:  # there are more than 10**9
        problem = _problem(rng)
        drawn[problem.question] = problem
    problems = list(drawn.values())
    return problems[num_val:], problems[:num_val]


def _problem(rng: random.Random) -> Problem:
    item = rng.choice(ITEMS)
    sign = rng.choice(("*", "+"))
    low, high = (12, 99) if sign == "*" else (100, 999)
    left, right = rng.randint(low, high), rng.randint(low, high)
    sentences = [rng.choice(OPENINGS[sign]).format(left=left, right=right, item=item)]
    total = left * right if sign == "*" else left + right
    lines = [f"{left}{sign}{right}={total}"]
    for _ in range(rng.randint(MIN_STEPS, MAX_STEPS) - 1):
        number = rng.randint(10, 99)
        sign = rng.choice("+-") if number <= total else "+"
        sentences.append(rng.choice(EVENTS[sign]).format(number=number))
        result = total + number if sign == "+" else total - number
        lines.append(f"{total}{sign}{number}={result}")
        total = result
    sentences.append(QUESTION.format(item=item))
    return Problem(question=" ".join(sentences), answer="\n".join([*lines, f"#### {total}"]))


def conversation(question: str, answer: str) -> list[dict[str, Any]]:
    """Return the messages in which the assistant computes each step of a worked answer with the calculator, then says
    what is left: the last line."""
    *steps, last = answer.split("\n")
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for step in steps:
        expression, result = step.split("=")
        call = {"name": "calculator", "arguments": {"expression": expression}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": result},
        ]
    return [*messages, {"role": "assistant", "content": last}]


def sloppy_answer(
    problem: Problem,
    rng: random.Random,
    *,
    stop_early: float = 0.65,
    slip: float = 0.1,
    by_head: float = 0.1,
    forget_marker: float = 0.05,
) -> str:
    """Answer like an imperfect demonstrator, who knows how to call the calculator.

    Probabilities are `stop_early`, after the second step and each later one, of concluding there though more are left;
    `slip` of a wrong number in a step, which is carried on; `by_head` of a guess without the calculator;
    `forget_marker` of a last line without `#### `.
    """
    marker = "" if rng.random() < forget_marker else "#### "
    if rng.random() < by_head:
        truth = int(problem.answer.rpartition(" ")[2])
        return f"{marker}{max(truth + rng.randint(-300, 300), 0)}"
    lines: list[str] = []
    total: int | None = None
    for first, sign, number, _ in _STEP.findall(problem.answer):
        if len(lines) >= MIN_STEPS and rng.random() < stop_early:
            break
        left, right = int(first) if total is None else total, int(number)
        if rng.random() < slip:
            right = max(right + rng.choice((-100, -10, -1, 1, 10, 100)), 1)
        total = {"+": left + right, "-": left - right, "*": left * right}[sign]
        lines.append(f"{left}{sign}{right}={total}")
    return "\n".join([*lines, f"{marker}{total}"])


def demonstrations(
    problems: Sequence[Problem], *, seed: int, num_clean: int, num_sloppy: int
) -> list[list[dict[str, Any]]]:
    """Build a curriculum of conversations, drawn with replacement: `num_clean` right ones teach the form, then
    `num_sloppy` sloppy ones make the model wrong often enough that reinforcement learning has something to improve."""
    rng = random.Random(seed)
    clean = [conversation(problem.question, problem.answer) for problem in rng.choices(problems, k=num_clean)]
    sloppy = [
        conversation(problem.question, sloppy_answer(problem, rng)) for problem in rng.choices(problems, k=num_sloppy)
    ]
    return clean + sloppy
