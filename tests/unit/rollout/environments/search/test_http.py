"""Searches over HTTP: what is sent, what an answer may look like, and what happens while the server is down."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rollout.environments.search.documents import MAX_CHARS, RetrievalError
from rollout.environments.search.http import PROBE, HttpRetriever
from rollout.environments.search.lookup import FAILED, NOTHING, STEP_TIMEOUT_S, Lookup
from rollout.environments.search.tags import agent_loop
from rollout.types import Completion, GenerationRequest
from tests.support.characters import Characters
from tests.support.episodes import make_task
from tests.support.fakes import make_completion, now, settle

URL = "http://retriever:8000/retrieve"
Answer = Callable[[dict[str, Any]], httpx.Response]
REFUSED = httpx.ConnectError("refused")


def hit(text: str, score: float = 1.0) -> dict[str, Any]:
    return {"document": {"id": "7", "contents": f'"About {text}"\n{text}'}, "score": score}


def found(asked: dict[str, Any]) -> httpx.Response:
    """Answer each query with one document that repeats it."""
    queries = asked["queries"] if "queries" in asked else [asked["query"]]
    return httpx.Response(200, json={"result": [[hit(query)] for query in queries]})


class Server(httpx.AsyncBaseTransport):
    """Answers as `answer` says, which may be another one later; an exception in its place is raised."""

    def __init__(self, answer: Answer | Exception = found):
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(await request.aread())
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(asked)


def retriever_at(server: Server, **arguments: Any) -> HttpRetriever:
    return HttpRetriever(URL, transport=server, **arguments)


async def known(server: Server, **arguments: Any) -> HttpRetriever:
    """A retriever whose server has answered once."""
    retriever, answer = retriever_at(server, **arguments), server.answer
    server.answer = found
    assert await texts(retriever, "hello") == [["hello"]]
    server.answer = answer
    server.asked.clear()
    return retriever


async def texts(retriever: HttpRetriever, *queries: str, topk: int = 3) -> list[list[str]]:
    return [[document.text for document in result.documents] for result in await retriever.search(queries, topk)]


async def error_of(retriever: HttpRetriever, query: str = "x") -> str:
    [result] = await retriever.search([query], 3)
    assert result.documents == () and result.error is not None
    return result.error


# -- requests ----------------------------------------------------------------------------------------------------------


async def test_searches_of_concurrent_episodes_are_one_request_in_the_form_of_search_r1() -> None:
    retriever = retriever_at(server := Server())
    answers = await asyncio.gather(*(texts(retriever, query) for query in ("a", "b", " a ", "c")))
    assert answers == [[["a"]], [["b"]], [["a"]], [["c"]]]
    assert server.asked == [{"queries": ["a", "b", "c"], "topk": 3, "return_scores": True}]


async def test_of_searches_that_are_one_request_each_gets_as_many_documents_as_it_wants() -> None:
    many = httpx.Response(200, json={"result": [[hit("a"), hit("b"), hit("c")]] * 2})
    retriever = retriever_at(server := Server(lambda _: many))
    single, three = await asyncio.gather(texts(retriever, "x", topk=1), texts(retriever, "y", topk=3))
    assert (single, three) == ([["a"]], [["a", "b", "c"]])
    assert [request["topk"] for request in server.asked] == [3]


async def test_a_server_that_reads_one_query_gets_one_and_so_many_at_once() -> None:
    retriever = retriever_at(server := Server(), form="query", max_in_flight=2)
    assert await texts(retriever, "a", "b", "c", topk=1) == [["a"], ["b"], ["c"]]
    assert server.asked == [{"query": query, "topk": 1, "return_scores": True} for query in "abc"]


async def test_an_answer_is_asked_for_once_and_the_least_used_is_forgotten() -> None:
    retriever = retriever_at(server := Server(), cache_size=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        assert await texts(retriever, query) == [[query]]
    assert [request["queries"] for request in server.asked] == [["a"], ["b"], ["c"], ["b"]]
    await texts(retriever, "b", topk=1)
    assert len(server.asked) == 5
    assert await texts(retriever, "", "  ") == [[], []] and len(server.asked) == 5


# -- answers -----------------------------------------------------------------------------------------------------------

GOOD = b'{"result": [[{"document": {"contents": "good"}, "score": 1}]]}'


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"<html>", "malformed: JSON is malformed"),
        (b"", "malformed: Input data was truncated"),
        (b"[" * 200_000, "malformed"),
        (b'{"results": []}', "malformed: Object missing required field `result`"),
        (b'{"result": []}', "malformed: 0 results for 1 queries"),
        (b'{"result": [[], []]}', "malformed: 2 results for 1 queries"),
        (b'{"result": [[{"score": 1}]]}', "malformed: Object missing required field `document`"),
        (b'{"result": [[{"document": {"id": 1}, "score": 1}]]}', "malformed: a document has neither"),
        (b'{"result": [[{"document": {"contents": 5}, "score": 1}]]}', "malformed: Expected `str | null`, got `int`"),
        (GOOD.replace(b"good", b"\xff"), "malformed: 'utf-8' codec"),
        (GOOD.replace(b"good", b"\\ud800"), "malformed"),
        (GOOD.replace(b": 1", b": NaN"), "malformed"),
        (GOOD.replace(b": 1", b": 1e999"), "malformed: Number out of range"),
        (GOOD.replace(b": 1", b': "high"'), "malformed: Expected `float`, got `str`"),
        (GOOD + b" " * 2**20, "malformed: more than max_answer_mb=1 MiB"),
    ],
)
async def test_what_cannot_be_read_is_a_failed_search_and_never_an_exception(body: bytes, error: str) -> None:
    retriever = await known(server := Server(lambda _: httpx.Response(200, content=body)), max_answer_mb=1)
    assert (await error_of(retriever)).startswith(error)
    server.answer = lambda _: httpx.Response(200, content=GOOD)
    assert await texts(retriever, "x") == [["good"]]  # what failed is not remembered


async def test_one_bad_document_fails_its_own_query_only() -> None:
    bad = httpx.Response(200, json={"result": [[hit("a")], [{"document": {}, "score": 1.0}]]})
    first, second = await retriever_at(Server(lambda _: bad)).search(["a", "b"], 3)
    assert first.error is None and second.error is not None and second.error.startswith("malformed")


async def test_titles_limits_and_the_forms_of_documents() -> None:
    documents = [
        {"document": {"title": "T", "text": "t"}, "score": 3},
        {"document": {"contents": '"Paris"\nIs a city.\nOn the Seine.'}, "score": 2},
        {"document": {"contents": "one line"}, "score": 1},
        {"document": {"text": "x" * 3 * MAX_CHARS}, "score": 0},
        hit("a fifth"),
    ]
    retriever = retriever_at(Server(lambda _: httpx.Response(200, json={"result": [documents]})))
    [result] = await retriever.search(["x"], 4)
    assert [(each.title, each.text) for each in result.documents[:3]] == [
        *(("T", "t"), ("Paris", "Is a city.\nOn the Seine."), ("", "one line"))
    ]
    assert len(result.documents) == 4 and len(result.documents[3].text) == MAX_CHARS


async def test_a_slow_answer_is_given_up_at_the_deadline() -> None:
    class Slow(Server):
        seconds = 0.0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.sleep(self.seconds)
            return await super().handle_async_request(request)

    retriever = await known(server := Slow(), timeout_s=7.0)
    server.seconds = 100.0
    assert await error_of(retriever) == "no answer within timeout_s=7" and 7 <= now() < 8


async def test_a_connection_that_the_server_has_closed_is_no_failure() -> None:
    class Stale(Server):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if not self.asked:
                self.asked.append({})
                raise httpx.RemoteProtocolError("server disconnected without sending a response")
            return await super().handle_async_request(request)

    assert await texts(retriever_at(Stale()), "x") == [["x"]]


async def test_failed_and_empty_searches_are_counted_apart() -> None:
    retriever = retriever_at(server := Server())
    lookup = Lookup(retriever, 3, lambda text: text)
    assert await lookup.find("a") == "Doc 1(Title: About a) a"
    server.answer = lambda _: httpx.Response(200, json={"result": [[]]})
    assert await lookup.find("b") == NOTHING
    server.answer = lambda _: httpx.Response(500)
    assert await lookup.find("c") == FAILED
    counts = lookup.counts
    assert (counts["searches"], counts["empty_results"], counts["failed_searches"]) == (3, 1, 1)


# -- outages -----------------------------------------------------------------------------------------------------------


async def test_while_the_server_is_down_searches_wait_and_hear_their_documents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    retriever = await known(server := Server(REFUSED), max_failures=3)
    assert [await error_of(retriever, query) for query in "ab"] == ["ConnectError: refused"] * 2
    waiting = [asyncio.create_task(texts(retriever, query)) for query in ("c", "d")]  # c is the third to fail
    await asyncio.sleep(100)
    waiting.append(asyncio.create_task(texts(retriever, "e")))
    assert not any(task.done() for task in waiting)
    probes = [request for request in server.asked[3:] if request["queries"] != [PROBE]]
    assert probes == [] and len(server.asked) < 15
    server.answer = found
    assert await asyncio.gather(*waiting) == [[["c"]], [["d"]], [["e"]]]
    await retriever.close()
    log = [record.getMessage() for record in caplog.records]
    assert any(URL in line and "is down after 3 failures in a row" in line and "refused" in line for line in log)
    assert any("still down, for 61 s" in line for line in log)
    assert f"the retriever at {URL} is back after" in log[-1]


async def test_a_success_between_failures_is_no_outage() -> None:
    retriever = retriever_at(server := Server(), max_failures=2, cache_size=0)
    for _ in range(5):
        server.answer = found
        assert await texts(retriever, "x") == [["x"]]
        server.answer = REFUSED
        await error_of(retriever)


async def test_a_server_that_has_never_answered_is_down_at_its_first_failure() -> None:
    """No episode must be trained on the empty results of a wrong url."""
    retriever = retriever_at(server := Server(lambda _: httpx.Response(404)))
    waiting = asyncio.create_task(texts(retriever, "x"))
    await asyncio.sleep(30)
    server.answer = found
    assert await waiting == [["x"]]
    await retriever.close()


async def test_nobody_waits_longer_than_the_deadline_of_an_outage() -> None:
    retriever = retriever_at(server := Server(REFUSED), max_failures=1, down_timeout_s=50.0)
    for began in (0.0, 40.0, 90.0):
        await asyncio.sleep(max(0.0, began - now()))
        with pytest.raises(RetrievalError, match=f"{URL} is down for more than down_timeout_s=50: ConnectError"):
            await retriever.search(["x"], 3)
        assert now() < max(51, began + 1)
    server.answer = found
    await asyncio.sleep(60)  # the next probe
    assert await texts(retriever, "x") == [["x"]]
    await retriever.close()


async def search_and_answer(requests: list[GenerationRequest]) -> list[Completion]:
    (request,) = requests
    said = "<search>17</search>" if request.request_id.turn == 0 else "<answer>17</answer>"
    return [make_completion([*map(ord, said)], [1] * len(said), "stop")]


@pytest.mark.parametrize("back_after_s", [500.0, None])
async def test_an_episode_outlasts_an_outage_or_fails_without_a_reward(back_after_s: float | None) -> None:
    """The default deadline of a step leaves room for the whole wait."""
    retriever = retriever_at(server := Server(REFUSED), max_failures=1)
    loop = agent_loop(Characters(), retriever=retriever)
    running = asyncio.create_task(loop.run_episode(make_task(max_tokens=1000), search_and_answer))
    if back_after_s is not None:
        await asyncio.sleep(back_after_s)
        server.answer = found
    episode = await running
    assert now() < STEP_TIMEOUT_S
    await retriever.close()
    await settle()
    (sequence,) = episode.sequences
    heard = "".join(map(chr, sequence.response_ids))
    if back_after_s is None:
        assert episode.result is not None and "is down for more than down_timeout_s=600" in str(episode.result.error)
    else:
        assert "<information>Doc 1(Title: About 17) 17</information>" in heard
        assert episode.metrics["failed_searches"] == 0
