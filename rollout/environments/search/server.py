"""Serves a retriever with the HTTP API of Search-R1's retrieval server, so that either side can be replaced."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollout.environments.search.documents import RetrievalError, Retriever
from rollout.environments.search.wire import answer_body, read_request

PATH = "/retrieve"
CORPUS = "/corpus"
"""The route that says what is searched."""


def retriever_app(retriever: Retriever, topk: int = 3, searched: Mapping[str, Any] = MappingProxyType({})) -> Starlette:
    """Make the app: POST /retrieve in both forms of `wire`, GET /corpus and GET /health.

    `topk`: for requests that say none. `searched`: what /corpus answers, as `what_is_searched` does.

    A bad request is answered with 400, and a search that failed with 503: {"error": why}.
    """

    async def retrieve(request: Request) -> Response:
        try:
            queries, wanted, return_scores = read_request(await request.body(), topk)
        except ValueError as error:
            return _refusal(400, str(error))
        try:
            results = await retriever.search(queries, wanted)
        except RetrievalError as error:
            return _refusal(503, str(error))
        errors = [answer.error for answer in results if answer.error is not None]
        if errors:
            return _refusal(503, errors[0])
        return Response(answer_body(results, return_scores), media_type="application/json")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def corpus(request: Request) -> Response:
        return JSONResponse(dict(searched))

    return Starlette(
        routes=[Route(PATH, retrieve, methods=["POST"]), Route(CORPUS, corpus), Route("/health", health)],
        exception_handlers={404: _no_route, 405: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    status = 405 if path in (PATH, CORPUS, "/health") else 404
    there_is = f"there is only POST {PATH}, GET {CORPUS} and GET /health"
    return _refusal(status, f"{request.method} {path}: {there_is}")


def _refusal(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why.encode(errors="replace").decode()}, status_code=status)
