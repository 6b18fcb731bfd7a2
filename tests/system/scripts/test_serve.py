"""`make serve` as a user starts it, with real vLLM: two replicas behind the gateway, started once for all tests."""

import asyncio
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from httpx import AsyncClient
from transformers import AutoTokenizer

from tests.support.serving import (
    AT_ONCE_S,
    LONG,
    LONG_ENOUGH,
    Server,
    Stream,
    body,
    is_metric,
    is_paused,
    logprobs_of,
    metric,
    num_tokens,
    path,
    post,
    run,
    serving,
    settled,
    until,
    with_client,
)

pytestmark = pytest.mark.slow

MAX_NUM_SEQS = 8
END_DEADLINE_S = 30
STAYS = 4000
"""Tokens of a request that ends, and is not over while its client gets no core."""
IDLE_S = 6
"""The clients of httpx, and so OpenAI's, keep a connection for 5 s."""
COMPLETION = {"model": "policy", "prompt": "How many?", "max_tokens": 5}
RUNNING, WAITING = "slipstream_running_requests", "slipstream_waiting_requests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = ("device=cpu", "model.warmup_steps=0", "rollout.num_replicas=2", *LONG_ENOUGH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "of another server")
        with serving(tmp_path_factory.mktemp("serve"), *overrides, f"rollout.max_num_seqs={MAX_NUM_SEQS}") as server:
            yield server


# -- pause through the gateway -----------------------------------------------------------------------------------------


@with_client
async def test_a_keep_pause_changes_nothing_of_what_is_generated(client: AsyncClient, server: Server) -> None:
    """Greedy, token by token and logprob by logprob: 6 streams through two pauses, against the same 6 without."""

    async def streams(cycles: int) -> list[Stream]:
        asked = [body(120, chat=index % 2 == 1) for index in range(6)]
        for index, one in enumerate(asked):
            one |= {"messages": [{"role": "user", "content": f"{index}?"}]} if index % 2 else {"prompt": f"{index}?"}
        found = [Stream() for _ in asked]
        reading = [
            asyncio.create_task(stream.read(client, server.gateway + path("messages" in one), one))
            for stream, one in zip(found, asked, strict=True)
        ]
        for cycle in range(cycles):
            await until(lambda: asyncio.sleep(0, all(num_tokens(s) > 3 + 20 * cycle for s in found)))  # noqa: B023
            await post(client, f"{server.gateway}/pause?mode=keep")
            assert await is_paused(client, server.gateway)
            seen = await settled(lambda: [num_tokens(stream) for stream in found])
            await asyncio.sleep(0.5)
            assert [num_tokens(stream) for stream in found] == seen
            await post(client, f"{server.gateway}/resume")
        return await asyncio.gather(*reading)

    for calm, paused in zip(await streams(cycles=0), await streams(cycles=2), strict=True):
        assert calm.token_ids == paused.token_ids and len(calm.token_ids[0]) == 120
        assert paused.logprobs[0] == pytest.approx(calm.logprobs[0], abs=1e-4)


# -- FastDeploy's table: 20 streams, 8 of them running, on one replica ------------------------------------------------


@with_client
async def test_pause_abort_answers_all_streams_and_gives_back_every_block(client: AsyncClient, server: Server) -> None:
    url = server.replicas[0]

    async def blocks(client: AsyncClient) -> float:
        """Share of the KV cache in use: the engine reports it after each step, so one request is run."""
        await post(client, f"{url}/v1/completions", json=body(1))
        return await metric(client, url, "vllm:kv_cache_usage_perc")

    async def started(client: AsyncClient, streams: list[Stream]) -> bool:
        counts = [await metric(client, url, f"slipstream_{name}_requests") for name in ("running", "waiting")]
        return counts == [MAX_NUM_SEQS, 12] and sum(bool(stream.times) for stream in streams) == MAX_NUM_SEQS

    before = await blocks(client)
    streams = [Stream() for _ in range(20)]
    reading = [
        asyncio.create_task(stream.read(client, url + path(bool(index % 2)), body(LONG, chat=bool(index % 2))))
        for index, stream in enumerate(streams)
    ]
    await until(lambda: started(client, streams))
    assert await metric(client, url, "vllm:kv_cache_usage_perc") > before
    async with asyncio.timeout(AT_ONCE_S):
        await post(client, f"{url}/pause")
        await asyncio.gather(*reading)
    assert [stream.finish for stream in streams] == [{0: "abort"}] * 20 and all(s.ended for s in streams)
    partial = [len(stream.token_ids[0]) for stream in streams if stream.token_ids]
    assert len(partial) == MAX_NUM_SEQS and all(0 < count < LONG for count in partial)

    late = asyncio.create_task(post(client, f"{url}/v1/completions", json=body(5)))
    await until(lambda: is_metric(client, url, WAITING, 1))
    await post(client, f"{url}/pause?mode=keep")  # no deadlock: another mode, other calls
    assert (await client.get(f"{url}/v1/is_paused")).json()["result"] == {"is_paused": True}
    assert not late.done()
    await post(client, f"{url}/resume")
    (choice,) = (await late)["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 5)
    assert await blocks(client) == before
    assert await metric(client, url, "slipstream_running_requests") == 0


# -- abort -------------------------------------------------------------------------------------------------------------


@with_client
async def test_a_request_that_never_ran_answers_in_every_form(client: AsyncClient, server: Server) -> None:
    """Completions and chat, streamed and not, one and two choices, sent while paused: each is answered with `abort`."""
    await post(client, f"{server.gateway}/pause?mode=keep")
    whole = {
        (chat, n): asyncio.create_task(post(client, server.gateway + path(chat), json=body(5, chat, n=n)))
        for chat in (False, True)
        for n in (1, 2)
    }
    echoed = asyncio.create_task(post(client, f"{server.gateway}/v1/completions", json=body(5, echo=True)))
    streamed = {
        (chat, n): asyncio.create_task(Stream().read(client, server.gateway + path(chat), body(5, chat, n=n)))
        for chat in (False, True)
        for n in (1, 2)
    }
    await until(lambda: is_metric(client, server.gateway, "slipstream_waiting_requests", 9))
    async with asyncio.timeout(AT_ONCE_S):
        ended = await post(client, f"{server.gateway}/v1/abort_requests", json={"abort_all": True})
        assert len(ended["result"]["aborted"]) == 9
        for (_, n), task in whole.items():
            choices = (await task)["choices"]
            assert [(choice["finish_reason"], choice["token_ids"]) for choice in choices] == [("abort", [])] * n
        for (_, n), task in streamed.items():
            stream = await task
            assert stream.finish == dict.fromkeys(range(n), "abort") and not stream.token_ids and stream.ended
        assert (await echoed)["choices"][0]["finish_reason"] == "abort"
    await post(client, f"{server.gateway}/resume")


@with_client
async def test_a_frozen_request_is_aborted_at_once_with_the_tokens_it_has(client: AsyncClient, server: Server) -> None:
    """The request is named by the id in its response, through FastDeploy's routes of the gateway; its neighbour goes
    on."""
    frozen, neighbour = Stream(), Stream()
    reading = [
        asyncio.create_task(frozen.read(client, server.gateway + path(False), body(LONG, n=2))),
        asyncio.create_task(neighbour.read(client, server.gateway + path(True), body(LONG, chat=True))),
    ]
    await until(lambda: asyncio.sleep(0, len(frozen.token_ids) == 2 and len(neighbour.times) > 3))
    await post(client, f"{server.gateway}/pause?mode=keep")
    async with asyncio.timeout(AT_ONCE_S):
        ended = await post(client, f"{server.gateway}/v1/abort_requests", json={"req_ids": [frozen.response_id, "x"]})
        assert ended["result"] == {"aborted": [frozen.response_id], "not_found": ["x"]}
        await reading[0]
    assert frozen.finish == {0: "abort", 1: "abort"}
    assert all(0 < len(token_ids) < LONG for token_ids in frozen.token_ids.values())
    had = await settled(lambda: num_tokens(neighbour))
    await post(client, f"{server.gateway}/v1/resume")
    await until(lambda: asyncio.sleep(0, num_tokens(neighbour) > had + 100))
    assert not reading[1].done()


# -- the OpenAI protocol -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@with_client
async def test_tokens_and_logprobs_are_the_same_streamed_and_not(
    client: AsyncClient, server: Server, chat: bool
) -> None:
    url = server.gateway + path(chat)
    whole = await post(client, url, json=body(12, chat))
    stream = await Stream().read(client, url, body(12, chat))
    (choice,) = whole["choices"]
    assert choice["token_ids"] == stream.token_ids[0] and len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == stream.finish[0] == "length"
    assert logprobs_of(choice) == pytest.approx(stream.logprobs[0], abs=1e-4)
    assert all(-20 < logprob < 0 for logprob in logprobs_of(choice))
    prompt = (whole if chat else choice)["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"] > 3
    two = await post(client, url, json=body(12, chat, n=2))
    both = await Stream().read(client, url, body(12, chat, n=2))
    assert [len(choice["token_ids"]) for choice in two["choices"]] == [12, 12]
    assert {index: len(token_ids) for index, token_ids in both.token_ids.items()} == {0: 12, 1: 12}


@with_client
async def test_errors_of_the_engine_come_through_the_gateway(client: AsyncClient, server: Server) -> None:
    url = f"{server.gateway}/v1/completions"
    unknown = await client.post(url, json=body(1, model="nobody"))
    assert (unknown.status_code, "nobody" in unknown.json()["error"]["message"]) == (404, True)
    too_long = await client.post(url, json=body(100_000))
    assert (too_long.status_code, "max_tokens" in too_long.text) == (400, True)
    models = (await client.get(f"{server.gateway}/v1/models")).json()
    assert models["data"][0]["id"] == "policy"
    assert (await client.get(f"{server.gateway}/versions")).json() == {"replica-0": 0, "replica-1": 0}
    assert [(await client.get(f"{one}/health")).status_code for one in [server.gateway, *server.replicas]] == [200] * 3


# -- single clients ---------------------------------------------------------------------------------------------------


def test_gateway_and_replica_listen_on_loopback_alone(server: Server) -> None:
    """Unless the config says otherwise."""
    ports = {httpx.URL(url).port for url in (server.gateway, *server.replicas)}
    sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    found = {(one.laddr.ip, one.laddr.port) for one in sockets if one.laddr and one.laddr.port in ports}
    assert len(ports) == 3 and found == {("127.0.0.1", port) for port in ports}


def test_an_idle_connection_outlives_what_clients_keep_theirs_for(server: Server) -> None:
    """Otherwise a request is now and then sent on a connection that is being closed, and fails."""
    urls = [httpx.URL(url) for url in (server.gateway, *server.replicas)]
    connections = [http.client.HTTPConnection(url.host, url.port or 0) for url in urls]
    for pause_s in (IDLE_S, 0):
        for connection in connections:
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b""
            connection.auto_open = False  # the next is sent on this very connection, or raises
        time.sleep(pause_s)


@with_client
async def test_a_client_that_leaves_while_frozen_frees_its_seat_and_nothing_of_it_runs(
    client: AsyncClient, server: Server
) -> None:
    """One of two that are frozen leaves, and the first of two that wait. After the resume the engine computes tokens
    and prompts of the others alone."""
    replica = server.replicas[0]
    url = replica + path(False)

    async def computed(client: AsyncClient) -> tuple[float, float, float]:
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "slipstream_engine_requests")
        prompts, tokens, requests = [await metric(client, replica, name) for name in names]
        return prompts, tokens, requests

    streams = [Stream() for _ in range(4)]
    prompt_tokens = (await post(client, url, json=body(1)))["usage"]["prompt_tokens"]

    def reading(index: int, max_tokens: int) -> asyncio.Task[Stream]:
        return asyncio.create_task(streams[index].read(client, url, body(max_tokens)))

    leaver, stayer = reading(0, LONG), reading(1, STAYS)
    await until(lambda: asyncio.sleep(0, all(num_tokens(stream) > 3 for stream in streams[:2])))
    await post(client, f"{replica}/pause?mode=keep")
    early_leaver = reading(2, LONG)
    await until(lambda: is_metric(client, replica, WAITING, 1))
    late = reading(3, 20)
    await until(lambda: is_metric(client, replica, WAITING, 2))
    had = await settled(lambda: num_tokens(streams[1]))
    before = await computed(client)
    assert 3 < had < STAYS and await is_metric(client, replica, RUNNING, 2)
    leaver.cancel()
    early_leaver.cancel()
    await until(lambda: is_metric(client, replica, RUNNING, 1))
    await until(lambda: is_metric(client, replica, WAITING, 1))
    assert await is_paused(client, replica)
    assert await computed(client) == before and not stayer.done() and not late.done()
    await post(client, f"{replica}/resume")
    await asyncio.gather(stayer, late)
    assert [num_tokens(streams[1]), num_tokens(streams[3])] == [STAYS, 20]
    await until(lambda: is_metric(client, replica, RUNNING, 0))
    after = await computed(client)
    assert [a - b for a, b in zip(after, before, strict=True)] == [prompt_tokens, STAYS - had + 20, 1]


# -- sessions ----------------------------------------------------------------------------------------------------------


async def opened(client: AsyncClient, server: Server, **task: Any) -> dict[str, str]:
    answer = await client.post(f"{server.gateway}/sessions", json=task)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def recorded(client: AsyncClient, server: Server, session: dict[str, str]) -> dict[str, Any]:
    await post(client, f"{session['base_url']}/finish", headers={"authorization": f"Bearer {session['key']}"})
    return record_of(server, session)


def record_of(server: Server, session: dict[str, str]) -> dict[str, Any]:
    return json.loads((server.run.run_dir / "sessions" / f"{session['id']}.json").read_text())


@with_client
async def test_a_session_over_the_openai_sdk_is_recorded_with_the_tokens_that_were_sampled(
    client: AsyncClient, server: Server
) -> None:
    """Greedy, as the request asks: the proxy of plain routes samples the same for the same messages."""
    session = await opened(client, server, prompt="How many?", ground_truth="4")
    said: Any = [{"role": "user", "content": "How many?"}]
    asked: Any = {"model": "policy", "max_tokens": 12, "temperature": 0}
    url, extra = f"{session['base_url']}/v1", {"return_token_ids": True}
    async with openai.AsyncOpenAI(base_url=url, api_key=session["key"], max_retries=0) as sdk:
        first = await sdk.chat.completions.create(messages=said, **asked, extra_body=extra)
        said += [{"role": "assistant", "content": first.choices[0].message.content}]
        said += [{"role": "user", "content": "And then?"}]
        second = await sdk.chat.completions.create(messages=said, **asked, extra_body=extra)
    headers = {"authorization": f"Bearer {session['key']}"}
    await post(client, f"{session['base_url']}/reward", json={"value": 0.5}, headers=headers)
    record = await recorded(client, server, session)
    assert (record["ending"], record["reward"], record["task"]["ground_truth"]) == ("finished", 0.5, "4")
    answers = [first.model_dump(), second.model_dump()]
    sampled = [
        one
        for row in record["sequences"]
        for one, is_ours in zip(row["response_ids"], row["loss_mask"], strict=True)
        if is_ours
    ]
    assert sampled == [one for answer in answers for one in answer["choices"][0]["token_ids"]]
    assert record["sequences"][0]["prompt_ids"] == answers[0]["prompt_token_ids"]
    assert all(span[2] == 0 for row in record["sequences"] for span in row["versions"])
    proxied = await post(client, f"{server.gateway}/v1/chat/completions", json=asked | extra | {"messages": said[:1]})
    assert proxied["prompt_token_ids"] == answers[0]["prompt_token_ids"]
    assert proxied["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"]


@with_client
async def test_a_session_over_the_anthropic_sdk_is_only_late_through_a_pause(
    client: AsyncClient, server: Server
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(server.run.run_dir / "untrained_model")

    session = await opened(client, server)
    await post(client, f"{server.gateway}/pause?mode=keep")
    said: Any = [{"role": "user", "content": "How many?"}]
    async with anthropic.AsyncAnthropic(base_url=server.gateway, api_key=session["key"], max_retries=0) as sdk:

        async def ask() -> Any:
            async with sdk.messages.stream(model="policy", max_tokens=12, messages=said) as stream:
                return await stream.get_final_message()

        asking = asyncio.create_task(ask())
        await until(lambda: is_metric(client, server.gateway, WAITING, 1))
        await post(client, f"{server.gateway}/resume")
        answer = await asking
    record = await recorded(client, server, session)
    (sequence,) = record["sequences"]
    assert len(sequence["response_ids"]) == answer.usage.output_tokens > 0
    text = "".join(part.text for part in answer.content if part.type == "text")
    assert text in tokenizer.decode(sequence["response_ids"])


@with_client
async def test_what_was_sampled_for_a_client_that_went_away_is_in_the_record_and_in_no_sequence(
    client: AsyncClient, server: Server
) -> None:
    session = await opened(client, server)
    async with openai.AsyncOpenAI(base_url=f"{server.gateway}/v1", api_key=session["key"], max_retries=0) as sdk:
        said: Any = [{"role": "user", "content": "How many?"}]
        asked: Any = {"model": "policy", "messages": said, "max_tokens": STAYS, "temperature": 0, "timeout": None}

        async def is_at_work() -> bool:
            return any([await is_metric(client, url, RUNNING, 1) for url in server.replicas])

        async def is_over() -> bool:
            return not await is_at_work()

        async def num_sampled() -> float:
            return sum([await metric(client, url, "vllm:generation_tokens_total") for url in server.replicas])

        async def is_sampled() -> bool:
            return await num_sampled() > before

        asking = asyncio.create_task(sdk.chat.completions.create(**asked))  # greedy, it does not end by itself
        await until(is_at_work)
        before = await num_sampled()  # of requests before it, too: theirs are all counted when it runs alone
        await until(is_sampled)
        asking.cancel()
        await until(is_over)
    record = await recorded(client, server, session)
    (answer,) = record["answers"]
    assert (answer["state"], answer["finish"], answer["answer"]) == ("cancelled", "abort", None)
    assert 0 < answer["sampled_tokens"] < STAYS and record["sequences"] == [], record


@with_client
async def test_a_session_moves_when_its_replica_is_killed(client: AsyncClient, server: Server) -> None:
    """The server has one replica from here on."""
    session = await opened(client, server)
    async with openai.AsyncOpenAI(base_url=f"{server.gateway}/v1", api_key=session["key"], max_retries=0) as sdk:
        said: Any = [{"role": "user", "content": "How many?"}]
        asked: Any = {"model": "policy", "messages": said, "max_tokens": STAYS, "temperature": 0, "timeout": None}
        call = sdk.chat.completions.create(**asked)
        asking = asyncio.create_task(call)
        running: list[str] = []

        async def found() -> bool:
            running[:] = [url for url in server.replicas if await is_metric(client, url, RUNNING, 1)]
            return bool(running)

        await until(found)
        (port,) = [httpx.URL(url).port for url in running]
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        (pid,) = {one.pid for one in listening if one.laddr and one.laddr.port == port}
        assert pid is not None and not asking.done()
        os.kill(pid, signal.SIGKILL)
        answer = await asking
    record = await recorded(client, server, session)
    (sequence,) = record["sequences"]
    assert answer.usage is not None and len(sequence["response_ids"]) == answer.usage.completion_tokens
    assert len((await client.get(f"{server.gateway}/versions")).json()) == 1


def test_ctrl_c_records_what_is_open_and_leaves_nothing_behind(server: Server) -> None:
    """The last of the file: the server is gone afterwards."""
    sessions: list[dict[str, str]] = []

    async def scenario(client: AsyncClient) -> None:
        sessions.append(session := await opened(client, server))
        headers = {"authorization": f"Bearer {session['key']}"}
        await post(client, f"{session['base_url']}/v1/completions", json=COMPLETION, headers=headers)

    run(server, scenario)
    server.run.watch_children()
    os.killpg(server.run.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    assert server.run.wait_for_end(END_DEADLINE_S) == 0, server.run.output.read_text()
    assert server.run.output.read_text().endswith("stopped\n")
    assert server.run.survivors() == []
    record = record_of(server, sessions[0])
    assert record["ending"] == "unfinished" and record["answers"][0]["state"] == "finished"
