"""The HTTP endpoint of a dialect: a request is answered for as long as its client stays, and the answer is written
whole."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from rollout.chat.messages import Answer
from rollout.http.answers import error_answer
from rollout.http.guard import client_leaves, parse_strictly, run_until
from rollout.sessions.dialects.dialect import Dialect, ParsedRequest
from rollout.sessions.errors import BadRequestError, InternalError, SessionEndedError, SessionError, UnknownKeyError
from rollout.sessions.registry import OpenSessions
from rollout.sessions.session import Session

T = TypeVar("T")
logger = logging.getLogger(__name__)
KEEPALIVE_S = 3.0
"""The seconds between the keepalives of a stream whose answer is being generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectEndpoint:
    """ASGI endpoint of one dialect.

    The whole answer is generated before its first event. A stream that has to wait begins with keepalives, and an
    answer that is not streamed is only late. A client that goes away cancels its call.
    """

    sessions: OpenSessions
    dialect: Dialect
    keepalive_s: float = KEEPALIVE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        keys = self.sessions.keys
        try:
            name = keys.find_session(request.headers, request.path_params.get("session"))
            session, body = self.sessions.find(name), await json_body(request)
            parsed = parse_body(self.dialect.parse, body, int(time.time()), session.recorded)
            self.sessions.leave_out(session, parsed.left_out)
            if keys.is_retry(request.headers):
                parsed = replace(parsed, request=replace(parsed.request, is_retry=True))
        except SessionError as error:
            self.sessions.refused(request.headers, error)
            return await refusal(scope["path"], error)(scope, receive, send)
        exchange = _Exchange(self, name, session, parsed, scope, receive, send)
        await run_until(exchange.watch(), exchange.run())


@dataclass(slots=True)
class _Exchange:
    """One request and its answer."""

    endpoint: DialectEndpoint
    name: str
    """The id of the session."""
    session: Session
    parsed: ParsedRequest
    scope: Scope
    receive: Receive
    send: Send
    answers: Sequence[Answer] | None = field(default=None, init=False)
    """The answers, once they are generated."""
    has_left: bool = field(default=False, init=False)
    """True if the client went away before the end of the answer."""
    has_begun: bool = field(default=False, init=False)
    """True if the head of a stream is written, after which errors are events."""

    async def watch(self) -> None:
        """Return when the client goes away."""
        await client_leaves(self.receive)
        self.has_left = True

    async def run(self) -> None:
        is_whole = False
        try:
            answers = await self._wait()
            if self.parsed.is_stream:
                await self._write_rest(self.endpoint.dialect.events(self.parsed, answers))
            else:
                body = JSONResponse(self.endpoint.dialect.body(self.parsed, answers))
                await body(self.scope, self.receive, self.send)
            is_whole = not self.has_left
        except SessionError as error:
            await self._fail(error)
        except Exception:
            logger.exception("session %s: a request could not be answered", self.name)
            await self._fail(InternalError("the server failed to answer; its log says why"))
        finally:
            if self.answers is not None:
                ids = [answer.answer_id for answer in self.answers]
                self.session.deliver(*ids, whole=is_whole)

    async def _generate(self) -> Sequence[Answer]:
        try:
            self.answers = await self.session.answer(self.parsed.request)
        except asyncio.CancelledError:
            # Either this task is cancelled since the client has left, or the session has cancelled the call.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise SessionEndedError("the session was ended while this was being answered") from None
        if self.parsed.is_stored:
            self.session.store(self.answers[0].answer_id, self.parsed)
        return self.answers

    async def _wait(self) -> Sequence[Answer]:
        """Return the answers, and keep a stream alive until then."""
        generating = asyncio.create_task(self._generate())
        try:
            while self.parsed.is_stream and not generating.done():
                await asyncio.wait((generating,), timeout=self.endpoint.keepalive_s)
                if not generating.done():
                    await self._write_part(self.endpoint.dialect.keepalive)
            return await generating
        finally:
            if not generating.done():
                generating.cancel()
                await asyncio.wait((generating,))
                if not generating.cancelled():
                    generating.exception()  # retrieved, or asyncio would log it: the client has left

    async def _write_rest(self, events: Iterable[bytes]) -> None:
        for event in events:
            await self._write_part(event)
        await asyncio.sleep(0)  # lets `watch` run, so that a client that went away is noticed before the end
        await self.send({"type": "http.response.body", "body": b""})

    async def _write_part(self, part: bytes) -> None:
        if not self.has_begun:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_begun = True
        await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def _fail(self, error: SessionError) -> None:
        self.endpoint.sessions.refused(Headers(scope=self.scope), error)
        if self.has_begun:
            return await self._write_rest([self.endpoint.dialect.error_event(error)])
        await refusal(self.scope["path"], error)(self.scope, self.receive, self.send)


async def json_body(request: Request) -> Any:
    """Return the body of a request as JSON. Raises BadRequestError."""
    try:
        return parse_strictly(await request.body())
    except ValueError as error:
        raise BadRequestError(str(error)) from None


def parse_body(parse: Callable[..., T], *arguments: Any) -> T:
    """Parse a body. Raise BadRequestError for a malformed one, also if it is nested too deeply."""
    try:
        return parse(*arguments)
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def refusal(path: str, error: SessionError) -> JSONResponse:
    answer = error_answer(path, error.status, error.message, error.code, error.param)
    if error.status == UnknownKeyError.status:
        answer.headers["www-authenticate"] = "Bearer"
    return answer
