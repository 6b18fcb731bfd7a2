"""A rollout replica: one engine, its state, and its counters. A plain class; `replica_group.py` puts it into Ray."""

import asyncio
import time
from typing import Any

from rollout.engines.base import Engine, WeightTag
from rollout.types import Completion, GenerationRequest


class RolloutReplica:
    """Serves groups of requests. Pause, swap and resume come from the checkpoint manager, in this order only."""

    def __init__(self, name: str, engine: Engine):
        self.name = name
        self._engine = engine
        self._paused = False
        self.global_steps = -1
        """Tag of the weights it serves; -1 before the first update, when nothing may be generated."""
        self._started = self._finished = self._aborted = self._tokens = self._cached_tokens = self._prompt_tokens = 0
        self._running = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        """One engine request per trajectory, side by side, so that they share the prefix. Waits for the slowest."""
        tasks = [asyncio.create_task(self._generate(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error or a cancellation the others must not go on
                task.cancel()

    async def _generate(self, request: GenerationRequest) -> Completion:
        if self.global_steps < 0:
            raise RuntimeError(f"replica {self.name} has no weights yet: update_weights comes first")
        self._started += 1
        if self._running == 0:
            self._busy_since = time.monotonic()
        self._running += 1
        try:
            completion = await self._engine.generate(request)
        except BaseException:
            self._aborted += 1
            raise
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy_s += time.monotonic() - self._busy_since
        self._finished += 1
        self._aborted += completion.finish_reason == "abort"
        self._tokens += len(completion.token_ids)
        self._prompt_tokens += len(request.prompt_ids)
        self._cached_tokens += completion.cached_tokens
        return completion

    async def pause(self) -> None:
        """Freeze every request where it is. Idempotent."""
        if not self._paused:
            await self._engine.pause()
            self._paused = True

    async def resume(self) -> float:
        """Returns for how many seconds it was frozen; 0 when it was not. Idempotent."""
        if not self._paused:
            return 0.0
        frozen_s = await self._engine.resume()
        self._paused = False
        return frozen_s

    def is_paused(self) -> bool:
        return self._paused

    async def stage(self, manifest: dict[str, Any]) -> None:
        await self._engine.stage(manifest)

    async def swap(self, global_steps: int) -> list[WeightTag]:
        """Raises RuntimeError unless paused: no engine step may see half of the new weights."""
        if not self._paused:
            raise RuntimeError(f"replica {self.name} must be paused to swap weights")
        tags = await self._engine.swap(global_steps)
        self.global_steps = global_steps
        return tags

    async def tag_loaded(self, global_steps: int) -> None:
        """Serve the weights that the engine was started with, as those of `global_steps`: for what trains nothing."""
        await self._engine.tag_loaded(global_steps)
        self.global_steps = global_steps

    async def wait_dead(self) -> BaseException:
        return await self._engine.wait_dead()

    def stats(self) -> dict[str, float]:
        """Counters since the start. `busy_s`: seconds with at least one request."""
        running_s = time.monotonic() - self._busy_since if self._running else 0.0
        return {
            "global_steps": self.global_steps,
            "trajectories": self._started,
            "finished": self._finished,
            "aborted": self._aborted,
            "running": self._running,
            "tokens": self._tokens,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached_tokens,
            "busy_s": self._busy_s + running_s,
            **self._engine.gauges(),
        }

    def shutdown(self) -> None:
        self._engine.shutdown()
