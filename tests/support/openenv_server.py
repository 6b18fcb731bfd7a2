"""A server of a small world, in a process of its own: `python -m tests.support.openenv_server KIND PORT MAX_SESSIONS`.

KIND is openenv, whose own server classes then serve it, or documented: a server after OpenEnv's documented wire form,
for where the package is not there. It needs mcp<2, and vLLM mcp>=2: it lives in a venv of its own, whose python
the variable OPENENV_PYTHON names.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tests.support.paths import ROOT

START_S = 60.0
OPENENV_PYTHON = os.environ.get("OPENENV_PYTHON")


class World:
    """A number to guess: the last digit of the seed. Some messages do something else."""

    def __init__(self) -> None:
        self.number, self.guesses = 0, 0

    def reset(self, seed: int | None, level: str) -> str:
        self.number = (seed or 0) % 10
        return f"Guess a number at level {level}."

    def step(self, message: str) -> tuple[str, float | None, bool]:
        """The text, the reward, and whether that was the last step."""
        if "boom" in message:
            raise RuntimeError("the sandbox is gone")
        if "die" in message:
            os._exit(1)
        self.guesses += 1
        is_right = str(self.number) in message
        return ("Right." if is_right else "Wrong."), (1.0 if is_right else 0.25), is_right


# -- the documented wire form ------------------------------------------------------------------------------------------


class GuessAction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str = Field(max_length=20)
    metadata: dict[str, Any] = Field(default_factory=dict)


def answer_to(world: World, message: dict[str, Any]) -> dict[str, Any]:
    match message["type"]:
        case "reset":
            text = world.reset(message["data"].get("seed"), message["data"].get("level", "one"))
            return {"type": "observation", "data": {"observation": {"text": text}, "reward": None, "done": False}}
        case "step":
            text, reward, done = world.step(GuessAction(**message["data"]).message)
            return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}
        case "state":
            return {"type": "state", "data": {"episode_id": None, "step_count": world.guesses}}
    return {"type": "error", "data": {"message": "Unknown message type", "code": "UNKNOWN_TYPE"}}


def documented(max_sessions: int) -> FastAPI:
    app, live = FastAPI(), set[WebSocket]()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        return {"action": GuessAction.model_json_schema(), "observation": {}, "state": {}}

    @app.websocket("/ws")
    async def serve(client: WebSocket) -> None:
        await client.accept()
        if len(live) >= max_sessions:
            full = {"message": f"Server at capacity: {len(live)}/{max_sessions}", "code": "CAPACITY_REACHED"}
            await client.send_json({"type": "error", "data": full})
            return await client.close()
        world = World()
        live.add(client)
        try:
            while (message := await client.receive_json())["type"] != "close":
                try:
                    answer = await asyncio.to_thread(answer_to, world, message)
                except ValidationError as error:
                    errors = error.errors(include_url=False)
                    wrong = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                    answer = {"type": "error", "data": wrong}
                except Exception as error:
                    answer = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                await client.send_json(answer)
            await client.close()
        except WebSocketDisconnect:
            pass
        finally:
            live.discard(client)

    return app


# -- by the package ----------------------------------------------------------------------------------------------------


def openenv(max_sessions: int) -> FastAPI:
    from openenv.core.env_server import Environment, create_fastapi_app  # pyright: ignore
    from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore

    class RealAction(Action):
        message: str = Field(max_length=20)

    class RealObservation(Observation):
        text: str = ""

    class RealWorld(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.world = World()

        def reset(self, seed: int | None = None, episode_id: str | None = None, level: str = "one", **_: Any) -> Any:
            return RealObservation(text=self.world.reset(seed, level))

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            text, reward, done = self.world.step(action.message)
            return RealObservation(text=text, reward=reward, done=done)

        @property
        def state(self) -> Any:
            return State(step_count=self.world.guesses)

    return create_fastapi_app(RealWorld, RealAction, RealObservation, max_concurrent_envs=max_sessions)


# -- its process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(kind: str, max_sessions: int = 8) -> Iterator[str]:
    """The URL of a server process, which ends with this. Raises TimeoutError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = OPENENV_PYTHON if kind == "openenv" and OPENENV_PYTHON else sys.executable
    command = [python, "-m", "tests.support.openenv_server", kind, str(port), str(max_sessions)]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            with httpx.Client(trust_env=False) as client:
                while True:
                    with contextlib.suppress(httpx.HTTPError):
                        client.get(f"{url}/health").raise_for_status()
                        break
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise TimeoutError(f"the server {' '.join(command)} does not come up")
                    time.sleep(0.05)
            yield url
        finally:
            process.kill()


if __name__ == "__main__":
    kind, port, max_sessions = sys.argv[1:]
    app = {"documented": documented, "openenv": openenv}[kind](int(max_sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
