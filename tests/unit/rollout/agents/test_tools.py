"""Python functions as tools: what the policy is shown, what it may send, and what it reads."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.environment import Turn
from rollout.agents.tools import Tool, Toolbox, ToolEnvironment, ToolResult
from rollout.chat.messages import Message, Role, ToolCall


class Unit(Enum):
    celsius = "celsius"
    kelvin = "kelvin"


@dataclass
class Place:
    city: str
    height: float = 0.0


def weather(
    place: Place,
    days: int,
    unit: Unit = Unit.celsius,
    style: Literal["short", "long"] = "short",
    hours: Annotated[list[int] | None, "Only these."] = None,
    options: dict[str, bool] | None = None,
) -> str:
    """Forecast the weather.

    Of any place on earth.

    Args:
        place: Where.
        days: How many days
            ahead.

    Returns:
        A sentence.
    """
    return repr((place, days, unit, style, hours, options))


async def add(left: int, right: int = 1) -> int:
    """Add two numbers."""
    await asyncio.sleep(0)
    return left + right


def fail(text: str) -> str:
    raise OSError(text)


def sleep() -> None:
    threading.Event().wait(9)


def repeat(text: str, times: int) -> list[str]:
    return [text] * times


TOOLS = Toolbox([weather, add, fail, sleep, repeat], call_timeout_s=0.5, max_output_chars=300)


def call(name: str, arguments: str, toolbox: Toolbox = TOOLS) -> ToolResult:
    return asyncio.run(toolbox.result(ToolCall(call_id="call_0", name=name, arguments=arguments)))


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_a_schema_by_hand() -> None:
    spec = Tool.of(weather).spec
    assert (spec.name, spec.description) == ("weather", "Forecast the weather.\n\nOf any place on earth.")
    assert spec.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["place", "days"],
        "properties": {
            "place": {"$ref": "#/$defs/Place", "description": "Where."},
            "days": {"type": "integer", "description": "How many days\nahead."},
            "unit": {"$ref": "#/$defs/Unit", "default": "celsius"},
            "style": {"type": "string", "enum": ["short", "long"], "default": "short"},
            "hours": {
                "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                "description": "Only these.",
            },
            "options": {"anyOf": [{"type": "object", "additionalProperties": {"type": "boolean"}}, {"type": "null"}]},
        },
        "$defs": {
            "Place": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city"],
                "properties": {"city": {"type": "string"}, "height": {"type": "number", "default": 0.0}},
            },
            "Unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        },
    }
    assert json.loads(json.dumps(spec.parameters)) == spec.parameters
    assert [spec.name for spec in TOOLS.specs()] == ["weather", "add", "fail", "sleep", "repeat"]


def no_type(text) -> None: ...  # pyright: ignore[reportMissingParameterType]


def any_number(*values: int) -> None: ...


def of_a_lock(lock: threading.Lock) -> None: ...


def by_place(text: str, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (no_type, "tool no_type: parameter text has no type; annotate it, for example with int"),
        (any_number, r"tool any_number: parameter \*values: int cannot be given by name"),
        (by_place, "tool by_place: parameter text: str cannot be given by name"),
        (of_a_lock, "tool of_a_lock: has a parameter that no JSON schema describes"),
        (lambda: 1, "needs a name, which a def has"),
    ],
)
def test_what_is_no_tool_is_refused(function: Callable[..., Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Toolbox([function])


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two of them have one name"):
        Toolbox([add, add])


# -- calls -------------------------------------------------------------------------------------------------------------


def test_a_function_gets_the_types_it_asks_for() -> None:
    everything = '{"place": {"city": "Oslo"}, "days": 3, "unit": "kelvin", "hours": [6], "options": {"wind": true}}'
    assert call("weather", everything).text == repr((Place("Oslo"), 3, Unit.kelvin, "short", [6], {"wind": True})), (
        "a default stays"
    )


@given(st.integers(-(2**60), 2**60), st.none() | st.integers(-(2**60), 2**60))
def test_arguments_come_through_json(left: int, right: int | None) -> None:
    arguments = {"left": left} | ({} if right is None else {"right": right})
    assert call("add", json.dumps(arguments)) == ToolResult(text=str(left + (1 if right is None else right)))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("subtract", "{}", "no tool is named 'subtract'; there are: weather, add, fail, sleep, repeat"),
        ("add", '{"left": ', "the arguments of add are wrong: Invalid JSON: EOF while parsing"),
        ("add", "[1]", "the arguments of add are wrong: Input should be an object (given: [1])"),
        ("add", "", "the arguments of add are wrong: left: Field required"),
        ("add", '{"left": "x"}', "the arguments of add are wrong: left: Input should be a valid integer"),
        (
            "add",
            '{"left": 1, "up": 2}',
            "the arguments of add are wrong: up: Extra inputs are not permitted (given: 2)",
        ),
        ("weather", '{"place": {}, "days": 1}', "the arguments of weather are wrong: place.city: Field required"),
        ("fail", '{"text": "no disk"}', "OSError: no disk"),
        ("sleep", "{}", "TimeoutError: the tool sleep took longer than call_timeout_s=0.5"),
    ],
)
def test_what_goes_wrong_is_a_result(name: str, arguments: str, error: str) -> None:
    result = call(name, arguments)
    assert result.is_error and result.text.startswith(f"Error: {error}")


@pytest.mark.slow
@given(st.text(), st.text())
def test_no_call_raises(name: str, arguments: str) -> None:
    assert call(name, arguments).is_error
    assert call("add", arguments).is_error


def test_a_long_result_is_cut() -> None:
    result = call("repeat", '{"text": "ab", "times": 200}')
    assert result == ToolResult(text=('["ab"' + ',"ab"' * 200)[:300] + "\n[cut: 300 of 1001 characters]", is_cut=True)
    assert call("fail", json.dumps({"text": "x" * 400})).is_cut, "an error too"
    assert call("repeat", '{"text": "a", "times": 2}').text == '["a","a"]'


def test_what_no_file_takes_is_written_out() -> None:
    def surrogate() -> str:
        return "\ud800!"

    def stranger() -> object:
        return object()

    toolbox = Toolbox([surrogate, stranger])
    assert call("surrogate", "{}", toolbox).text == "\\ud800!"
    assert call("stranger", "{}", toolbox).text == (
        "Error: TypeError: stranger returned object, which is neither a text nor JSON"
    )


# -- the environment ---------------------------------------------------------------------------------------------------


def turn(*calls: ToolCall) -> Turn:
    return Turn.of("", message=Message(role=Role.assistant, tool_calls=calls))


def test_calls_of_one_turn_run_concurrently_and_are_answered_in_order() -> None:
    def slow(text: str) -> str:
        time.sleep(0.2)
        return text

    calls = [ToolCall(call_id=f"call_{i}", name="slow", arguments=f'{{"text": "{i}"}}') for i in range(4)]
    wrong = ToolCall(call_id="call_4", name="fast", arguments="")
    began = time.monotonic()
    step = asyncio.run(ToolEnvironment(Toolbox([slow])).step(turn(*calls, wrong)))
    assert time.monotonic() - began < 0.6
    assert [(message.role, message.content, message.call_id) for message in step.observation[:4]] == [  # pyright: ignore
        (Role.tool, str(i), f"call_{i}") for i in range(4)
    ]
    assert (step.done, step.reward) == (False, None)
    assert step.counts == {"tool_calls": 5, "tool_errors": 1, "cut_tool_results": 0}


def test_calls_of_one_turn_may_run_in_order() -> None:
    events: list[str] = []

    async def note(text: str) -> None:
        events.append(f"begin {text}")
        await asyncio.sleep(0)
        events.append(f"end {text}")

    calls = [ToolCall(call_id=text, name="note", arguments=f'{{"text": "{text}"}}') for text in "ab"]
    asyncio.run(ToolEnvironment(Toolbox([note]), in_order=True).step(turn(*calls)))
    assert events == ["begin a", "end a", "begin b", "end b"]


def test_without_a_parser_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"which needs MultiTurn\(chat=...\)"):
        asyncio.run(ToolEnvironment(TOOLS).step(Turn.of("add(1)")))
