"""The reward of code problems: the program that a policy wrote passes tests that it never saw.

rollout.reward=rollout.environments.sandbox.hidden_tests:hidden_tests

A row has a column `tests`, a list or its JSON. Its items are:

- {"input": "2 3\\n", "output": "5\\n"}: what the program reads, and must write. A process per test.
- {"call": "add(2, 3)", "output": "5"}: an expression after the program, and what `repr` gives for its value. One
  process for all calls.
- {"code": "assert add(2, 3) == 5"}, or only the text, as in MBPP: statements after the program. One process for all.

What a program must write never enters its sandbox, except in tests of the last form. That is for measuring, not for
training: a program that looks for such tests in its own process can find them, and an `__eq__` that always says True
passes `assert f(1) == 2`.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from rollout.environments.sandbox.harbor import COLUMN as TASK
from rollout.environments.sandbox.sandbox import (
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    Limit,
    Outcome,
    Sandbox,
    SandboxFileError,
)
from rollout.environments.sandbox.sandboxes import sandboxes
from rollout.rewards.base import RewardResult
from rollout.types import Prompt

TESTS = "tests"
BLOCK = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
FILE = "/work/program.py"
MARKER_BYTES = 66
"""The size of two newlines and two markers, which stand around the value of a call."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test."""

    input: str | None = None
    call: str | None = None
    code: str | None = None
    output: str = ""


async def hidden_tests(prompt: Prompt, text: str) -> RewardResult:
    """Reward 1 where the program in a response passes all tests of its row, else 0. The program is the last block
    between ``` in the response, or else all of it.

    Metrics are the share of tests `passed`, and `limited`, which is 1 where a limit of the sandbox ended it. A row of a
    Harbor task has reward 0: its episode was cut off before its own tests could run.

    Raises ValueError for a row without tests, and what `Sandboxes.take` and `Sandbox.exec` raise.
    """
    if TASK in prompt.extra:
        return RewardResult(reward=0.0, accuracy=0.0, metrics={"passed": 0.0, "limited": 0.0})
    cases = read_cases(prompt.extra.get(TESTS))
    async with sandboxes().lent() as sandbox:
        passed, limit = await run_cases(sandbox, program_in(text), cases)
    is_right = float(passed == len(cases))
    metrics = {"passed": passed / len(cases), "limited": float(limit is not None)}
    return RewardResult(reward=is_right, accuracy=is_right, metrics=metrics)


def program_in(text: str) -> str:
    """Return the last block between ``` in a response, or else all of it."""
    blocks = BLOCK.findall(text)
    return blocks[-1] if blocks else text


def read_cases(tests: Any) -> list[Case]:
    """Read the tests of a row. Raises ValueError, which says what is wrong with them."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column {TESTS!r}: is a text, and not JSON: {error}") from error
    if not isinstance(tests, Sequence) or not tests:
        raise ValueError(f"column {TESTS!r}: must be a list of tests, at least one; the row has {tests!r:.80}")
    return [_case(test, number) for number, test in enumerate(tests, 1)]


def _case(test: Any, number: int) -> Case:
    match test:
        case str():
            return Case(code=test)
        case {"code": str(code)}:
            return Case(code=code)
        case {"call": str(call), "output": str(output)}:
            return Case(call=call, output=output)
        case {"input": str(read), "output": str(output)}:
            return Case(input=read, output=output)
    forms = '{"input", "output"}, {"call", "output"} or {"code"}, all of them texts'
    raise ValueError(f"column {TESTS!r}: test {number} must have {forms}; it is {test!r:.80}")


async def run_cases(
    sandbox: Sandbox, program: str, cases: Sequence[Case], python: Sequence[str] = ("python3",)
) -> tuple[int, Limit | None]:
    """Return how many tests pass, and the limit that ended them, after which all others fail. All of them together
    have sandbox.timeout_s. Raises SandboxLostError.

    Args:
        python: The interpreter and its options.
    """
    runner = _Runner(sandbox, program, tuple(python))
    passed = 0
    for count in (_calls, _codes, _inputs):
        try:
            more, limit = await count(runner, cases)
        except SandboxFileError:  # the program has left no room for the next test
            return passed, Limit.files
        passed += more
        if limit is not None:
            return passed, limit
    return passed, None


class _Runner:
    """Runs a program in a sandbox, as long as there is time."""

    def __init__(self, sandbox: Sandbox, program: str, python: tuple[str, ...]):
        self._sandbox, self.program, self._python = sandbox, program, python
        self._deadline = monotonic() + sandbox.config.timeout_s

    async def run(self, source: str, stdin: str = "", expected: Sequence[str] = ()) -> Outcome:
        """Run the source. `expected`: what it must write, of which enough is kept. Raises ValueError for more than can
        be kept."""
        size = sum(len(output.encode()) + MARKER_BYTES for output in expected)
        if size > MAX_FILE_BYTES:
            raise ValueError(f"column {TESTS!r}: a program must write {size} bytes, and {MAX_FILE_BYTES} can be kept")
        await self._sandbox.write_file(FILE, source.encode("utf-8", "replace"))
        left = max(0.05, self._deadline - monotonic())
        most = min(MAX_FILE_BYTES, MAX_OUTPUT_BYTES + 2 * size)  # it may print something besides
        argv = (*self._python, FILE)
        return await self._sandbox.exec(argv, stdin=stdin.encode("utf-8", "replace"), timeout_s=left, most=most)


async def _calls(runner: _Runner, cases: Sequence[Case]) -> tuple[int, Limit | None]:
    calls = [case for case in cases if case.call is not None]
    if not calls:
        return 0, None
    marker = secrets.token_hex(16)
    source = with_calls(runner.program, [case.call or "" for case in calls], marker)
    outcome = await runner.run(source, expected=[case.output for case in calls])
    passed = sum(case.output == value for case, value in zip(calls, values_of(outcome, marker), strict=False))
    return passed, outcome.limit


async def _codes(runner: _Runner, cases: Sequence[Case]) -> tuple[int, Limit | None]:
    codes = [case.code for case in cases if case.code is not None]
    if not codes:
        return 0, None
    marker = secrets.token_hex(16)  # a program that ends early, with exit code 0, has not passed
    outcome = await runner.run("\n".join([runner.program, *codes, f"print({marker!r})"]))
    is_through = outcome.is_success and outcome.stdout.decode(errors="replace").rstrip().endswith(marker)
    return len(codes) if is_through else 0, outcome.limit


async def _inputs(runner: _Runner, cases: Sequence[Case]) -> tuple[int, Limit | None]:
    passed = 0
    for case in cases:
        if case.input is not None:
            outcome = await runner.run(runner.program, case.input, [case.output])
            passed += outcome.is_success and _lines(outcome.stdout) == _lines(case.output.encode())
            if outcome.limit is not None:
                return passed, outcome.limit
    return passed, None


def with_calls(program: str, calls: Sequence[str], marker: str) -> str:
    """Return a program that also prints what the calls give, each from the beginning of a line between two markers. The
    program and the calls may print, too."""
    return "\n".join([program, *(f"print('\\n{marker}' + repr({call}) + '{marker}')" for call in calls)])


def values_of(outcome: Outcome, marker: str) -> list[str]:
    """Return what the calls gave, as far as the program came."""
    printed, mark = outcome.stdout.decode(errors="replace"), re.escape(marker)
    return re.findall(rf"^{mark}(.*?){mark}$", printed, re.MULTILINE | re.DOTALL)  # a repr may have several lines


def _lines(text: bytes) -> list[str]:
    """Return the lines of an output, without the space at their ends and the empty lines at its end."""
    return [line.rstrip() for line in text.decode(errors="replace").rstrip().splitlines()]
