"""`make serve` in a process of its own, and clients of it."""

import asyncio
import functools
import inspect
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rollout.http.token import TOKEN_FILE
from tests.support.whole_runs import Run, started

START_DEADLINE_S = 400
DEADLINE_S = 120
AT_ONCE_S = 20
"""Deadline of what would never come if it waited for a resume. A busy machine may leave a process without a core for
seconds."""
SETTLED_S = 2.0
LONG = 40_000
"""Tokens of a request that does not end by itself within DEADLINE_S, also where its client gets no core meanwhile."""
LONG_ENOUGH = ("rollout.max_response_tokens=45000", "model.max_position_embeddings=49152")
"""Overrides of a server that has room for LONG."""

_Count = TypeVar("_Count")


@dataclass(frozen=True)
class Server:
    run: Run
    gateway: str
    replicas: list[str]
    token: str


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[Server]:
    """Yield `make serve`, once it serves."""
    with started(folder, "serve.port=0", *overrides, command=(sys.executable, "-m", "scripts.serve")) as run:
        run.wait_for("serving at ", START_DEADLINE_S)
        output = run.output.read_text()
        (gateway,) = re.findall(r"serving at (\S+)", output)
        yield Server(
            run, gateway, re.findall(r"replica-\d: (\S+)", output), (run.run_dir / TOKEN_FILE).read_text().strip()
        )


def run(server: Server, scenario: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run the scenario, and leave the server idle and resumed for the next test."""

    headers = {"authorization": f"Bearer {server.token}"}

    async def main() -> None:
        client = httpx.AsyncClient(timeout=None, trust_env=False, headers=headers)
        async with asyncio.timeout(DEADLINE_S), client:
            try:
                await scenario(client)
            finally:
                await post(client, f"{server.gateway}/resume")
                await post(client, f"{server.gateway}/v1/abort_requests", json={"abort_all": True})

    asyncio.run(main())


def with_client(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a coroutine whose first parameters are a client and the server a test of the fixture `server`."""

    @functools.wraps(test)
    def call(server: Server, **parameters: Any) -> None:
        run(server, lambda client: test(client, server, **parameters))

    signature = inspect.signature(test)
    # pytest finds the fixtures by the signature.
    call.__dict__["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


def body(num_tokens: int, chat: bool = False, **other: Any) -> dict[str, Any]:
    """Return the body of a request that is greedy if it has one choice, and that no end-of-sequence token ends."""
    asked = {"messages": [{"role": "user", "content": "How many?"}]} if chat else {"prompt": "How many?"}
    asked |= {"logprobs": True, "top_logprobs": 0} if chat else {"logprobs": 0}
    asked |= {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
    return asked | {"temperature": 0 if other.get("n", 1) == 1 else 1} | other


def path(chat: bool) -> str:
    return "/v1/chat/completions" if chat else "/v1/completions"


@dataclass
class Stream:
    """The chunks that a streaming client has received, per choice."""

    times: list[float] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    response_id: str = ""
    ended: bool = False

    def take(self, chunk: dict[str, Any]) -> None:
        self.response_id = chunk["id"]
        for choice in chunk["choices"]:
            if token_ids := choice.get("token_ids"):
                self.times.append(time.monotonic())
                self.token_ids.setdefault(choice["index"], []).extend(token_ids)
                self.logprobs.setdefault(choice["index"], []).extend(logprobs_of(choice))
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            self.text[choice["index"]] = self.text.get(choice["index"], "") + (piece or "")
            if choice["finish_reason"] is not None:
                self.finish[choice["index"]] = choice["finish_reason"]

    async def read(self, client: httpx.AsyncClient, url: str, asked: dict[str, Any], **headers: str) -> "Stream":
        async with client.stream("POST", url, json=asked | {"stream": True}, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in lines_of(response):
                if line == b"data: [DONE]":
                    self.ended = True
                elif line:
                    self.take(json.loads(line.removeprefix(b"data: ")))
        return self


async def lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """Split lines only at their ends: aiter_lines() of httpx also splits at characters that a sampled text may
    contain, such as U+0085."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line


def num_tokens(stream: Stream) -> int:
    """The tokens of its first choice. A busy machine sends several in one chunk."""
    return len(stream.token_ids.get(0, ()))


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    found = choice["logprobs"]
    return found["token_logprobs"] if "token_logprobs" in found else [entry["logprob"] for entry in found["content"]]


async def metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    text = (await client.get(f"{url}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S / 2):
        while not await holds():
            await asyncio.sleep(0.005)


async def settled(count: Callable[[], _Count]) -> _Count:
    """Return the count once nothing more arrives: tokens sampled before a pause arrive for a while after it."""
    found, unchanged = count(), 0
    async with asyncio.timeout(DEADLINE_S / 2):
        while unchanged < SETTLED_S / 0.05:  # count looks, not time: this process may stand still as well
            await asyncio.sleep(0.05)
            unchanged = unchanged + 1 if found == (found := count()) else 0
    return found


async def post(client: httpx.AsyncClient, url: str, **kwargs: Any) -> dict[str, Any]:
    response = await client.post(url, **kwargs)
    assert response.status_code == 200, response.text
    return response.json()


async def is_paused(client: httpx.AsyncClient, url: str) -> bool:
    """Asks again when a replica without a core answers too late, which is an error."""
    async with asyncio.timeout(DEADLINE_S / 2):
        while not (response := await client.get(f"{url}/is_paused")).is_success:
            await asyncio.sleep(0.1)
    return response.json()["is_paused"]


async def is_metric(client: httpx.AsyncClient, url: str, name: str, value: float) -> bool:
    return await metric(client, url, name) == value
