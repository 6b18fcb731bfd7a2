"""Refuses JSON that Python's parser takes and an engine should not get: NaN, infinity, halves of characters."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.http.answers import error_answer
from rollout.http.guard import replay

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class StrictJson:
    """ASGI middleware in front of an app that parses bodies itself. The gateway passes bodies on without a look."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "json" in Request(scope).headers.get("content-type", "").lower():
            body = await Request(scope, receive).body()
            if (problem := _problem(body)) is not None:
                answer = error_answer(scope["path"], 400, f"the body is no valid JSON: {problem}")
                return await answer(scope, receive, send)
            receive = replay(body, receive)
        await self.app(scope, receive, send)


def _problem(body: bytes) -> str | None:
    if not body:
        return None
    try:
        value = json.loads(body.decode(), parse_constant=_not_json, parse_float=_finite)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:  # JSONDecodeError and UnicodeError are
        return ascii(str(error))[1:-1]
    return None


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is out of range")
    return value
