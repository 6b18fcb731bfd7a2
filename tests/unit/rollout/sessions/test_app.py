"""The HTTP app of sessions over real sockets: access, errors, and clients that leave."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from rollout.sessions.app import session_app
from rollout.sessions.registry import Reward
from tests.support.sessions import SERVER_TOKEN, FakeSessions, World, make_answer, on_server, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}
MESSAGES = CHAT | {"max_tokens": 9}


class Caller:
    """Calls one session with its key."""

    def __init__(self, world: World, client: httpx.AsyncClient, session: str = "a"):
        self._client, self._url = client, f"{world.url}/sessions/{session}"
        self.headers = {"authorization": f"Bearer {world.keys.issue(session)}"}

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self._client.post(self._url + path, json=body, headers=self.headers)

    async def get(self, path: str = "") -> httpx.Response:
        return await self._client.get(self._url + path, headers=self.headers)


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=False, trust_env=False, timeout=30)


async def send_raw(world: World, key: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


# -- the life of a session ---------------------------------------------------------------------------------------------


@on_server()
async def test_a_session_is_opened_with_the_servers_token_and_lives_by_its_own_key(world: World) -> None:
    async with new_client() as client:
        refused = await client.post(f"{world.url}/sessions", json={})
        headers = {"authorization": f"Bearer {SERVER_TOKEN}"}
        opened = await client.post(f"{world.url}/sessions", json={"question": "2 + 2?"}, headers=headers)
        session = opened.json()
        assert (refused.status_code, opened.status_code) == (401, 201)
        assert session["base_url"] == f"{world.url}/sessions/{session['id']}" and session["key"].startswith("session-")
        token = await client.get(session["base_url"], headers=headers)
        assert (token.status_code, token.json()["error"]["code"]) == (401, "invalid_api_key")
        own = {"x-api-key": session["key"]}
        transcript = await client.get(session["base_url"], headers=own)
        assert transcript.json() == {"id": session["id"], "generations": 0}
        assert (await client.post(f"{session['base_url']}/finish", headers=own)).status_code == 200
        late = await client.post(f"{session['base_url']}/reward", json={"value": 1}, headers=own)
        assert late.status_code == 401
    assert world.sessions.events == [("create", {"question": "2 + 2?"}), ("finish", session["id"])]


@on_server()
async def test_rewards_name_an_answer_by_the_id_that_the_client_saw(world: World) -> None:
    async with new_client() as client:
        caller = Caller(world, client)
        seen = (await caller.post("/v1/chat/completions", CHAT)).json()["id"]
        await caller.post("/reward", {"value": 0.5, "turn": seen, "metrics": {"steps": 3}})
        await caller.post("/reward", {"value": 1})
        bad = [
            await caller.post("/reward", body)
            for body in ({}, {"value": "1"}, {"value": 1, "score": 2}, {"value": 1, "metrics": {"a": "b"}}, [])
        ]
    rewards = [event[2] for event in world.sessions.events if event[0] == "reward"]
    assert rewards == [Reward(value=0.5, answer_id="g_0", metrics={"steps": 3}), Reward(value=1)]
    assert [answer.status_code for answer in bad] == [400] * 5
    assert [answer.json()["error"]["param"] for answer in bad] == ["value", "value", "score", "metrics.a", None]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}'])
@on_server()
async def test_a_body_that_is_no_object_of_json_is_refused_in_the_form_of_the_dialect(
    world: World, body: bytes
) -> None:
    headers = {"x-api-key": world.keys.issue("a")}
    async with new_client() as client:
        chat = await client.post(f"{world.url}/v1/chat/completions", content=body, headers=headers)
        messages = await client.post(f"{world.url}/v1/messages", content=body, headers=headers)
    assert (chat.status_code, chat.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (messages.status_code, messages.json()["error"]["type"]) == (400, "invalid_request_error")
    assert messages.json()["type"] == "error" and world.sessions.requests == []


@on_server()
async def test_unknown_routes_and_methods_are_told_in_json(world: World) -> None:
    async with new_client() as client:
        caller = Caller(world, client)
        unknown, wrong = await caller.post("/v1/embeddings", {}), await caller.get("/v1/chat/completions")
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert "/v1/embeddings" in unknown.json()["error"]["message"]


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@on_server()
async def test_a_client_that_goes_away_cancels_its_call(world: World, is_stream: bool) -> None:
    world.sessions.gate = asyncio.Event()
    _, writer = await send_raw(world, world.keys.issue("a"), CHAT | {"stream": is_stream})
    await until(lambda: world.sessions.events == [("answer", "a")])
    begun = time.monotonic()
    writer.close()
    await until(lambda: world.sessions.events == [("answer", "a"), ("cancelled", "a")])
    assert time.monotonic() - begun < 1
    world.sessions.gate.set()
    await asyncio.sleep(0.05)
    assert len(world.sessions.events) == 2  # there was no answer to deliver


@pytest.mark.parametrize("reads_it", [False, True])
@on_server()
async def test_a_stream_is_delivered_if_it_was_read_to_its_end(world: World, reads_it: bool) -> None:
    world.sessions.script.append([make_answer("x" * 2**24)])  # more than sockets buffer
    reader, writer = await send_raw(world, world.keys.issue("a"), CHAT | {"stream": True})
    await until(lambda: world.sessions.events == [("answer", "a")])
    await reader.readexactly(1)
    while reads_it and not (await reader.read(2**20)).endswith(b"0\r\n\r\n"):
        pass
    writer.close()
    await until(lambda: len(world.sessions.events) == 2)
    assert world.sessions.events[-1] == ("delivered", "a", ["g_0"], reads_it)


async def test_an_answer_that_comes_as_its_client_goes_away_is_told_as_not_delivered() -> None:
    sessions = FakeSessions(gate=asyncio.Event())
    headers = [(b"x-api-key", sessions.keys.issue("a").encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": json.dumps(CHAT).encode()}]
    assert sessions.gate is not None

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await until(lambda: sessions.events == [("answer", "a")])
        sessions.gate.set()  # pyright: ignore[reportOptionalMemberAccess]
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        pass  # as uvicorn does for a client that has left

    await session_app(sessions)(scope, receive, send)
    assert sessions.events[1:] == [("delivered", "a", ["g_0"], False)]


# -- errors in an answer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@on_server()
async def test_a_call_that_its_session_ends_is_refused_and_a_fault_is_a_500_without_details(
    world: World, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.sessions.script += [asyncio.CancelledError(), RuntimeError("a secret")]
    async with new_client() as client:
        caller = Caller(world, client)
        ended, failed = await caller.post(path, MESSAGES), await caller.post(path, MESSAGES)
    assert (ended.status_code, ended.json()["error"]["code"]) == (403, "session_ended")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in failed.text
    assert "session a" in caplog.text and "a secret" in caplog.text


@on_server()
async def test_an_answer_that_cannot_be_written_is_a_500_and_not_delivered(world: World) -> None:
    world.sessions.script += [[make_answer("half a character: \ud800")]] * 2
    async with new_client() as client:
        caller = Caller(world, client)
        whole = await caller.post("/v1/chat/completions", CHAT)
        stream = await caller.post("/v1/chat/completions", CHAT | {"stream": True})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert json.loads(stream.text.split("data: ")[-1])["error"]["code"] == "internal_error"
    assert world.sessions.events[1::2] == [("delivered", "a", ["g_0"], False)] * 2


# -- many at once ------------------------------------------------------------------------------------------------------


@on_server()
async def test_256_concurrent_calls_are_answered_each_in_its_own_session(world: World) -> None:
    world.sessions.gate = asyncio.Event()
    bodies = [CHAT | {"stream": number % 2 == 0} for number in range(256)]
    keys = [world.keys.issue(f"s{number}") for number in range(256)]
    calls = await asyncio.gather(*(send_raw(world, *each) for each in zip(keys, bodies, strict=True)))
    await until(lambda: len(world.sessions.requests) == 256)
    world.sessions.gate.set()
    for reader, writer in calls:
        assert b" 200 OK" in await reader.readline()
        writer.close()
    await until(lambda: len(world.sessions.events) == 512)
    assert {event[1] for event in world.sessions.events if event[0] == "delivered" and event[3]} == {
        f"s{number}" for number in range(256)
    }
