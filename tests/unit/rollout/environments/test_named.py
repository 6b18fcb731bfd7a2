"""Agent loops of environments and tools that the config names."""

from collections.abc import Callable
from typing import Any

import pytest

from rollout.agents.environment import Step
from rollout.agents.loop import Episode, load_agent_loop
from rollout.agents.multi_turn import MultiTurn
from rollout.types import Prompt
from tests.support.environments import TOKENIZER, call, play_row

ENVIRONMENT, TOOLS = "rollout.environments.named:environment", "rollout.environments.named:tools"


class Guess:
    def __init__(self, prompt: Prompt):
        self._answer = prompt.ground_truth

    async def step(self, text: str) -> Step:
        right = self._answer in text
        return Step(done=right, reward=float(right), observation="\nWrong. Again: ")


def played(path: str, args: dict[str, Any], say: Callable[[str], str]) -> Episode:
    loop = load_agent_loop(path, TOKENIZER, args)
    assert isinstance(loop, MultiTurn)
    return play_row(loop, say, question="5?", ground_truth="5")


def test_an_environment_answers_until_it_is_done() -> None:
    guesses = {"environment": f"{__name__}:Guess", "max_turns": 3}
    ended = played(ENVIRONMENT, guesses, lambda text: "5" if "Wrong." in text else "4")
    assert ended.result is not None and ended.result.reward == 1 and ended.metrics["turns"] == 2


def test_tools_are_shown_and_called() -> None:
    def say(text: str) -> str:
        return call("power", base=5, exponent=1) if '"power"' in text and "<tool_response>" not in text else "5"

    ended = played(TOOLS, {"tools": ["tests.support.plain_tools:power"]}, say)
    assert ended.metrics["tool_calls"] == 1


@pytest.mark.parametrize(
    ("loop", "arguments", "why"),
    [
        (
            ENVIRONMENT,
            {"environment": "tests.support.plain_tools:none"},
            "rollout.agent_args.environment=.* has no none",
        ),
        (TOOLS, {"tools": []}, r"rollout.agent_args.tools=\[\]: must name a function"),
        (TOOLS, {"tools": ["tests.support.plain_tools:CODE"]}, "has no CODE"),
    ],
)
def test_what_is_not_there_is_refused_by_its_key(loop: str, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load_agent_loop(loop, TOKENIZER, arguments)
