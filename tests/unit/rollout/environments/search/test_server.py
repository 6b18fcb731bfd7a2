"""Our client and our server, each with the other and with one written after Search-R1's, over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp

from rollout.environments.search.documents import Document, Found, RetrievalError
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.http import HttpRetriever
from rollout.environments.search.server import retriever_app
from rollout.environments.search.wire import MAX_QUERIES
from rollout.http.server import listen, listener_url, served
from tests.support.http_clients import client_of
from tests.support.real_clock import on_real_clock

TOWNS = [
    Document(title="Marjol", text="Marjol is a city on the river Tord."),
    Document(title="Kerdos", text="Kerdos is a city.\nIts twin is Marjol."),
    Document(text="A village without a name."),
]


@asynccontextmanager
async def served_at(app: ASGIApp) -> AsyncIterator[str]:
    with listen("127.0.0.1", 0) as listener:
        async with served(app, listener):
            yield f"{listener_url(listener)}/retrieve"


@pytest.mark.parametrize("form", ["queries", "query"])
@on_real_clock
async def test_our_client_hears_from_our_server_what_the_retriever_found(form: str) -> None:
    queries = ["city Marjol", "village", "nothing fits", 'twin "of" (Marjol', "été \ud800"]
    async with served_at(retriever_app(local := Fts5Retriever(TOWNS))) as url:
        remote = HttpRetriever(url, form=form)
        results = await remote.search(queries, 2)
        assert results == await local.search(queries, 2)
        assert [len(result.documents) for result in results] == [2, 1, 0, 2, 0]
        await remote.close()


class QueryRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def original_app() -> FastAPI:
    """Make a server like `retrieval_server.py` of Search-R1, whose documents are rows with id and contents."""
    app = FastAPI()
    rows = [{"id": str(number), "contents": f'"{town.title}"\n{town.text}'} for number, town in enumerate(TOWNS)]

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, list[list[object]]]:
        results: list[list[object]] = []
        for query in request.queries:
            best = [row for row in rows if query in row["contents"]][: request.topk]
            results.append([{"document": row, "score": 0.5} for row in best] if request.return_scores else [*best])
        return {"result": results}

    return app


@on_real_clock
async def test_our_client_reads_a_server_like_that_of_search_r1() -> None:
    async with served_at(original_app()) as url:
        remote = HttpRetriever(url)
        results = await remote.search(["city", "Tord", "nowhere"], 2)
        expected = [Document(title=town.title, text=town.text, score=0.5) for town in TOWNS[:2]]
        assert results == [Found(tuple(expected)), Found((expected[0],)), Found()]
        alone = HttpRetriever(url, form="query", down_timeout_s=0.1)
        with pytest.raises(RetrievalError, match="HTTPStatusError: 422 .*queries"):
            await alone.search(["city"], 2)
        await remote.close()
        await alone.close()


@on_real_clock
async def test_a_client_like_that_of_search_r1_reads_our_server() -> None:
    async with served_at(retriever_app(Fts5Retriever(TOWNS), topk=1)) as url, httpx.AsyncClient() as client:
        body = {"queries": ["Marjol", "village"], "topk": 3, "return_scores": True}
        result = (await client.post(url, json=body)).json()["result"]
        shown = [[item["document"]["contents"] for item in items] for items in result]
        assert shown == [[f'"{town.title}"\n{town.text}' for town in TOWNS[:2]], [TOWNS[2].text]]
        assert all(item["score"] > 0 for items in result for item in items)
        [[plain]] = (await client.post(url, json={"query": "Marjol"})).json()["result"]
        assert plain == {"title": "Marjol", "text": TOWNS[0].text, "contents": shown[0][0]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"nope", "the body must be JSON such as"),
        (b"\xff", "the body must be JSON such as"),
        (b"[" * 100_000, "the body must be JSON such as"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "either `queries`, a list of texts, or `query`, a text, must be given"),
        (b'{"query": "x", "queries": ["x"]}', "either `queries`"),
        (b'{"queries": "x"}', "got `str` - at `$.queries`"),
        (b'{"queries": [null]}', "Expected `str`, got `null` - at `$.queries[0]`"),
        (b'{"query": "x", "topk": 0}', "topk=0: must be from 1 to 100"),
        (b'{"query": "x", "topk": 1000000}', "topk=1000000: must be from 1 to 100"),
        (b'{"query": "x", "topk": "3"}', "got `str` - at `$.topk`"),
        (b'{"queries": [%b"x"]}' % (b'"x", ' * MAX_QUERIES), "queries: has 1025, at most 1024 are allowed"),
    ],
)
@on_real_clock
async def test_a_bad_request_is_told_what_is_wrong(body: bytes, message: str) -> None:
    async with client_of(retriever_app(Fts5Retriever(TOWNS))) as client:
        answer = await client.post("/retrieve", content=body)
        assert answer.status_code == 400 and message in answer.json()["error"]


@on_real_clock
async def test_other_routes_and_searches_that_fail() -> None:
    class Down:
        async def search(self, queries: object, topk: int) -> list[Found]:
            return [Found(error="no answer")]

        async def close(self) -> None: ...

    async with client_of(retriever_app(Down())) as client:
        answer = await client.post("/retrieve", json={"query": "x"})
        assert (answer.status_code, answer.json()) == (503, {"error": "no answer"})
        answer = await client.get("/retrieve")
        assert answer.status_code == 405 and "there is only POST /retrieve" in answer.json()["error"]
        assert (await client.get("/corpus")).json() == {}
        assert (await client.post("/search")).status_code == 404
        assert (await client.get("/health")).json() == {"status": "ok"}
