"""Tools and environments of plain functions for tests, which processes of their own find by their names."""

import asyncio
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rollout.agents.environment import Step, Turn
from rollout.types import Prompt


def power(base: int, exponent: int = 2) -> int:
    """Raise a number to a power."""
    return base**exponent


def where() -> int:
    """Return the process that this runs in."""
    return os.getpid()


def refuse(reason: str) -> None:
    """Raise an error."""
    raise KeyError(reason)


def unsayable() -> object:
    """Return what is no JSON."""
    return object()


def leave(code: int) -> None:
    """End the process of the tool."""
    os._exit(code)


def stop_politely() -> None:
    """Raise SystemExit."""
    raise SystemExit(2)


def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


def fork() -> bool:
    """Fork, and return in both processes."""
    return os.fork() == 0


async def here() -> int:
    """Return the process that this is awaited in."""
    return os.getpid()


def later() -> Any:
    """Return an awaitable."""
    return here()


def run_loop() -> int:
    """Run an event loop."""
    return asyncio.run(here())


def start_child(file: str) -> None:
    """Start a process, and hang."""
    Path(file).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)


class Counter:
    """A plain environment that counts its turns in its own process, and does what a turn says."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt
        self.turns = 0

    def reset(self) -> str:
        return f"{self.prompt.ordinal} {os.getpid()}\n"

    def step(self, turn: Turn, /) -> Step:
        self.turns += 1
        match turn:
            case "hang":
                power(9, 10**8)
            case "end":
                os._exit(3)
            case "raise":
                raise KeyError("no such turn")
            case "wait":
                time.sleep(0.5)
            case _:
                pass
        return Step(observation=f"{self.turns} {os.getpid()}\n", done=self.turns == 3, reward=0.5)

    def close(self) -> None:
        if place := self.prompt.extra.get("closed"):
            Path(place).write_text(f"{self.turns} {os.getpid()}")


class MixedCounter(Counter):
    """The same, with an async step."""

    async def step(self, turn: Turn, /) -> Step:
        await asyncio.sleep(0)
        return super().step(turn)


class AsyncCounter:
    """An async environment, which stays in the agent worker."""

    async def step(self, turn: Turn, /) -> Step:
        return Step(observation=str(os.getpid()), done=True, reward=1.0)
