"""Sessions that are recorded: what the record holds, how a session ends, and whose request is whose."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from rollout.sessions.archive import SessionRecord
from rollout.sessions.errors import BadRequestError
from rollout.sessions.session import requested_sampling
from rollout.types import GenerationRequest, SamplingParams
from tests.support.archives import SERVER_TOKEN, Opened, Recorder, on_recorder, run_recorded
from tests.support.harnesses import Policy

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
TOOL: Any = {"name": "calculator", "description": "Computes.", "parameters": {"type": "object"}}
CHAT: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TASK: Any = {"prompt": "What is 6 times 7?", "ground_truth": "42", "extra": {"split": ["a", None]}}


def calls_then_answers(text: str, request: GenerationRequest) -> str:
    return "It is 42." if "<tool_response>" in text else CALL


def says_yes(text: str, request: GenerationRequest) -> str:
    return "Yes."


async def ask(session: Opened, content: str = "Hi", **options: Any) -> Any:
    async with session.openai(max_retries=0) as client:
        messages: Any = [{"role": "user", "content": content}]
        return await client.chat.completions.create(model="any", messages=messages, **options)


# -- the record --------------------------------------------------------------------------------------------------------


@on_recorder(calls_then_answers)
async def test_a_session_is_recorded_as_it_was_asked_answered_and_sampled(recorder: Recorder) -> None:
    session = await recorder.open(**TASK)
    messages: list[Any] = [{"role": "user", "content": TASK["prompt"]}]
    async with session.openai() as client:
        for _ in range(2):
            tools: Any = [{"type": "function", "function": TOOL}]
            answer = await client.chat.completions.create(model="any", messages=messages, tools=tools)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
    rewards = [{"value": 1, "metrics": {"steps": 2}}, {"value": 0.5, "turn": answer.id}]
    for reward in rewards:
        assert (await recorder.post(f"/sessions/{session.id}/reward", session.key, reward)).is_success
    assert recorder.records == []
    assert (await recorder.end(session)).status_code == 200
    (record,) = recorder.records
    assert (record["id"], record["ending"], record["task"], record["limit"]) == (session.id, "finished", TASK, None)
    assert (record["reward"], record["metrics"]) == (1.5, {"steps": 2}) and record["began"] <= record["ended"]
    first, second = record["answers"]
    assert first["answer"]["tool_calls"] == messages[1]["tool_calls"]
    assert second["messages"] == [messages[2]] and second["parent"] == first["id"]
    assert second["answer"] == {"role": "assistant", "content": "It is 42."}
    assert (first["reward"], second["reward"]) == (None, 0.5) and f"chatcmpl-{second['id']}" == answer.id
    (sequence,) = record["sequences"]
    assert [turn[1:] for turn in sequence["turn_rewards"]] == [[0.0, 0], [0.5, 0]], "that of an answer, in its place"
    assert [message["role"] for message in sequence["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert sequence["tools"] == tools and sequence["versions"][-1][1] == len(sequence["response_ids"])
    mask, sampled = np.array(sequence["loss_mask"], bool), recorder.policy.sampled
    ids, logprobs = np.array(sequence["response_ids"]), np.array(sequence["rollout_logprobs"], np.float32)
    assert np.array_equal(ids[mask], [*sampled[0].token_ids, *sampled[1].token_ids])
    assert np.array_equal(logprobs[mask], [*sampled[0].logprobs, *sampled[1].logprobs])
    assert tuple(sequence["prompt_ids"]) == recorder.policy.prompts[0] and not logprobs[~mask].any()
    assert recorder.policy.prompts[1] == (*sequence["prompt_ids"], *ids[: len(ids) - sampled[1].num_tokens].tolist())


@on_recorder(says_yes)
async def test_every_dialect_speaks_in_one_session_at_its_own_url_and_at_the_top(recorder: Recorder) -> None:
    session = await recorder.open()
    async with session.anthropic() as client:
        said: Any = [{"role": "user", "content": "Hi"}]
        streaming = client.messages.stream(model="any", max_tokens=9, messages=said)
        async with streaming as stream:
            assert (await stream.get_final_text()) == "Yes."
        counted = await client.messages.count_tokens(model="any", messages=said)
        assert counted.input_tokens == len(recorder.policy.prompts[0])
    async with openai.AsyncOpenAI(base_url=f"{recorder.url}/v1", api_key=session.key) as client:
        assert (await client.responses.create(model="any", input="Ho")).output_text == "Yes."
        assert (await client.completions.create(model="any", prompt="Hm")).choices[0].text == "Yes."
        assert [model.id async for model in client.models.list()] == ["policy"]
    await recorder.end(session)
    assert len(recorder.records[0]["answers"]) == len(recorder.records[0]["sequences"]) == 3


# -- ends --------------------------------------------------------------------------------------------------------------


def test_aborted_sessions_are_recorded_and_their_keys_are_worth_nothing() -> None:
    async def test(recorder: Recorder) -> None:
        session = await recorder.open()
        await ask(session)
        assert (await recorder.end(session, "abort")).status_code == 200
        assert recorder.records[0]["ending"] == "aborted" and len(recorder.records[0]["sequences"]) == 1
        assert [(await recorder.end(session, how)).status_code for how in ("finish", "abort")] == [401, 401]

    assert len(run_recorded(Policy(says_yes), test).records) == 1


def test_an_answer_that_is_aborted_at_the_engine_ends_its_session() -> None:
    policy = Policy(says_yes)

    async def test(recorder: Recorder) -> None:
        session = await recorder.open()
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await ask(session)
        assert (await recorder.recorded())[0]["ending"] == "aborted"

    async def aborted(requests: list[GenerationRequest]) -> Any:
        return [replace(await policy._answer(request), finish_reason="abort") for request in requests]

    policy.generate = aborted  # pyright: ignore[reportAttributeAccessIssue]
    run_recorded(policy, test)


@pytest.mark.slow
@on_recorder(says_yes, idle_timeout_s=1.0)
async def test_a_session_whose_harness_went_away_times_out_but_not_while_the_policy_is_slow(recorder: Recorder) -> None:
    recorder.policy.may_answer.clear()
    idle, slow = await recorder.open(), await recorder.open()
    asking = asyncio.create_task(ask(slow))
    (record,) = await recorder.recorded()
    assert (record["id"], record["ending"], record["limit"]) == (idle.id, "timed_out", "sessions.idle_timeout_s=1")
    assert (await recorder.post(f"/sessions/{idle.id}/v1/chat/completions", idle.key, CHAT)).status_code == 401
    await asyncio.sleep(1.2)
    recorder.policy.may_answer.set()
    assert (await asking).choices[0].message.content == "Yes."
    assert len(recorder.records) == 1
    assert (await recorder.recorded(2))[1]["ending"] == "timed_out"


def test_sessions_that_are_open_when_the_server_ends_are_recorded_as_unfinished() -> None:
    policy = Policy(says_yes)
    cut: list[Any] = []

    async def test(recorder: Recorder) -> None:
        busy, quiet = await recorder.open(), await recorder.open()
        await ask(busy)
        await ask(quiet)
        policy.may_answer.clear()
        cut.append(asyncio.create_task(ask(busy, "And now?")))
        while policy.events[-1] != "begin 1":
            await asyncio.sleep(0.01)

    records = run_recorded(policy, test).records
    assert [record["ending"] for record in records] == ["unfinished"] * 2
    assert [[answer["state"] for answer in record["answers"]] for record in records] == [
        ["finished", "cancelled"],
        ["finished"],
    ]
    assert policy.events[-1] == "cancel 1"


@on_recorder(says_yes)
async def test_a_record_that_cannot_be_written_is_an_error_and_is_tried_again(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.sessions.archive.RETRY_S", 0.1)
    session = await recorder.open()
    recorder.errors += [OSError("disk full"), OSError("disk full")]
    answer = await recorder.end(session)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_recorded")
    assert (await recorder.recorded())[0]["ending"] == "finished" and not recorder.errors


def test_clients_that_end_sessions_at_the_same_time_end_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.sessions.archive.LOOK_S", 0.0)
    opened: list[str] = []

    async def test(recorder: Recorder) -> None:
        write = recorder.write

        def slow_write(record: SessionRecord) -> None:
            time.sleep(0.001)
            write(record)

        recorder.archive._write = slow_write

        async def client(number: int) -> None:
            for turn in range(25):
                session = await recorder.open()
                opened.append(session.id)
                if turn % 2 == number % 2:
                    recorder.archive._entries[session.id].session.abort()  # as by the control routes: the watcher's
                answer = await recorder.end(session)
                assert answer.status_code in (200, 401, 403), answer.text

        await asyncio.gather(*map(client, range(8)))
        opened.append((await recorder.open()).id)

    records = run_recorded(Policy(says_yes), test).records
    assert sorted(record["id"] for record in records) == sorted(opened), "each once"
    assert records[-1]["ending"] == "unfinished"


def test_a_session_that_cannot_be_recorded_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rollout.sessions.archive.LOOK_S", 0.01)

    async def test(recorder: Recorder) -> None:
        broken, timed_out, _ = await recorder.open(), await recorder.open(), await recorder.open()
        entries = recorder.archive._entries
        monkeypatch.setattr(entries[broken.id].session.transcript, "rewards", None)
        for session in (broken, timed_out):
            entries[session.id].session.abort()
        (record,) = await recorder.recorded()
        assert record["id"] == timed_out.id
        assert (await recorder.end(broken)).status_code == 401, "it has ended, and waits to be recorded"

    records = run_recorded(Policy(says_yes), test).records
    assert [record["ending"] for record in records] == ["aborted", "unfinished"]
    assert "has no record" in caplog.text and "it is tried again every 30 s" in caplog.text


# -- limits ------------------------------------------------------------------------------------------------------------


@on_recorder(says_yes, max_turns=2)
async def test_a_limit_is_heard_of_first_by_length_and_is_recorded(recorder: Recorder) -> None:
    session = await recorder.open()
    reasons = [(await ask(session, str(turn))).choices[0].finish_reason for turn in range(3)]
    assert reasons == ["stop", "stop", "length"]
    with pytest.raises(openai.PermissionDeniedError, match="max_turns"):
        await ask(session, "3")
    await recorder.end(session)
    assert recorder.records[0]["limit"] == "sessions.max_turns=2" and recorder.records[0]["ending"] == "finished"


@on_recorder(says_yes, max_open=2)
async def test_no_more_sessions_are_open_than_may_be(recorder: Recorder) -> None:
    first, _ = await recorder.open(), await recorder.open()
    refused = await recorder.post("/sessions", SERVER_TOKEN, {})
    assert (refused.status_code, "sessions.max_open" in refused.text) == (429, True)
    await recorder.end(first)
    await recorder.open()


@on_recorder(says_yes, refusal="sessions need a chat template, this one has none")
async def test_a_model_without_a_chat_template_has_no_sessions_and_says_why(recorder: Recorder) -> None:
    refused = await recorder.post("/sessions", SERVER_TOKEN, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")
    assert "this one has none" in refused.json()["error"]["message"]


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_a_request_says_how_it_is_sampled_and_what_it_leaves_out_is_the_servers() -> None:
    policy, samplings = Policy(says_yes), list[SamplingParams]()

    def say(text: str, request: GenerationRequest) -> str:
        samplings.append(request.sampling)
        return "Yes."

    policy._say = say

    async def test(recorder: Recorder) -> None:
        session = await recorder.open()
        await ask(session)
        await ask(session, temperature=0.25, seed=7, extra_body={"top_k": 5, "min_p": 0.5})
        with pytest.raises(openai.BadRequestError, match="frequency_penalty = 0.5: allowed is 0"):
            await ask(session, frequency_penalty=0.5)
        await recorder.end(session)
        assert [answer["sampling"] for answer in recorder.records[0]["answers"]] == [
            {},
            {"temperature": 0.25, "seed": 7, "top_k": 5, "min_p": 0.5},
        ]
        assert recorder.records[0]["sampling"]["top_p"] == 0.9

    run_recorded(policy, test)
    assert [(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) for sampling in samplings] == [
        (1.0, 0.9, -1, 0.0),
        (0.25, 0.9, 5, 0.5),
    ]
    assert (samplings[0].seed, samplings[1].seed) == (None, SamplingParams(seed=7).reseeded(1).seed)


@pytest.mark.parametrize(
    "asked",
    [{"temperature": -0.1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"top_k": 1.5}, {"top_k": 513}, {"seed": 0.5}]
    + [{"min_p": 1.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}],
)
def test_what_cannot_be_sampled_by_is_refused_by_name(asked: dict[str, float]) -> None:
    with pytest.raises(BadRequestError) as caught:
        requested_sampling(SamplingParams(), asked)
    assert caught.value.param == next(iter(asked)) and "allowed is" in caught.value.message


@on_recorder(says_yes, is_drafted=True)
async def test_what_cannot_be_drafted_by_is_refused_with_its_field(recorder: Recorder) -> None:
    session = await recorder.open()
    with pytest.raises(openai.BadRequestError, match=r"min_p = 0.1: allowed is 0: .*speculative.method") as caught:
        await ask(session, extra_body={"min_p": 0.1})
    assert caught.value.param == "min_p"
    await ask(session, extra_body={"min_p": 0})
    await recorder.end(session)
    assert [answer["sampling"] for answer in recorder.records[0]["answers"]] == [{"min_p": 0}]


# -- whose request -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_configured", [False, True])
def test_a_request_goes_to_its_session_or_to_the_gateway_and_each_asks_for_its_own_token(is_configured: bool) -> None:
    async def test(recorder: Recorder) -> None:
        session, ended = await recorder.open(), await recorder.open()
        await recorder.end(ended)

        async def status(path: str, key: str | None) -> int | str:
            answer = await recorder.post(path, key, CHAT | {"max_tokens": 9})
            return "gateway" if answer.text == "from the gateway" else answer.status_code

        chat = "/v1/chat/completions"
        assert await status(chat, session.key) == 200
        assert await status(chat, ended.key) == 401, "an ended session's key is not the gateway's to answer"
        assert await status(chat, SERVER_TOKEN) == "gateway"
        assert await status(chat, None) == await status(chat, "sk-other") == (401 if is_configured else "gateway")
        assert await status(f"/sessions/{session.id}{chat}", SERVER_TOKEN) == 401
        assert await status(f"/sessions/{ended.id}{chat}", session.key) == 404
        assert await status("/v1/messages", session.key) == 200
        assert [await status("/v1/messages", key) for key in (None, SERVER_TOKEN, ended.key)] == [401] * 3
        assert [await status("/pause", key) for key in (session.key, None, SERVER_TOKEN)] == [401, 401, "gateway"]
        assert [await status("/sessions", key) for key in (session.key, None)] == [401, 401]
        models = [
            (await recorder.client.get(f"{recorder.url}/v1/models", headers={"authorization": f"Bearer {key}"})).text
            for key in (session.key, SERVER_TOKEN)
        ]
        assert '"slipstream"' in models[0] and models[1] == "from the gateway"

    run_recorded(Policy(says_yes), test, is_configured=is_configured)
