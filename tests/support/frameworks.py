"""Agents of two frameworks that nobody here wrote, as users of `rollout.agent` write them."""

import json
import operator
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from agents.models.interface import Model
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import AgentRunResultEvent, PartDeltaEvent, PartStartEvent, Tool
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModelSettings
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from rollout.chat.messages import ToolCall
from rollout.environments.solver import TOOLBOX
from rollout.rewards.base import RewardResult
from rollout.sessions.harness import HarnessTask

AgentFunction = Callable[[HarnessTask, AsyncOpenAI], Awaitable[float]]
APIS = ("chat", "responses", "kept")
"""Chat completions; Responses with the whole history in every request; Responses with `previous_response_id`."""
UNTRACED = RunConfig(tracing_disabled=True)
(SPEC,) = TOOLBOX.specs()
BRIEF = "Use the calculator."
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: What to compute, such as 6 * 7.
    """
    left, sign, right = expression.split()
    return str(SIGNS[sign](int(left), int(right)))


def is_right(task: HarnessTask, said: str) -> float:
    return float(task.ground_truth in said)


# -- openai-agents -----------------------------------------------------------------------------------------------------


def openai_model(api: str, client: AsyncOpenAI) -> Model:
    model = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    return model(model="policy", openai_client=client)


def openai_solver(api: str, client: AsyncOpenAI) -> Agent[Any]:
    tools: list[Any] = [function_tool(calculator)]
    return Agent(name="Solver", instructions=BRIEF, model=openai_model(api, client), tools=tools)


async def openai_run(agent: Agent[Any], prompt: str, api: str, is_stream: bool) -> str:
    """The final answer. Raises AssertionError for a stream that streams nothing."""
    options: Any = {"run_config": UNTRACED, "auto_previous_response_id": api == "kept"}
    if not is_stream:
        return (await Runner.run(agent, prompt, **options)).final_output
    running = Runner.run_streamed(agent, prompt, **options)
    data: list[Any] = [event.data async for event in running.stream_events() if event.type == "raw_response_event"]
    assert "".join(each.delta for each in data if each.type == "response.output_text.delta") == running.final_output
    return running.final_output


def openai_agents(api: str, is_stream: bool) -> AgentFunction:
    async def agent(task: HarnessTask, client: AsyncOpenAI) -> float:
        return is_right(task, await openai_run(openai_solver(api, client), task.prompt, api, is_stream))

    return agent


def openai_handoff(api: str, is_stream: bool) -> AgentFunction:
    """One agent gives the conversation to another, which has other instructions and tools."""

    async def agent(task: HarnessTask, client: AsyncOpenAI) -> float:
        solver = openai_solver(api, client)
        first = Agent(name="First", instructions="Hand over.", model=openai_model(api, client), handoffs=[solver])
        return is_right(task, await openai_run(first, task.prompt, api, is_stream))

    return agent


def openai_sub_agents(api: str, is_stream: bool) -> AgentFunction:
    """One agent has another as its tool."""

    async def agent(task: HarnessTask, client: AsyncOpenAI) -> float:
        tool = openai_solver(api, client).as_tool("ask", "Asks a solver.", run_config=UNTRACED)
        boss = Agent(name="Boss", instructions="Delegate.", model=openai_model(api, client), tools=[tool])
        return is_right(task, await openai_run(boss, task.prompt, api, is_stream))

    return agent


# -- pydantic-ai -------------------------------------------------------------------------------------------------------


def pydantic_solver(api: str, client: AsyncOpenAI, instructions: str, *tools: Any) -> PydanticAgent[None, str]:
    provider = OpenAIProvider(openai_client=client)
    if api == "chat":
        return PydanticAgent(OpenAIChatModel("policy", provider=provider), instructions=instructions, tools=tools)
    settings = OpenAIResponsesModelSettings(openai_previous_response_id="auto") if api == "kept" else None
    model = PydanticResponsesModel("policy", provider=provider, settings=settings)
    return PydanticAgent(model, instructions=instructions, tools=tools)


async def pydantic_run(agent: PydanticAgent[None, str], prompt: str, is_stream: bool) -> str:
    """The final answer. Raises AssertionError for a stream that streams nothing."""
    if not is_stream:
        return (await agent.run(prompt)).output
    async with agent.run_stream(prompt) as running:
        text = [delta async for delta in running.stream_text(delta=True)]
        assert "".join(text) == await running.get_output()
    return "".join(text)


def pydantic_ai(api: str, is_stream: bool) -> AgentFunction:
    async def agent(task: HarnessTask, client: AsyncOpenAI) -> float:
        solver = pydantic_solver(api, client, BRIEF, calculator)
        return is_right(task, await pydantic_run(solver, task.prompt, is_stream))

    return agent


def pydantic_sub_agents(api: str, is_stream: bool) -> AgentFunction:
    """One agent runs another in its tool."""

    async def agent(task: HarnessTask, client: AsyncOpenAI) -> float:
        async def ask(input: str) -> str:
            """Asks a solver."""
            return await pydantic_run(pydantic_solver(api, client, BRIEF, calculator), input, is_stream)

        boss = pydantic_solver(api, client, "Delegate.", ask)
        return is_right(task, await pydantic_run(boss, task.prompt, is_stream))

    return agent


# -- in whole runs -----------------------------------------------------------------------------------------------------


async def both(task: HarnessTask, client: AsyncOpenAI) -> RewardResult:
    """An agent of either framework, by turns of the prompts, that streams and has the tool which the tiny chat model of
    `recipe=agent` was warmed up with. Every second episode of a group is rewarded, so that every step has a gradient.
    The metrics say how it went."""
    run = openai_streamed if task.ordinal % 2 else pydantic_streamed
    answer, num_calls, num_pieces = await run(task.prompt, client)
    metrics = {"tool_calls": float(num_calls), "streamed": float(num_pieces), "openai": float(task.ordinal % 2)}
    return RewardResult(reward=float(task.index % 2), metrics=metrics | {"right": is_right(task, answer)})


async def openai_streamed(prompt: str, client: AsyncOpenAI) -> tuple[str, int, int]:
    """The answer, how many tools were called, and in how many pieces texts came. Over Responses."""

    async def invoke(context: Any, arguments: str) -> str:
        return await TOOLBOX.call(ToolCall(call_id="", name=SPEC.name, arguments=arguments))

    tool = FunctionTool(
        name=SPEC.name,
        description=SPEC.description,
        params_json_schema=dict(SPEC.parameters),
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
    agent = Agent(name="Solver", model=openai_model("responses", client), tools=[tool])
    running = Runner.run_streamed(agent, prompt, run_config=UNTRACED)
    kinds: Counter[str] = Counter()
    async for event in running.stream_events():
        kinds[event.data.type if event.type == "raw_response_event" else getattr(event, "name", event.type)] += 1
    return running.final_output, kinds["tool_called"], kinds["response.output_text.delta"]


async def pydantic_streamed(prompt: str, client: AsyncOpenAI) -> tuple[str, int, int]:
    """Return the same as `openai_streamed`, over chat completions."""

    async def invoke(**arguments: Any) -> str:
        return await TOOLBOX.call(ToolCall(call_id="", name=SPEC.name, arguments=json.dumps(arguments)))

    tool = Tool.from_schema(invoke, SPEC.name, SPEC.description, dict(SPEC.parameters))
    agent = PydanticAgent(OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)), tools=[tool])
    kinds: Counter[str] = Counter()
    answer = ""
    async with agent.run_stream_events(prompt) as events:
        async for event in events:
            if isinstance(event, AgentRunResultEvent):
                answer = event.result.output
            is_text = isinstance(event, PartStartEvent | PartDeltaEvent)
            kinds["piece" if is_text else event.event_kind] += 1
    return answer, kinds["function_tool_call"], kinds["piece"]
