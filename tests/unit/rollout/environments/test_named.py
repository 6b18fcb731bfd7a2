"""Agent loops of environments and tools that the config names."""

import asyncio
from typing import Any

import pytest

from rollout.agents.encoding import encode
from rollout.agents.environment import Step
from rollout.agents.loop import EpisodeTask, load_agent_loop
from rollout.prompts import Row
from rollout.request_ids import RequestId
from rollout.types import Prompt, SamplingParams
from tests.support.episodes import episodes_of
from tests.support.harnesses import Policy

CALL = '<tool_call>\n{"name": "power", "arguments": {"base": 5, "exponent": 1}}\n</tool_call>'
ENVIRONMENT, TOOLS = "rollout.environments.named:environment", "rollout.environments.named:tools"


class Guess:
    def __init__(self, prompt: Prompt):
        self._answer = prompt.ground_truth

    async def step(self, text: str) -> Step:
        right = self._answer in text
        return Step(done=right, reward=float(right), observation="\nWrong. Again: ")


def episode(policy: Policy, loop: Any) -> Any:
    tools = loop.prompt_tools
    (prompt,) = encode(policy.tokenizer, [Row(question="5?", ground_truth="5")], "{question}", bool(tools), 999, tools)
    sampling = SamplingParams(max_tokens=200)
    task = EpisodeTask(request_id=RequestId(ordinal=5), prompt=prompt, index=0, sampling=sampling)
    (ended,) = asyncio.run(episodes_of(loop, [task], policy.generate))
    return ended


def test_an_environment_answers_until_it_is_done() -> None:
    policy = Policy(lambda text, _: "5" if "Wrong." in text else "4")
    loop = load_agent_loop(ENVIRONMENT, policy.tokenizer, {"environment": f"{__name__}:Guess", "max_turns": 3})
    ended = episode(policy, loop)
    assert ended.result is not None and ended.result.reward == 1 and ended.metrics["turns"] == 2


def test_tools_are_shown_and_called() -> None:
    policy = Policy(lambda text, _: CALL if '"power"' in text and "<tool_response>" not in text else "5")
    loop = load_agent_loop(TOOLS, policy.tokenizer, {"tools": ["tests.support.plain_tools:power"]})
    assert episode(policy, loop).metrics["tool_calls"] == 1


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
        load_agent_loop(loop, Policy(lambda text, _: "5").tokenizer, arguments)
