"""Environments behind an OpenEnv server (huggingface/OpenEnv): one WebSocket at /ws per episode.

rollout.agent_loop=rollout.environments.openenv:agent_loop rollout.agent_args.url=http://localhost:8000

It speaks the wire form itself, with `websockets` and `httpx`: neither the package openenv nor that of the environment
is needed here. The server's plain HTTP routes /reset and /step make a new environment for every request, so only the
socket can hold an episode.
"""

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Unpack
from urllib.parse import urlsplit, urlunsplit

import httpx

from configs.runtime.dotted import find
from configs.serve import is_loopback
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role
from rollout.environments.optional import optional
from rollout.environments.turns import TurnOptions, turns
from rollout.types import Prompt

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 16 * 2**20
"""The longest message. A longer one loses the connection, and its episode with it."""
CLOSE_S = 5.0
FULL, WRONG_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Codes of the server's errors: all its sessions are taken; the action does not fit its schema."""
RETRY_S = 0.05, 1.0
"""The seconds between the first two tries for a session, and at most."""
_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class OpenEnvError(RuntimeError):
    """The server, its environment or the connection failed: the episode has no reward."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code
        """The code of the server, such as EXECUTION_ERROR."""


class InvalidActionError(ValueError):
    """The policy wrote what is no action. The text says why."""


class Session:
    """A socket, and so an environment of the server.

    Example:
        session = await Session.open("http://localhost:8000")
        await session.ask("reset", {"seed": 3})  # {"observation": {...}, "reward": None, "done": False}
        await session.ask("step", {"message": "north"})
        await session.close()
    """

    def __init__(self, url: str, socket: Any):
        self._url, self._socket = url, socket

    @classmethod
    async def open(cls, url: str) -> "Session":
        """Connect. Raises OpenEnvError when there is no server, and ImportError without websockets."""
        client = optional("websockets.asyncio.client", "websockets")
        try:
            socket = await client.connect(
                _address(url, "ws", {"http": "ws", "https": "wss"}),
                compression=None,
                max_size=MAX_MESSAGE_BYTES,
                close_timeout=CLOSE_S,
                ping_timeout=None,  # a slow step is no lost connection; each has its own deadline
                proxy=None if is_loopback(urlsplit(url).hostname or "") else True,
            )
        except (OSError, optional("websockets", "websockets").WebSocketException) as error:
            raise OpenEnvError(f"rollout.agent_args.url={url}: no connection: {error}") from error
        return cls(url, socket)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the data of the answer to a reset, step or state. Raises OpenEnvError."""
        closed = optional("websockets", "websockets").ConnectionClosed
        with suppress(closed):  # the server may have said why before it closed
            await self._socket.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        try:
            answer = json.loads(await self._socket.recv())
            is_error, reply = answer["type"] == "error", dict(answer["data"])
            message = _explained(reply) if is_error else ""
        except closed as error:
            raise OpenEnvError(f"{self._url}: lost the connection in a {kind}: {error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OpenEnvError(f"{self._url}: answered a {kind} with what is no message of OpenEnv: {error}") from error
        if is_error:
            raise OpenEnvError(f"{self._url}: {kind} failed: {message}", reply.get("code", ""))
        return reply

    async def close(self) -> None:
        """End the environment of the server."""
        with suppress(optional("websockets", "websockets").ConnectionClosed):
            await self._socket.send(json.dumps({"type": "close"}))
        await self._socket.close()


def _address(url: str, route: str, schemes: Mapping[str, str]) -> str:
    """Return the address of a route of the server. `schemes`: those that it has in place of others."""
    parts = urlsplit(url)
    scheme = schemes.get(parts.scheme, parts.scheme)
    return urlunsplit((scheme, parts.netloc, f"{parts.path.rstrip('/')}/{route}", "", ""))


def _explained(error: Mapping[str, Any]) -> str:
    """Return the text of the server's error, with what is wrong with which field."""
    text = f"{error.get('message')}"
    wrong = [f"{'.'.join(map(str, field['loc']))}: {field['msg']}" for field in error.get("errors", ())]
    return f"{text}: {'; '.join(wrong)}" if wrong else text


@dataclass(frozen=True, slots=True)
class ActionSchema:
    """The fields of an action, by the server's /schema, and how a text becomes one.

    Example: ActionSchema({"properties": {"message": {"type": "string"}}}).read("north") == {"message": "north"}
    """

    schema: Mapping[str, Any]
    field: str | None = None
    """The field that takes the text. None: the only one that is required, or that there is; with several, the text is a
    JSON object."""

    def read(self, text: str) -> Mapping[str, Any]:
        """Make an action of a text. Raises InvalidActionError, and ValueError for a field that there is not."""
        fields = {name: schema for name, schema in self.schema.get("properties", {}).items() if name != "metadata"}
        required = [name for name in self.schema.get("required", ()) if name in fields] or list(fields)
        name = required[0] if self.field is None and len(required) == 1 else self.field
        if name is None:
            action = _json(text, f"a JSON object with the keys {', '.join(fields)}")
            if not isinstance(action, Mapping):
                raise InvalidActionError(f"an action is a JSON object with the keys {', '.join(fields)}")
            return action
        if name not in fields:
            raise ValueError(f"rollout.agent_args.field={name}: an action of the server has {', '.join(fields)}")
        return {name: _value(text, _type(fields[name]))}


def _type(schema: Mapping[str, Any]) -> str:
    """Return the JSON type, also that of `X | None`."""
    either = [option["type"] for option in schema.get("anyOf", ()) if option.get("type", "null") != "null"]
    return schema.get("type", either[0] if either else "")


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    if kind in ("integer", "number"):
        numbers = (_INTEGER if kind == "integer" else _NUMBER).findall(text)
        if not numbers:
            raise InvalidActionError(f"an action has one {kind}")
        try:
            return int(numbers[-1]) if kind == "integer" else float(numbers[-1])
        except ValueError as error:  # Python reads no integer of thousands of digits
            raise InvalidActionError(f"an action is a shorter {kind}") from error
    return _json(text, "JSON")


def _json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidActionError(f"an action is {expected}") from error


def readable(observation: Mapping[str, Any]) -> str:
    """Return the only text that is not empty among the fields; else all fields, as JSON.

    Example: readable({"stdout": "4", "stderr": "", "exit_code": 0}) == "4"
    """
    texts = [value for value in observation.values() if isinstance(value, str) and value]
    is_alone = all(isinstance(value, str) or not value for value in observation.values())
    return texts[0] if len(texts) == 1 and is_alone else json.dumps(observation, ensure_ascii=False)


@dataclass(eq=False, kw_only=True)
class Server:
    """A server, and the functions that make texts of its observations and actions of texts."""

    url: str
    act: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
    """(text, JSON schema of an action) -> action. Raises InvalidActionError for what is none."""
    observe: Callable[[Mapping[str, Any]], str]
    state_metrics: Sequence[str] = ()
    """Numbers of the environment's state that are logged when an episode is over."""
    is_known_full: bool = False
    """True once it was logged that all its sessions were taken."""
    _schema: Mapping[str, Any] | None = None

    async def schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of an action, which is asked for once. Raises OpenEnvError."""
        if self._schema is None:
            try:
                address = _address(self.url, "schema", {"ws": "http", "wss": "https"})
                async with httpx.AsyncClient(trust_env=not is_loopback(urlsplit(self.url).hostname or "")) as client:
                    self._schema = dict((await client.get(address)).raise_for_status().json()["action"])
            except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
                why = f"{type(error).__name__}: {error}"
                raise OpenEnvError(f"rollout.agent_args.url={self.url}: has no /schema of an action: {why}") from error
        return self._schema

    def read(self, data: Mapping[str, Any]) -> str:
        """Return the text of the observation. Raises OpenEnvError where there is none."""
        if not isinstance(data.get("observation"), Mapping):
            raise OpenEnvError(f"{self.url}: an answer has no observation, but {sorted(data)}")
        return self.observe(data["observation"])


class OpenEnvEnvironment:
    """One episode. The reward is the sum of what the steps give; where none gives one, rollout.reward scores the text.

    What is no action, to us or to the server, is answered with a hint and counted in agent/invalid_actions.
    """

    def __init__(self, server: Server, reset: Mapping[str, Any], *, is_chat: bool):
        """`reset`: arguments of the server's reset. The environment ignores those that it does not take."""
        self._server, self._reset, self._is_chat = server, reset, is_chat
        self._session: Session | None = None
        self._schema: Mapping[str, Any] = {}

    async def reset(self) -> Observation:
        """Begin the episode. Waits while all sessions of the server are taken. Raises OpenEnvError."""
        self._schema = await self._server.schema()
        data = await self._begun()
        if data.get("done"):
            raise OpenEnvError(f"{self._server.url}: the episode is over before its first turn")
        return self._observed(self._server.read(data))

    async def step(self, turn: Turn, /) -> Step:
        assert self._session is not None
        try:
            action = self._server.act(turn.content, self._schema)
        except InvalidActionError as error:
            return self._hint(str(error))
        try:
            data = await self._session.ask("step", action)
        except OpenEnvError as error:
            if error.code != WRONG_ACTION:
                raise
            return self._hint(str(error).partition(" failed: ")[2])
        reward, done = data.get("reward"), bool(data.get("done"))
        return Step(
            observation="" if done else self._observed(self._server.read(data)),
            done=done,
            reward=None if reward is None else float(reward),
            metrics=await self._metrics(self._session) if done else {},
            counts={"invalid_actions": 0.0},
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _begun(self) -> Mapping[str, Any]:
        """Return the data of the first observation. MultiTurn's step_timeout_s ends the wait for a session."""
        wait_s, longest_s = RETRY_S
        while True:
            self._session = await Session.open(self._server.url)
            try:
                return await self._session.ask("reset", self._reset)
            except OpenEnvError as error:
                if error.code != FULL:
                    raise
                if not self._server.is_known_full:
                    logger.warning("%s; episodes wait. Its create_app takes max_concurrent_envs", error)
                self._server.is_known_full = True
            await self._session.close()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    async def _metrics(self, session: Session) -> dict[str, float]:
        if not self._server.state_metrics:
            return {}
        state = await session.ask("state")
        missing = [name for name in self._server.state_metrics if name not in state]
        if missing:
            known = ", ".join(sorted(state))
            raise ValueError(f"rollout.agent_args.state_metrics={missing}: the state of the server has {known}")
        return {name: float(state[name]) for name in self._server.state_metrics}

    def _hint(self, why: str) -> Step:
        return Step(observation=self._observed(f"Invalid action: {why}."), counts={"invalid_actions": 1.0})

    def _observed(self, text: str) -> Observation:
        return [Message(role=Role.user, content=text)] if self._is_chat else f"\n{text}\n"


def agent_loop(
    tokenizer: Any,
    *,
    url: str,
    field: str | None = None,
    act: str | None = None,
    observe: str | None = None,
    reset: Mapping[str, Any] | None = None,
    columns: Sequence[str] = (),
    state_metrics: Sequence[str] = (),
    **options: Unpack[TurnOptions],
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args.

    Args:
        url: The address of the server.
        field: The field of an action that takes the text of a turn; see `ActionSchema`.
        act: `package.module:function` of (text, JSON schema of an action) that returns the action, in place of that.
        observe: `package.module:function` of an observation, a dict, that returns its text, in place of `readable`.
        reset: Arguments of the server's reset. The seed is the prompt's ordinal unless given here, so that the episodes
            of a group share their world.
        columns: The columns of the row that go to the reset, too.
        state_metrics: Numbers of the environment's state that are logged as agent/<name> when the environment is done.

    Raises:
        ValueError: There is no such function, or no such option.
    """
    if urlsplit(url).scheme not in ("http", "https", "ws", "wss"):
        raise ValueError(f"rollout.agent_args.url={url}: must begin with http://, https://, ws:// or wss://")

    def act_by_schema(text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        return ActionSchema(schema, field).read(text)

    server = Server(
        url=url,
        act=find("rollout.agent_args.act", act, ("text", "schema")) if act else act_by_schema,
        observe=find("rollout.agent_args.observe", observe, ("observation",)) if observe else readable,
        state_metrics=state_metrics,
    )
    is_chat = options.get("chat", False)

    def make_environment(prompt: Prompt) -> OpenEnvEnvironment:
        missing = [name for name in columns if name not in prompt.extra]
        if missing:
            known = ", ".join(sorted(prompt.extra)) or "none"
            raise ValueError(f"rollout.agent_args.columns={missing}: the row has {known}")
        columns_of_row = {name: prompt.extra[name] for name in columns}
        return OpenEnvEnvironment(server, {"seed": prompt.ordinal, **(reset or {}), **columns_of_row}, is_chat=is_chat)

    return turns(make_environment, tokenizer, options)
