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
            try:
                _ = parse_strictly(body) if body else None
            except ValueError as error:
                return await error_answer(scope["path"], 400, str(error))(scope, receive, send)
            receive = replay(body, receive)
        await self.app(scope, receive, send)


def parse_strictly(body: bytes) -> Any:
    """The value of a JSON text. Raises ValueError, whose message can be shown in ASCII."""
    try:
        value = json.loads(body.decode(), parse_constant=_not_json, parse_float=_finite)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("the body is no valid JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeError are
        raise ValueError(f"the body is no valid JSON: {ascii(str(error))[1:-1]}") from None
    return value


def _not_json(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is out of range")
    return value
