"""The example harness: its calculator computes and nothing else, and what it asks and hears is one sequence."""

import asyncio
import json

import pytest

from rollout.chat.messages import ToolCall
from rollout.environments.solver import TOOLBOX, calculator
from rollout.sessions.harness import FunctionHarness
from rollout.types import GenerationRequest
from tests.support.harnesses import Policy, run_one


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("34*27", "918"),
        (" 918 - 215", "703"),
        ("-(1+2)*3", "-9"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("0.5+0.5", "1"),
        ("99999*99999", "9999800001"),
    ],
)
def test_it_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "only numbers and + - * / ( ) are allowed, not 9 ** 9 ** 9"),
        ("__import__('os')", "not __import__('os')"),
        ("True+1", "not True"),
        ("'a'*3", "not 'a'"),
        ("12+", "invalid syntax"),
        ("", "invalid syntax"),
        ("1e999", "not a finite number"),
        ("1" + "+1" * 99, "at most 100 characters"),
    ],
)
def test_what_is_no_arithmetic_is_an_error_for_the_policy_to_read(expression: str, error: str) -> None:
    call = ToolCall(call_id="call_0", name="calculator", arguments=json.dumps({"expression": expression}))
    result = asyncio.run(TOOLBOX.result(call))
    assert result.is_error and error in result.text


def test_the_harness_runs_the_calls_until_an_answer_has_none() -> None:
    def say(heard: str, request: GenerationRequest) -> str:
        expression = {0: "6*7", 1: "42+"}.get(request.request_id.turn)
        if expression is None:
            return "#### 42"
        return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'

    policy = Policy(say)
    episode = asyncio.run(run_one(FunctionHarness("rollout.environments.solver:agent"), policy))
    (sequence,) = episode.sequences
    text = policy.tokenizer.decode(list(sequence.response_ids))
    assert episode.result is None, "rollout.reward scores it"
    told = ("<tool_call>", "42\n</tool_response>", "Error: SyntaxError", "#### 42")
    assert [text.count(part) for part in told] == [2, 1, 1, 1]
    assert '"name": "calculator"' in policy.tokenizer.decode(list(policy.prompts[0]))
