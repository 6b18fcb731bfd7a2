"""Our client and our server, each with the other and with one written after Search-R1's, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel
from starlette.types import ASGIApp

from rollout.http.server import listen, served, url_of
from rollout.search.documents import Document, Found, RetrievalError
from rollout.search.fts5 import Fts5Retriever
from rollout.search.http import HttpRetriever
from rollout.search.server import retriever_app
from rollout.search.wire import MAX_QUERIES
from tests.support.http_clients import client_of

TOWNS = [
    Document(title="Marjol", text="Marjol is a city on the river Tord."),
    Document(title="Kerdos", text="Kerdos is a city.\nIts twin is Marjol."),
    Document(text="A village without a name."),
]


@asynccontextmanager
async def served_at(app: ASGIApp) -> AsyncIterator[str]:
    with listen("127.0.0.1", 0) as listener:
        async with served(app, listener):
            yield f"{url_of(listener)}/retrieve"


@pytest.mark.parametrize("form", ["queries", "query"])
def test_our_client_hears_from_our_server_what_the_retriever_found(form: str) -> None:
    queries = ["city Marjol", "village", "nothing fits", 'twin "of" (Marjol', "été \ud800"]

    async def main() -> None:
        async with served_at(retriever_app(local := Fts5Retriever(TOWNS))) as url:
            remote = HttpRetriever(url, form=form)
            found = await remote.search(queries, 2)
            assert found == await local.search(queries, 2)
            assert [len(one.documents) for one in found] == [2, 1, 0, 2, 0]
            await remote.close()

    asyncio.run(main())


class QueryRequest(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def original_app() -> FastAPI:
    """As Search-R1's `retrieval_server.py` has it: documents are rows of its corpus, with an id and contents."""
    app = FastAPI()
    rows = [{"id": str(number), "contents": f'"{one.title}"\n{one.text}'} for number, one in enumerate(TOWNS)]

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, list[list[object]]]:
        results: list[list[object]] = []
        for query in request.queries:
            best = [row for row in rows if query in row["contents"]][: request.topk]
            results.append([{"document": row, "score": 0.5} for row in best] if request.return_scores else [*best])
        return {"result": results}

    return app


def test_our_client_reads_a_server_like_that_of_search_r1() -> None:
    async def main() -> None:
        async with served_at(original_app()) as url:
            remote = HttpRetriever(url)
            found = await remote.search(["city", "Tord", "nowhere"], 2)
            expected = [Document(title=one.title, text=one.text, score=0.5) for one in TOWNS[:2]]
            assert found == [Found(tuple(expected)), Found((expected[0],)), Found()]
            alone = HttpRetriever(url, form="query", down_timeout_s=0.1)
            with pytest.raises(RetrievalError, match="HTTPStatusError: 422 .*queries"):
                await alone.search(["city"], 2)
            await remote.close()
            await alone.close()

    asyncio.run(main())


def test_a_client_like_that_of_search_r1_reads_our_server() -> None:
    """With scores, and without."""

    async def main() -> None:
        async with served_at(retriever_app(Fts5Retriever(TOWNS), topk=1)) as url, httpx.AsyncClient() as client:
            asked = {"queries": ["Marjol", "village"], "topk": 3, "return_scores": True}
            result = (await client.post(url, json=asked)).json()["result"]
            shown = [[item["document"]["contents"] for item in one] for one in result]
            assert shown == [[f'"{one.title}"\n{one.text}' for one in TOWNS[:2]], [TOWNS[2].text]]
            assert all(item["score"] > 0 for one in result for item in one)
            [[plain]] = (await client.post(url, json={"query": "Marjol"})).json()["result"]
            assert plain == {"title": "Marjol", "text": TOWNS[0].text, "contents": shown[0][0]}

    asyncio.run(main())


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
def test_a_bad_request_is_told_what_is_wrong(body: bytes, message: str) -> None:
    async def main() -> None:
        async with client_of(retriever_app(Fts5Retriever(TOWNS))) as client:
            answer = await client.post("/retrieve", content=body)
            assert answer.status_code == 400 and message in answer.json()["error"]

    asyncio.run(main())


def test_other_routes_and_searches_that_fail() -> None:
    class Down:
        async def search(self, queries: object, topk: int) -> list[Found]:
            return [Found(error="no answer")]

        async def close(self) -> None: ...

    async def main() -> None:
        async with client_of(retriever_app(Down())) as client:
            answer = await client.post("/retrieve", json={"query": "x"})
            assert (answer.status_code, answer.json()) == (503, {"error": "no answer"})
            answer = await client.get("/retrieve")
            assert answer.status_code == 405 and "there is only POST /retrieve" in answer.json()["error"]
            assert (await client.get("/corpus")).json() == {}
            assert (await client.post("/search")).status_code == 404
            assert (await client.get("/health")).json() == {"status": "ok"}

    asyncio.run(main())
