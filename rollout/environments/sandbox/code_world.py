"""An example environment over sandboxes: a one-line program has a fault, and the policy repairs it.

A turn `run` runs the test of the program in a sandbox, and the policy reads what came out. Any other turn is
the repaired program, which hidden tests judge. The problems are those of rollout/data/code_world.py.

rollout.agent_loop=rollout.environments.sandbox.code_world:agent_loop
"""

from typing import Any

from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.environments.sandbox.hidden_tests import FILE, TESTS, read_cases, run_cases, values_of, with_calls
from rollout.environments.sandbox.sandbox import Sandbox
from rollout.environments.sandbox.sandboxes import sandbox_config, sandboxes
from rollout.types import Prompt

RUN = "run"
TEST = "test"
"""The column with the test that the policy may run."""
PYTHON = ("python3", "-I", "-S")
"""Starts in half the time, and the programs import nothing."""
MAX_LINE_CHARS = 200
MARKER = "value: "


def report(call: str, value: str, wanted: str) -> str:
    """Return what the policy reads of a test. Example: report("f(4)", "12", "7") == "\\nf(4) is 12, not 7\\n" """
    return f"\n{call} is {value}, not {wanted}\n"


class CodeWorld:
    """One episode. It takes a sandbox when something is to be run."""

    def __init__(self, prompt: Prompt):
        """Raises ValueError for a row of other data."""
        if TEST not in prompt.extra:
            raise ValueError(f"the row has no column {TEST!r}: set data.loader=rollout.data.code_world:rows")
        self._program, self._test = prompt.extra["program"], prompt.extra[TEST]
        self._cases = read_cases(prompt.extra.get(TESTS))
        self._sandbox: Sandbox | None = None

    async def step(self, turn: Turn, /) -> Step:
        sandbox = self._sandbox = self._sandbox or await sandboxes().take()
        text = turn.strip()
        if text == RUN:
            value = await self._tested(sandbox)
            observation = report(self._test["call"], value, self._test["output"])
            return Step(observation=observation, metrics={"passed": 0.0}, counts={"runs": 1.0})
        passed, _ = await run_cases(sandbox, text, self._cases, PYTHON)
        metrics = {"passed": passed / len(self._cases)}
        return Step(done=True, reward=float(passed == len(self._cases)), metrics=metrics, counts={"runs": 0.0})

    async def close(self) -> None:
        if self._sandbox is not None:
            sandboxes().give_back(self._sandbox)
            self._sandbox = None

    async def _tested(self, sandbox: Sandbox) -> str:
        """Return what the program's test gives, as one short line."""
        source = with_calls(self._program, [self._test["call"]], MARKER)
        await sandbox.write_file(FILE, source.encode())
        outcome = await sandbox.exec((*PYTHON, FILE))
        said = values_of(outcome, MARKER) or [outcome.text()]
        return (said[-1].splitlines() or [""])[-1][:MAX_LINE_CHARS]


def agent_loop(tokenizer: Any, *, max_turns: int = 3, max_turn_tokens: int | None = 32) -> MultiTurn:
    """Make the agent loop of rollout.agent_args."""
    config = sandbox_config()
    step_timeout_s = config.wait_timeout_s + config.start_timeout_s + config.timeout_s + 2 * config.answer_timeout_s
    return MultiTurn(
        CodeWorld, tokenizer, max_turns=max_turns, max_turn_tokens=max_turn_tokens, step_timeout_s=step_timeout_s
    )
