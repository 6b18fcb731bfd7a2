"""Retrieval servers without a network: what they are asked, and what they answer."""

import json
from collections.abc import Callable
from typing import Any

import httpx

URL = "http://retriever:8000/retrieve"
Answer = Callable[[dict[str, Any]], httpx.Response]


def hit(text: str, score: float = 1.0) -> dict[str, Any]:
    return {"document": {"id": "7", "contents": f'"About {text}"\n{text}'}, "score": score}


def found(asked: dict[str, Any]) -> httpx.Response:
    """For each query one document that repeats it."""
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
