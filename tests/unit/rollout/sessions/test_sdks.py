"""Sessions as the clients of OpenAI and of Anthropic see them: their own libraries, over a real server."""

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from rollout.chat.messages import Finish, Message, Role, ToolCall, ToolSpec
from rollout.sessions.errors import SessionLimitError
from tests.support.sessions import PROMPT_IDS, FakeSessions, World, call_answer, make_answer, on_server

MODEL = "any-name"
USER: Any = {"role": "user", "content": "2 + 2?"}
SCHEMA: Any = {"type": "object", "properties": {"expression": {"type": "string"}}}
CALCULATOR = ToolSpec(name="calculator", description="Computes.", parameters=SCHEMA)
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "calculator", "description": "Computes.", "parameters": SCHEMA},
}
ANTHROPIC_TOOL: Any = {"name": "calculator", "description": "Computes.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {
    "type": "function",
    "name": "calculator",
    "description": "Computes.",
    "parameters": SCHEMA,
    "strict": None,
}


@asynccontextmanager
async def openai_client(world: World, session: str = "a", *, key: str | None = None, **more: Any):
    url = f"{world.url}/sessions/{session}"
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    key = world.keys.issue(session) if key is None else key
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http, max_retries=0, **more) as client:
        yield client


@asynccontextmanager
async def anthropic_client(world: World, session: str = "a", *, key: str | None = None):
    url = f"{world.url}/sessions/{session}"
    http = anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    key = world.keys.issue(session) if key is None else key
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http, max_retries=0) as client:
        yield client


def calls_then_text(sessions: FakeSessions) -> None:
    thought = make_answer("", number=0, reasoning="sum it", finish=Finish.tool_calls, tool_calls=tool_calls(0))
    sessions.script += [[thought], [make_answer("four", number=1)]]


def tool_calls(number: int) -> tuple[ToolCall, ...]:
    return call_answer(number).message.tool_calls


# -- chat completions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@on_server()
async def test_chat_calls_a_tool_and_sends_its_result_back(world: World, is_stream: bool) -> None:
    calls_then_text(world.sessions)
    history: list[Any] = [USER]
    async with openai_client(world) as client:
        fields: Any = {"model": MODEL, "messages": history, "tools": [CHAT_TOOL]}
        if is_stream:
            async with client.chat.completions.stream(stream_options={"include_usage": True}, **fields) as stream:
                first: Any = await stream.get_final_completion()
        else:
            first = await client.chat.completions.create(**fields)
        message = first.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert (first.id, first.model, first.choices[0].finish_reason) == ("chatcmpl-g_0", MODEL, "tool_calls")
        assert (call.id, json.loads(call.function.arguments)) == ("call_0_0", {"expression": "2 + 2"})
        assert first.usage is not None and first.usage.prompt_tokens == 3 and first.usage.completion_tokens == 2
        history += [message.model_dump(), {"role": "tool", "tool_call_id": "call_0_0", "content": "4"}]
        last = await client.chat.completions.create(**fields)
    assert last.choices[0].message.content == "four"
    first_asked, second_asked = world.sessions.requests
    assert first_asked.messages == (Message(role=Role.user, content="2 + 2?"),)
    assert first_asked.tools == second_asked.tools == (CALCULATOR,)
    assert second_asked.messages[1:] == (
        Message(role=Role.assistant, reasoning="sum it", tool_calls=tool_calls(0)),
        Message(role=Role.tool, content="4", call_id="call_0_0"),
    )


@on_server()
async def test_chat_gives_several_answers_with_token_ids_and_logprobs_and_counts_the_prompt_once(world: World) -> None:
    async with openai_client(world) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[USER],
            n=2,
            logprobs=True,
            temperature=0.3,
            stop="\n",
            max_tokens=9,
            extra_body={"return_token_ids": True},
        )
    assert [choice.model_extra for choice in answer.choices] == [
        {"token_ids": [11, 12], "answer_id": "g_0"},
        {"token_ids": [11, 12], "answer_id": "g_1"},
    ]
    assert (answer.model_extra or {})["prompt_token_ids"] == list(PROMPT_IDS)
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(each.token, each.logprob) for each in logprobs.content] == [
        ("token_id:11", -0.5),
        ("token_id:12", -0.25),
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    (received,) = world.sessions.requests
    assert (received.num_answers, received.stop, received.max_tokens, received.sampling) == (
        2,
        ("\n",),
        9,
        {"temperature": 0.3},
    )
    assert world.sessions.events[-1] == ("delivered", "a", ["g_0", "g_1"], True)


@on_server()
async def test_a_prompt_of_text_or_ids_is_completed(world: World) -> None:
    async with openai_client(world) as client:
        whole = await client.completions.create(model=MODEL, prompt="2 + 2 =", logprobs=0)
        stream = await client.completions.create(
            model=MODEL, prompt=[1, 2], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert (whole.id, whole.choices[0].text, whole.choices[0].finish_reason) == ("cmpl-g_0", "four", "stop")
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.token_logprobs == [-0.5, -0.25]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "four"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
    assert [received.prompt for received in world.sessions.requests] == ["2 + 2 =", (1, 2)]


# -- Anthropic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@on_server()
async def test_anthropic_messages_calls_a_tool_and_sends_its_result_back(world: World, is_stream: bool) -> None:
    calls_then_text(world.sessions)
    fields: Any = {"model": MODEL, "max_tokens": 64, "system": "Be short.", "tools": [ANTHROPIC_TOOL]}
    async with anthropic_client(world) as client:
        if is_stream:
            async with client.messages.stream(messages=[USER], **fields) as stream:
                first = await stream.get_final_message()
        else:
            first = await client.messages.create(messages=[USER], **fields)
        assert [block.type for block in first.content] == ["thinking", "tool_use"]
        assert (first.id, first.stop_reason, first.usage.input_tokens) == ("msg_g_0", "tool_use", 3)
        assert first.usage.output_tokens == 2
        result: Any = {"type": "tool_result", "tool_use_id": "call_0_0", "content": "4"}
        history: list[Any] = [USER, {"role": "assistant", "content": first.content}]
        history.append({"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
        last = await client.messages.create(messages=history, **fields)
    assert [block.model_dump()["text"] for block in last.content] == ["four"]
    assert last.stop_reason == "end_turn"
    assert world.sessions.requests[1].tools == (CALCULATOR,)
    assert world.sessions.requests[1].messages == (
        Message(role=Role.system, content="Be short."),
        Message(role=Role.user, content="2 + 2?"),
        Message(role=Role.assistant, reasoning="sum it", tool_calls=tool_calls(0), signature="g_0"),
        Message(role=Role.tool, content="4", call_id="call_0_0"),
        Message(role=Role.user, content="Well?"),
    )


@on_server()
async def test_anthropic_counts_tokens_lists_models_and_says_max_tokens_when_the_context_is_full(world: World) -> None:
    world.sessions.script.append([make_answer("", finish=Finish.length)])
    async with anthropic_client(world) as client:
        count = await client.messages.count_tokens(model=MODEL, messages=[USER], system="Be short.")
        models = await client.models.list()
        full = await client.messages.create(model=MODEL, max_tokens=20_000, messages=[USER])
    assert (count.input_tokens, [model.id for model in models.data]) == (5, ["policy"])
    assert (full.content, full.stop_reason) == ([], "max_tokens")
    assert world.sessions.requests[0].max_tokens == 20_000


# -- Responses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
@on_server()
async def test_responses_calls_a_tool_and_sends_its_result_back(world: World, is_stream: bool, is_kept: bool) -> None:
    """A client with `is_kept` sends only the result, and the id of the response that it belongs to."""
    calls_then_text(world.sessions)
    fields: Any = {"model": MODEL, "tools": [RESPONSES_TOOL], "instructions": "Be short."}
    async with openai_client(world) as client:
        if is_stream:
            async with client.responses.stream(input="2 + 2?", **fields) as stream:
                types = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert types[0] == "response.created" and types[-1] == "response.completed"
        else:
            first = await client.responses.create(input="2 + 2?", **fields)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        assert first.usage is not None and (first.usage.input_tokens, first.usage.output_tokens) == (3, 2)
        result: Any = {"type": "function_call_output", "call_id": "call_0_0", "output": "4"}
        if is_kept:
            last = await client.responses.create(input=[result], previous_response_id=first.id, **fields)
        else:
            echoed: Any = [item.model_dump() for item in first.output]
            last = await client.responses.create(input=[USER, *echoed, result], **fields)
    assert (last.output_text, last.status) == ("four", "completed")
    received = world.sessions.requests[1]
    system, *rest = received.messages
    assert (system, received.tools) == (Message(role=Role.system, content="Be short."), (CALCULATOR,))
    tool = Message(role=Role.tool, content="4", call_id="call_0_0")
    assert received.previous == ("g_0" if is_kept else None)
    called = Message(role=Role.assistant, reasoning="sum it", tool_calls=tool_calls(0), signature="g_0")
    assert rest == ([tool] if is_kept else [Message(role=Role.user, content="2 + 2?"), called, tool])


@on_server()
async def test_responses_that_are_cut_short_are_incomplete(world: World) -> None:
    world.sessions.script += [[make_answer("fo", finish=Finish.length)]] * 2
    async with openai_client(world) as client:
        whole = await client.responses.create(model=MODEL, input="2 + 2?")
        stream = await client.responses.create(model=MODEL, input="2 + 2?", stream=True)
        types = [event.type async for event in stream]
    assert (whole.status, whole.output_text, types[-1]) == ("incomplete", "fo", "response.incomplete")
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"


# -- errors and retries ------------------------------------------------------------------------------------------------


@on_server()
async def test_errors_are_the_exceptions_of_the_libraries(world: World) -> None:
    limit = SessionLimitError("64 turns", code="max_turns")
    world.sessions.script += [limit, limit]
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]}
    block: Any = {"role": "user", "content": [{"type": "image", "source": {}}]}
    async with openai_client(world) as client, openai_client(world, key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError, match="key of an open session"):
            await stranger.chat.completions.create(model=MODEL, messages=[USER])
        with pytest.raises(openai.BadRequestError, match=r'messages\[0\].content\[0\].type = .*"text"') as bad:
            await client.chat.completions.create(model=MODEL, messages=[image])
        assert bad.value.param == "messages[0].content[0].type"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
        assert denied.value.code == "max_turns"
    async with anthropic_client(world, "b") as client, anthropic_client(world, "b", key="wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await stranger.messages.create(model=MODEL, max_tokens=1, messages=[USER])
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await client.messages.create(model=MODEL, max_tokens=1, messages=[block])
        with pytest.raises(anthropic.PermissionDeniedError, match="max_turns"):
            await client.messages.create(model=MODEL, max_tokens=1, messages=[USER])


@on_server()
async def test_an_idempotency_key_that_was_seen_marks_a_retry_in_its_own_session_only(world: World) -> None:
    headers = {"Idempotency-Key": "job-1"}
    async with openai_client(world, "a") as client_a, openai_client(world, "b") as other:
        for client in (client_a, client_a, other):
            await client.chat.completions.create(model=MODEL, messages=[USER], extra_headers=headers)
    assert [received.is_retry for received in world.sessions.requests] == [False, True, False]


@pytest.mark.parametrize("dialect", ["chat", "anthropic", "responses"])
@on_server(keepalive_s=0.1)
async def test_a_stream_that_waits_is_kept_alive(world: World, dialect: str) -> None:
    """The answer takes longer than the client bears silence."""
    world.sessions.gate = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, world.sessions.gate.set)
    if dialect == "anthropic":
        async with anthropic_client(world) as client:
            quick = client.with_options(timeout=0.5)
            async with quick.messages.stream(model=MODEL, max_tokens=9, messages=[USER]) as stream:
                assert (await stream.get_final_text()) == "four"
        return
    async with openai_client(world, timeout=0.5) as client:
        if dialect == "chat":
            async with client.chat.completions.stream(model=MODEL, messages=[USER]) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "four"
        else:
            async with client.responses.stream(model=MODEL, input="2 + 2?") as stream:
                assert (await stream.get_final_response()).output_text == "four"


@on_server(keepalive_s=0.05)
async def test_an_error_in_a_stream_that_has_begun_is_an_exception_of_the_library(world: World) -> None:
    world.sessions.script += [SessionLimitError("an hour", code="wall_time")] * 3
    async with openai_client(world) as client:
        for begin in (
            lambda: client.chat.completions.create(model=MODEL, messages=[USER], stream=True),
            lambda: client.responses.create(model=MODEL, input="2 + 2?", stream=True),
        ):
            world.sessions.gate = asyncio.Event()
            stream: Any = await begin()  # returns with the first keepalive
            world.sessions.gate.set()
            with pytest.raises(openai.APIError, match="an hour"):
                _ = [event async for event in stream]
    async with anthropic_client(world, "b") as client:
        world.sessions.gate = asyncio.Event()
        stream = await client.messages.create(model=MODEL, max_tokens=9, messages=[USER], stream=True)
        world.sessions.gate.set()
        with pytest.raises(anthropic.APIStatusError, match="wall_time"):
            _ = [event async for event in stream]
