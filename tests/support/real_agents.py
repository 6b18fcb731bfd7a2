"""Programs of others as harnesses of a session: what they sent, what they were answered, and what is trained of it."""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.data import DataConfig
from configs.rollout import SessionsConfig
from configs.schema import Config, RolloutConfig
from rollout.agents.loop import Episode
from rollout.sessions import harness_loop
from rollout.sessions.harness import Connection, HarnessError, HarnessTask
from rollout.sessions.harness_loop import HarnessLoop, SessionHost
from tests.support.chat_models import chat_tokenizer
from tests.support.harnesses import FAMILY, SAY, Policy, episode_task

MAX_TOKENS = 400_000
"""The context: a coding agent's first request has tens of thousands of tokens."""
TIMEOUT_S = 120
LAST_LINES = 40
SPOKEN = ("content", "text", "output", "instructions", "system", "description", "input")
"""Fields whose texts the policy must read."""
BILLING = "x-anthropic-billing-header:"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    status: int
    body: Any


@dataclass
class Recorder:
    """Notes the requests to an app, and the status of their answers."""

    app: ASGIApp
    requests: list[Request] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[bytes] = []
        status = [0]

        async def received() -> Message:
            message = await receive()
            parts.append(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        await self.app(scope, received, sent)
        body = b"".join(parts)
        self.requests.append(Request(scope["method"], scope["path"], status[0], json.loads(body) if body else None))


class Program:
    """A harness that is a program, in a folder and a home of its own."""

    def __init__(self, command: Callable[[Path, Connection], Sequence[str]], **environment: str):
        """`command` gets the folder, where it may leave files for the program, and the session."""
        self._command, self._environment = command, environment

    async def run(self, task: HarnessTask, connection: Connection) -> float:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            command = self._command(folder, connection)
            kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env={**kept, "HOME": str(folder), **connection.environment, **self._environment},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
            try:
                output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self.output = output.decode(errors="replace")
        if process.returncode:
            last = "\n".join(self.output.splitlines()[-LAST_LINES:])
            raise HarnessError(f"{command[0]} ended with exit code {process.returncode}:\n{last}")
        return 1.0


@dataclass(frozen=True)
class Outcome:
    policy: Policy
    episode: Episode
    requests: list[Request]
    output: str


def run_program(program: Program, say: SAY, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run one episode of a program on a session host, whose policy says its lines."""
    recorders: list[Recorder] = []
    make_app = harness_loop.session_app

    def recorded(*arguments: Any) -> Any:
        recorders.append(Recorder(make_app(*arguments)))
        return recorders[-1]

    monkeypatch.setattr(harness_loop, "session_app", recorded)
    config = Config(
        data=DataConfig(max_prompt_tokens=MAX_TOKENS),
        rollout=RolloutConfig(max_response_tokens=MAX_TOKENS),
        sessions=SessionsConfig(),
    )
    policy = Policy(say)

    async def main() -> Episode:
        host = SessionHost.of(config, chat_tokenizer(FAMILY))
        try:
            loop = HarnessLoop(program, host, config.sessions)
            return await loop.run_episode(episode_task(max_tokens=MAX_TOKENS), policy.generate)
        finally:
            await host.close()

    episode = asyncio.run(main())
    return Outcome(policy, episode, recorders[0].requests, getattr(program, "output", ""))


# -- bars --------------------------------------------------------------------------------------------------------------


def check_tokens(outcome: Outcome) -> None:
    """Every run of trained tokens is one sampled answer, once, after exactly the tokens it was sampled after."""
    left = dict(outcome.policy.sampled)
    for sequence in outcome.episode.sequences:
        ids, start = sequence.token_ids, len(sequence.prompt_ids)
        mask = np.concatenate([np.zeros(start, bool), sequence.loss_mask])
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            run, before = ids[begin:end].tolist(), tuple(ids[:begin].tolist())
            turns = [turn for turn, answer in left.items() if answer.token_ids.tolist() == run]
            turns = [turn for turn in turns if tuple(outcome.policy.prompts[turn]) == before]
            assert turns, f"{end - begin} trained tokens were not sampled so"
            del left[turns[0]]
    assert not left, f"sampled answers that nothing trains: {sorted(left)}"


def check_reading(outcome: Outcome) -> None:
    """Every text that the program sent to be answered is in a prompt that the policy read."""
    prompts = [outcome.policy.tokenizer.decode(list(ids)) for ids in outcome.policy.prompts.values()]
    for request in outcome.requests:
        if request.status != 200 or not request.path.endswith(("/completions", "/messages", "/responses")):
            continue
        texts = set(_texts(request.body))
        assert texts, request.body
        unread = min(([text for text in texts if not _is_in(text, prompt)] for prompt in prompts), key=len)
        assert not unread, f"{len(unread)} of {len(texts)} texts were not read, such as {unread[0][:500]!r}"


def _is_in(text: str, prompt: str) -> bool:
    return text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt


def _texts(value: Any, is_spoken: bool = False, is_schema: bool = False) -> Iterator[str]:
    if isinstance(value, str):
        if is_spoken and value.strip() and not value.startswith(BILLING):
            yield value.strip()
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, is_spoken)
    elif isinstance(value, Mapping):
        if value.get("type") in ("reasoning", "thinking", "web_search", "image_generation", "tool_search", "image"):
            return
        for name, item in value.items():
            yield from _texts(item, name in SPOKEN)


def refused(outcome: Outcome) -> list[Request]:
    return [request for request in outcome.requests if request.status >= 400]
