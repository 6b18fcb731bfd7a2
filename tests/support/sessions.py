"""Sessions that give the answers of a script, and a real server over them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.chat.messages import Answer, ChatRequest, Finish, Message, Role, ToolCall
from rollout.http.server import DEFAULTS, listen, listener_url, served
from rollout.http.token import Token
from rollout.sessions.app import SessionGatewayAccess, session_app
from rollout.sessions.dialects.dialect import ParsedRequest
from rollout.sessions.registry import OpenSessions, Reward, SessionKeys
from rollout.types import Completion, VersionSpan
from tests.support.real_clock import Test, beside

SERVER_TOKEN = "the server's own"
PROMPT_IDS = (5, 6, 7)
DEADLINE_S = 60


def make_answer(content: str = "four", *, number: int = 0, finish: Finish = Finish.stop, **said: Any) -> Answer:
    message = Message(role=Role.assistant, content=content, **said)
    ids, logprobs = np.array([11, 12], np.int32), np.array([-0.5, -0.25], np.float32)
    completion = Completion(
        token_ids=ids, logprobs=logprobs, spans=(VersionSpan(0, 2, 3),), finish_reason="stop", cached_tokens=2
    )
    return Answer(answer_id=f"g_{number}", message=message, finish=finish, prompt_ids=PROMPT_IDS, completion=completion)


def call_answer(number: int = 0, expression: str = "2 + 2") -> Answer:
    call = ToolCall(call_id=f"call_{number}_0", name="calculator", arguments=f'{{"expression": "{expression}"}}')
    return make_answer("", number=number, finish=Finish.tool_calls, tool_calls=(call,))


class FakeSession:
    """A session of `FakeSessions`, which have what it was asked and what it answers."""

    def __init__(self, name: str, sessions: "FakeSessions"):
        self._name, self._sessions = name, sessions

    async def answer(self, request: ChatRequest) -> Sequence[Answer]:
        sessions = self._sessions
        sessions.requests.append(request)
        sessions.events.append(("answer", self._name))
        if sessions.gate is not None:
            try:
                await sessions.gate.wait()
            except asyncio.CancelledError:
                sessions.events.append(("cancelled", self._name))
                raise
        if not sessions.script:
            return [make_answer(number=number) for number in range(request.num_answers)]
        answers = sessions.script.pop(0)
        if isinstance(answers, BaseException):
            raise answers
        return answers

    def deliver(self, *answer_ids: str, whole: bool) -> None:
        self._sessions.events.append(("delivered", self._name, list(answer_ids), whole))

    async def count_tokens(self, request: ChatRequest) -> int:
        return sum(len(message.content.split()) for message in request.messages)

    def recorded(self, answer_id: str) -> None:
        return None

    def leave_out(self, names: Sequence[str]) -> None:
        pass

    def store(self, answer_id: str, parsed: ParsedRequest) -> None:
        pass


class FakeSessions(OpenSessions):
    """Gives the answers of `script`, one entry a call, and then the default answer. An error in it is raised."""

    def __init__(self, gate: asyncio.Event | None = None):
        """Answers wait until `gate` is set."""
        super().__init__("policy")
        self.script: list[list[Answer] | BaseException] = []
        self.requests: list[Any] = []
        self.events: list[tuple[Any, ...]] = []
        self.gate = gate

    async def create(self, task: Mapping[str, Any]) -> str:
        self.events.append(("create", task))
        return f"s{len(self.events)}"

    def find(self, session: str) -> Any:
        return FakeSession(session, self)

    async def reward(self, session: str, reward: Reward) -> None:
        self.events.append(("reward", session, reward))

    async def finish(self, session: str) -> None:
        self.events.append(("finish", session))

    async def transcript(self, session: str) -> Mapping[str, Any]:
        return {"id": session, "generations": len(self.requests)}


@dataclass(frozen=True)
class World:
    sessions: FakeSessions
    url: str

    @property
    def keys(self) -> SessionKeys:
        return self.sessions.keys

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def on_server(keepalive_s: float = 30.0) -> Callable[[Test], Callable[..., None]]:
    """Return a decorator of tests that run on the real clock, beside a server on a port of its own."""

    async def serve(test: Callable[[World], Awaitable[None]]) -> None:
        sessions, listener = FakeSessions(), listen("127.0.0.1", 0)
        access = SessionGatewayAccess.of(DEFAULTS, Token(SERVER_TOKEN, is_configured=False), on_loopback=True)
        app = session_app(sessions, keepalive_s)
        async with asyncio.timeout(DEADLINE_S), served(app, listener, access=access):
            await test(World(sessions, listener_url(listener)))

    return beside(serve)


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)
