"""Connections of a server: how many there are, and how long one may take to say what it wants."""

import asyncio
import http
import json
import logging
import resource
from dataclasses import dataclass, field
from functools import partial

import psutil
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from configs.serve import ServeConfig

logger = logging.getLogger(__name__)
SPARE = 128
"""Connections beyond the limit that still get to send a request, so that it can be answered with 503. asyncio
accepts as many before it tells of the first."""

LOOKS = 20
"""Times that a server looks for a request before its deadline has passed. While its event loop is blocked it does not
look, and a client that shares the loop cannot send: neither is the client's fault."""


@dataclass(slots=True)
class Connections:
    """Those of one server that can be closed without loss: they have sent no whole request, or all are answered."""

    limits: ServeConfig
    maximum: int
    idle: "dict[LimitedProtocol, None]" = field(default_factory=dict)
    """Longest idle first."""


class LimitedConfig(uvicorn.Config):
    connections: Connections


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a deadline and a size for headers. At the limit of connections a new one takes the place
    of the one that has been idle for longest, so that half-open ones cannot keep clients out."""

    config: LimitedConfig
    _deadline: asyncio.TimerHandle | None = None
    _has_begun = False
    _reads_headers = False
    _header_bytes = 0
    _num_received = 0
    _refusal = (http.HTTPStatus.BAD_REQUEST, "invalid HTTP request")

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        idle, maximum = self.config.connections.idle, self.config.connections.maximum
        if len(self.connections) > maximum and idle:
            next(iter(idle)).close()
        elif len(self.connections) > maximum + SPARE:
            return transport.abort()
        self._wait_for_request()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._reads_headers and self._deadline is None:  # the next request on a connection that was kept
            self._set_deadline()
        self._num_received = len(data)
        super().data_received(data)
        if self._reads_headers or self._has_begun:  # the latter: it came while the one before is being answered
            self._header_bytes += len(data)
            if self._header_bytes > self.config.connections.limits.max_header_bytes:
                self._refuse_headers()
                self.send_400_response("")

    def on_message_begin(self) -> None:
        self._has_begun = True
        if not self._reads_headers:  # what came with it may be the body of the request before, and is not counted
            self._header_bytes = -self._num_received
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.config.connections.limits.max_header_bytes:
            self._refuse_headers()
            raise ValueError(self._refusal)  # the parser stops, and send_400_response is called
        self._end_deadline()
        self._has_begun = self._reads_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.cycle.response_complete:
            self.config.connections.idle.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete:
            self._wait_for_request()
            if self._has_begun:  # it came with the end of the one before
                self._set_deadline()
        elif self.cycle.more_body:  # so did all of its headers
            self.config.connections.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Answer what uvicorn, or this class, refuses before there is a request."""
        if self.transport.is_closing():
            return
        if self._has_begun and not self._reads_headers:  # it would be taken for the answer to the request before
            return self.close()
        status, message = self._refusal
        body = json.dumps({"error": message}).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.close()

    def close(self) -> None:
        self._end_wait()
        self.transport.close()

    # -- from the first byte of a request to the end of its headers ----------------------------------------------------

    def _wait_for_request(self) -> None:
        self.config.connections.idle[self] = None
        self._reads_headers = True
        self._header_bytes = 0

    def _set_deadline(self, looks: int = LOOKS) -> None:
        wait_s = self.config.connections.limits.header_timeout_s / LOOKS
        then = self._is_late if looks == 1 else partial(self._set_deadline, looks - 1)
        self._deadline = self.loop.call_later(wait_s, then)

    def _end_wait(self) -> None:
        self.config.connections.idle.pop(self, None)
        self._end_deadline()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        limit = f"serve.header_timeout_s={self.config.connections.limits.header_timeout_s:g}"
        if not self._has_begun and self._header_bytes == 0:
            return self.close()
        self._refusal = http.HTTPStatus.REQUEST_TIMEOUT, f"no whole headers within {limit}"
        self.send_400_response("")

    def _refuse_headers(self) -> None:
        limit = f"serve.max_header_bytes={self.config.connections.limits.max_header_bytes}"
        self._refusal = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the headers have more than {limit} bytes"


def affordable(wanted: int) -> int:
    """How many connections this process can have, up to `wanted`: each may need a second one, to a replica. Raises the
    process's own limit of open files where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds() + 2 * SPARE
    if soft != resource.RLIM_INFINITY and soft < used + 2 * wanted:
        soft = used + 2 * wanted if hard == resource.RLIM_INFINITY else min(hard, used + 2 * wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or used + 2 * wanted <= soft:
        return wanted
    allowed = max(1, (soft - used) // 2)
    logger.warning("serve.max_connections=%d: only %d, since ulimit -n is %d", wanted, allowed, soft)
    return allowed
