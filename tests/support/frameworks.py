"""Agents of two frameworks that nobody here wrote, as users of `rollout.agent` write them."""

import operator
from collections.abc import Awaitable, Callable
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.models.interface import Model
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModelSettings
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from rollout.sessions.harness import HarnessTask

AgentFunction = Callable[[HarnessTask, AsyncOpenAI], Awaitable[float]]
APIS = ("chat", "responses", "kept")
"""Chat completions; Responses with the whole history in every request; Responses with `previous_response_id`."""
UNTRACED = RunConfig(tracing_disabled=True)
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
