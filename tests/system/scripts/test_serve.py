"""`make serve` as a user starts it, with real vLLM: two replicas behind the gateway, started once for all tests."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
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
    logprobs_of,
    metric,
    num_tokens,
    path,
    post,
    run,
    settled,
    until,
)
from tests.support.whole_runs import survivors

MAX_NUM_SEQS = 8
ATTEMPTS = 5
END_DEADLINE_S = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server.start(
        tmp_path_factory.mktemp("serve"),
        "device=cpu",
        "model.warmup_steps=0",
        "rollout.num_replicas=2",
        f"rollout.max_num_seqs={MAX_NUM_SEQS}",
        "serve.port=0",
        *LONG_ENOUGH,
    )
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.kill()


# -- pause through the gateway -----------------------------------------------------------------------------------------


def test_a_keep_pause_changes_nothing_of_what_is_generated(server: Server) -> None:
    """Greedy, token by token and logprob by logprob: 6 streams through two pauses, against the same 6 without."""

    async def scenario(client: httpx.AsyncClient) -> None:
        async def streams(cycles: int) -> list[Stream]:
            asked = [body(120, chat=index % 2 == 1) for index in range(6)]
            for index, one in enumerate(asked):
                one |= (
                    {"messages": [{"role": "user", "content": f"{index}?"}]} if index % 2 else {"prompt": f"{index}?"}
                )
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

    run(server, scenario)


# -- FastDeploy's table: 20 streams, 8 of them running, on one replica ------------------------------------------------


def test_pause_abort_answers_all_streams_and_gives_back_every_block(server: Server) -> None:
    url = server.replicas[0]

    async def blocks(client: httpx.AsyncClient) -> float:
        """Share of the KV cache in use: the engine reports it after each step, so one request is run."""
        await post(client, f"{url}/v1/completions", json=body(1))
        return await metric(client, url, "vllm:kv_cache_usage_perc")

    async def started(client: httpx.AsyncClient, streams: list[Stream]) -> bool:
        counts = [await metric(client, url, f"slipstream_{name}_requests") for name in ("running", "waiting")]
        return counts == [MAX_NUM_SEQS, 12] and sum(bool(stream.times) for stream in streams) == MAX_NUM_SEQS

    async def scenario(client: httpx.AsyncClient) -> None:
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
        unlucky = asyncio.create_task(
            post(client, f"{url}/v1/completions", json=body(5), headers={"x-request-id": "job-7"})
        )
        await until(lambda: is_metric(client, url, "slipstream_waiting_requests", 2))
        await post(client, f"{url}/pause?mode=keep")  # no deadlock: another mode, other calls
        assert (await client.get(f"{url}/v1/is_paused")).json()["result"] == {"is_paused": True}
        assert not late.done() and not unlucky.done()
        async with asyncio.timeout(AT_ONCE_S):
            ended = await post(client, f"{url}/v1/abort_requests", json={"req_ids": ["job-7"]})
            assert ended["result"] == {"aborted": ["job-7"], "not_found": []}
            (choice,) = (await unlucky)["choices"]
        assert (choice["finish_reason"], choice["token_ids"], logprobs_of(choice)) == ("abort", [], [])
        await post(client, f"{url}/resume")
        (choice,) = (await late)["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 5)
        assert await blocks(client) == before
        assert await metric(client, url, "slipstream_running_requests") == 0

    run(server, scenario)


# -- abort -------------------------------------------------------------------------------------------------------------


def test_a_request_that_never_ran_answers_in_every_form(server: Server) -> None:
    """Completions and chat, streamed and not, one and two choices, sent while paused: each is answered with `abort`."""

    async def scenario(client: httpx.AsyncClient) -> None:
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

    run(server, scenario)


def test_a_frozen_request_is_aborted_at_once_with_the_tokens_it_has(server: Server) -> None:
    """By the id in its response, through FastDeploy's routes of the gateway; its neighbour goes on."""

    async def scenario(client: httpx.AsyncClient) -> None:
        frozen, neighbour = Stream(), Stream()
        reading = [
            asyncio.create_task(frozen.read(client, server.gateway + path(False), body(LONG, n=2))),
            asyncio.create_task(neighbour.read(client, server.gateway + path(True), body(LONG, chat=True))),
        ]
        await until(lambda: asyncio.sleep(0, len(frozen.token_ids) == 2 and len(neighbour.times) > 3))
        await post(client, f"{server.gateway}/pause?mode=keep")
        async with asyncio.timeout(AT_ONCE_S):
            ended = await post(
                client, f"{server.gateway}/v1/abort_requests", json={"req_ids": [frozen.response_id, "x"]}
            )
            assert ended["result"] == {"aborted": [frozen.response_id], "not_found": ["x"]}
            await reading[0]
        assert frozen.finish == {0: "abort", 1: "abort"}
        assert all(0 < len(token_ids) < LONG for token_ids in frozen.token_ids.values())
        had = await settled(lambda: num_tokens(neighbour))
        await post(client, f"{server.gateway}/v1/resume")
        await until(lambda: asyncio.sleep(0, num_tokens(neighbour) > had + 100))
        assert not reading[1].done()

    run(server, scenario)


# -- the OpenAI protocol -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
def test_tokens_and_logprobs_are_the_same_streamed_and_not(server: Server, chat: bool) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
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

    run(server, scenario)


def test_errors_of_the_engine_come_through_the_gateway(server: Server) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        url = f"{server.gateway}/v1/completions"
        unknown = await client.post(url, json=body(1, model="nobody"))
        assert (unknown.status_code, "nobody" in unknown.json()["error"]["message"]) == (404, True)
        too_long = await client.post(url, json=body(100_000))
        assert (too_long.status_code, "max_tokens" in too_long.text) == (400, True)
        models = (await client.get(f"{server.gateway}/v1/models")).json()
        assert models["data"][0]["id"] == "policy"
        assert (await client.get(f"{server.gateway}/versions")).json() == {"replica-0": 0, "replica-1": 0}
        assert [(await client.get(f"{one}/health")).status_code for one in [server.gateway, *server.replicas]] == [
            200
        ] * 3

    run(server, scenario)


def test_ctrl_c_leaves_nothing_behind(server: Server) -> None:
    """The last of the file: the server is gone afterwards."""
    os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: every process of the group gets it
    assert server.process.wait(END_DEADLINE_S) == 0, server.output.read_text()
    assert server.output.read_text().endswith("stopped\n")
    assert survivors(server.children) == []
