"""A server that records sessions, over a policy that says its lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from configs.serve import ServeConfig
from rollout.http.server import listen, listener_url, served
from rollout.http.token import Token
from rollout.sessions.app import SessionGateway, SessionGatewayAccess, session_app
from rollout.sessions.archive import SessionArchive, SessionRecord
from rollout.sessions.budget import make_limits
from rollout.sessions.codec import make_codec
from rollout.types import GenerationRequest, SamplingParams
from tests.support.harnesses import Policy
from tests.support.real_clock import Test, beside

SERVER_TOKEN = "the server's own"
DEADLINE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A session that is open, as its client sees it."""

    id: str
    key: str
    base_url: str

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, **options)

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.base_url, api_key=self.key, **options)


@dataclass
class Recorder:
    """The server and its records, after a round trip over JSON."""

    url: str
    client: httpx.AsyncClient
    policy: Policy
    archive: SessionArchive = field(init=False)
    records: list[dict[str, Any]] = field(default_factory=list)
    errors: list[OSError] = field(default_factory=list)
    """The errors that the next writes raise."""

    def write(self, record: SessionRecord) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.records.append(json.loads(record.to_json()))

    async def open(self, **task: Any) -> Opened:
        answer = await self.post("/sessions", SERVER_TOKEN, task)
        assert answer.status_code == 201, answer.text
        return Opened(**answer.json())

    async def post(self, path: str, key: str | None = None, body: Any = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.client.post(self.url + path, json=body, headers=headers)

    async def end(self, session: Opened, how: str = "finish") -> httpx.Response:
        return await self.post(f"/sessions/{session.id}/{how}", session.key)

    async def recorded(self, count: int = 1) -> list[dict[str, Any]]:
        """Return at least `count` records. Raises TimeoutError."""
        async with asyncio.timeout(10):
            while len(self.records) < count:
                await asyncio.sleep(0.01)
        return self.records


@asynccontextmanager
async def recording(
    policy: Policy,
    *,
    refusal: str | None = None,
    is_configured: bool = False,
    is_drafted: bool = False,
    max_tokens: int = 1000,
    **sessions: Any,
) -> AsyncIterator[Recorder]:
    """Serve an archive of sessions. `refusal` says why it opens none. With `is_configured` the server's token is one
    that the user gave, which generation needs too."""
    config = Config(rollout=RolloutConfig(max_response_tokens=max_tokens), sessions=SessionsConfig(**sessions))
    listener = listen("127.0.0.1", 0)
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        recorder = Recorder(listener_url(listener), client, policy)
        archive = recorder.archive = SessionArchive(
            codec=refusal or make_codec(config.sessions, policy.tokenizer),
            limits=make_limits(config),
            sampling=SamplingParams(max_tokens=max_tokens, top_p=0.9),
            model="policy",
            route=lambda: policy.generate,
            max_open=config.sessions.max_open,
            write=recorder.write,
            is_drafted=is_drafted,
        )
        app = SessionGateway(session_app(archive), elsewhere())
        access = SessionGatewayAccess.of(
            ServeConfig(), Token(SERVER_TOKEN, is_configured=is_configured), on_loopback=True
        )
        async with served(app, listener, access=access), archive.watched():
            yield recorder


def elsewhere() -> Starlette:
    """An app that stands for the gateway."""

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("from the gateway")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])


def run_recorded(policy: Policy, test: Callable[[Recorder], Awaitable[None]], **options: Any) -> Recorder:
    """Run the test on the real clock, and return the recorder as the server has left it."""

    async def main() -> Recorder:
        async with asyncio.timeout(DEADLINE_S), recording(policy, **options) as recorder:
            await test(recorder)
        return recorder

    return asyncio.run(main())


def on_recorder(say: Callable[[str, GenerationRequest], str], **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Return a decorator of tests of `async def test(recorder, ...)`, whose policy says what `say` returns."""

    async def serve(test: Callable[[Recorder], Awaitable[None]]) -> None:
        async with asyncio.timeout(DEADLINE_S), recording(Policy(say), **options) as recorder:
            await test(recorder)

    return beside(serve)
