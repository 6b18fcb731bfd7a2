"""One call of a harness: its request is answered for as long as its client stays, and the answer is written whole."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from rollout.http.answers import error_answer
from rollout.http.strict_json import parse_strictly
from rollout.sessions.backend import SessionBackend
from rollout.sessions.dialects.dialect import Asked, Dialect
from rollout.sessions.errors import BadRequestError, SessionEndedError, SessionError, UnknownKeyError
from rollout.sessions.keys import SessionKeys
from rollout.sessions.messages import Answer

T = TypeVar("T")
logger = logging.getLogger(__name__)
KEEPALIVE_S = 3.0
"""How often a stream says that it is alive while its answer is being generated."""


class InternalError(SessionError):
    """The backend failed. What happened is in the log of the server, and not the client's matter."""

    status = 500
    code = "internal_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """ASGI endpoint of one dialect.

    The whole answer is generated before its first event. A stream that has to wait begins with keepalives; an answer
    that is no stream is only late. A client that goes away cancels the backend's call.
    """

    backend: SessionBackend
    keys: SessionKeys
    dialect: Dialect
    keepalive_s: float = KEEPALIVE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            session = self.keys.session_of(request.headers, request.path_params.get("session"))
            asked = understood(self.dialect.parse, await json_body(request), int(time.time()))
            if self.keys.is_retry(request.headers):
                asked = replace(asked, request=replace(asked.request, is_retry=True))
        except SessionError as error:
            return await refusal(scope["path"], error)(scope, receive, send)
        call = _Call(self, session, asked, scope, receive, send)
        working, leaving = asyncio.create_task(call.run()), asyncio.create_task(call.watch())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait((working, leaving))
        if not working.cancelled():
            working.result()


@dataclass(slots=True)
class _Call:
    """What is under way for one request."""

    endpoint: Conversation
    session: str
    asked: Asked
    scope: Scope
    receive: Receive
    send: Send
    answers: Sequence[Answer] | None = field(default=None, init=False)
    """Once the backend has returned them."""
    has_left: bool = field(default=False, init=False)
    """Whether the client went away before the end of the answer."""
    has_begun: bool = field(default=False, init=False)
    """Whether the head of a stream is written: then errors are events."""

    async def watch(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True

    async def run(self) -> None:
        is_whole = False
        try:
            await self._write(await self._wait())
            is_whole = not self.has_left
        except SessionError as error:
            await self._fail(error)
        except Exception:
            logger.exception("session %s: a request could not be answered", self.session)
            await self._fail(InternalError("the server failed to answer; its log says why"))
        finally:
            if self.answers is not None:
                self.endpoint.backend.delivered(self.session, [each.answer_id for each in self.answers], is_whole)

    async def _generate(self) -> Sequence[Answer]:
        try:
            self.answers = await self.endpoint.backend.answer(self.session, self.asked.request)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise SessionEndedError("the session was ended while this was being answered") from None
        return self.answers

    async def _wait(self) -> Sequence[Answer]:
        generating = asyncio.create_task(self._generate())
        try:
            while self.asked.is_stream and not generating.done():
                await asyncio.wait((generating,), timeout=self.endpoint.keepalive_s)
                if not generating.done():
                    await self._write_part(self.endpoint.dialect.keepalive)
            return await generating
        finally:
            if not generating.done():
                generating.cancel()
                await asyncio.wait((generating,))
                if not generating.cancelled():
                    generating.exception()  # for nobody: the client has left

    async def _write(self, answers: Sequence[Answer]) -> None:
        if self.asked.is_stream:
            return await self._write_rest(self.endpoint.dialect.events(self.asked, answers))
        await JSONResponse(self.endpoint.dialect.body(self.asked, answers))(self.scope, self.receive, self.send)

    async def _write_rest(self, events: Iterable[bytes]) -> None:
        for event in events:
            await self._write_part(event)
        await asyncio.sleep(0)  # a client that went away meanwhile is noticed before the end
        await self.send({"type": "http.response.body", "body": b""})

    async def _write_part(self, part: bytes) -> None:
        if not self.has_begun:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_begun = True
        await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def _fail(self, error: SessionError) -> None:
        if self.has_begun:
            return await self._write_rest([self.endpoint.dialect.error_event(error)])
        await refusal(self.scope["path"], error)(self.scope, self.receive, self.send)


async def json_body(request: Request) -> Any:
    """Raises BadRequestError."""
    try:
        return parse_strictly(await request.body())
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def understood(parse: Callable[..., T], *arguments: Any) -> T:
    """What `parse` makes of a body. Raises BadRequestError, also for a body that is nested too deeply for it."""
    try:
        return parse(*arguments)
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def refusal(path: str, error: SessionError) -> JSONResponse:
    answer = error_answer(path, error.status, error.message, error.code, error.param)
    if error.status == UnknownKeyError.status:
        answer.headers["www-authenticate"] = "Bearer"
    return answer
