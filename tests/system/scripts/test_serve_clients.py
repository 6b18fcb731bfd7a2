"""What single clients of `make serve` may do, through the gateway to real vLLM: leave, stop, and abort."""

import asyncio
import http.client
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.serving import (
    AT_ONCE_S,
    LONG,
    LONG_ENOUGH,
    Server,
    Stream,
    body,
    is_metric,
    is_paused,
    metric,
    num_tokens,
    path,
    post,
    run,
    settled,
    until,
)

STAYS = 4000
"""Tokens of a request that ends, and is not over while its client gets no core."""
IDLE_S = 6
"""httpx, and so OpenAI's client, keeps a connection for 5 s."""
RUNNING, WAITING = "slipstream_running_requests", "slipstream_waiting_requests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = ("device=cpu", "model.warmup_steps=0", "rollout.num_replicas=1", "rollout.max_num_seqs=2")
    server = Server.start(tmp_path_factory.mktemp("serve"), *overrides, "serve.port=0", *LONG_ENOUGH)
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.kill()


def test_gateway_and_replica_listen_on_loopback_alone(server: Server) -> None:
    """Unless the config says otherwise."""
    ports = {httpx.URL(url).port for url in (server.gateway, *server.replicas)}
    sockets = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    found = {(one.laddr.ip, one.laddr.port) for one in sockets if one.laddr and one.laddr.port in ports}
    assert len(ports) == 2 and found == {("127.0.0.1", port) for port in ports}


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


def test_a_client_that_leaves_while_frozen_frees_its_seat_and_nothing_of_it_runs(server: Server) -> None:
    """Two seats: of the two that are frozen on them one leaves, and of the two that wait the first. After the resume
    the engine computes tokens and prompts of the others alone."""
    url, replica = server.gateway + path(False), server.replicas[0]

    async def computed(client: httpx.AsyncClient) -> tuple[float, float, float]:
        names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "slipstream_engine_requests")
        prompts, tokens, requests = [await metric(client, replica, name) for name in names]
        return prompts, tokens, requests

    async def scenario(client: httpx.AsyncClient) -> None:
        streams = [Stream() for _ in range(4)]
        prompt_tokens = (await post(client, url, json=body(1)))["usage"]["prompt_tokens"]

        def reading(index: int, max_tokens: int) -> asyncio.Task[Stream]:
            return asyncio.create_task(streams[index].read(client, url, body(max_tokens)))

        leaver, stayer = reading(0, LONG), reading(1, STAYS)
        await until(lambda: asyncio.sleep(0, all(num_tokens(stream) > 3 for stream in streams[:2])))
        await post(client, f"{server.gateway}/pause?mode=keep")
        early_leaver = reading(2, LONG)
        await until(lambda: is_metric(client, server.gateway, WAITING, 1))
        late = reading(3, 20)
        await until(lambda: is_metric(client, server.gateway, WAITING, 2))
        had = await settled(lambda: num_tokens(streams[1]))
        before = await computed(client)
        assert 3 < had < STAYS and await is_metric(client, server.gateway, RUNNING, 2)
        leaver.cancel()
        early_leaver.cancel()
        await until(lambda: is_metric(client, server.gateway, RUNNING, 1))
        await until(lambda: is_metric(client, server.gateway, WAITING, 1))
        assert await is_paused(client, server.gateway)
        assert await computed(client) == before and not stayer.done() and not late.done()
        await post(client, f"{server.gateway}/resume")
        await asyncio.gather(stayer, late)
        assert [num_tokens(streams[1]), num_tokens(streams[3])] == [STAYS, 20]
        await until(lambda: is_metric(client, server.gateway, RUNNING, 0))
        after = await computed(client)
        assert [a - b for a, b in zip(after, before, strict=True)] == [prompt_tokens, STAYS - had + 20, 1]

    run(server, scenario)


def test_a_streaming_chat_is_aborted_by_the_id_that_its_client_chose(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        url, chat, neighbour = server.gateway + path(True), Stream(), Stream()
        asked = body(LONG, chat=True)
        reading = [
            asyncio.create_task(chat.read(client, url, asked, **{"X-Request-Id": "chat-7"})),
            asyncio.create_task(neighbour.read(client, url, asked, **{"X-Request-Id": "chat-77"})),
        ]
        await until(lambda: asyncio.sleep(0, num_tokens(chat) > 3 and num_tokens(neighbour) > 3))
        assert chat.response_id == "chatcmpl-chat-7"
        async with asyncio.timeout(AT_ONCE_S):
            ended = await post(client, f"{server.gateway}/v1/abort_requests", json={"req_ids": ["chat-7"]})
            assert ended["result"] == {"aborted": ["chat-7"], "not_found": []}
            await reading[0]
        assert chat.finish == {0: "abort"} and chat.ended
        assert 3 < num_tokens(chat) == len(chat.logprobs[0]) < LONG
        await until(lambda: asyncio.sleep(0, num_tokens(neighbour) > num_tokens(chat)))
        assert not reading[1].done() and neighbour.token_ids[0][: num_tokens(chat)] == chat.token_ids[0]

    run(server, scenario)
