"""An engine with a clock and no model: for scale, fault and staleness tests, and for benchmarks of scheduling.

Every running request gains one token per step. The token's id is the version that "sampled" it, so a wrong tag shows.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollout.engines.base import WeightTag
from rollout.types import Completion, GenerationRequest, VersionSpan


class EngineDiedError(RuntimeError):
    """The simulated engine was killed."""


@dataclass(slots=True, eq=False)
class _Sequence:
    length: int
    finish_reason: str
    done: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)


class SimulatedEngine:
    """The `Engine` protocol. `sleep` may be a virtual clock's."""

    def __init__(
        self,
        *,
        length_of: Callable[[GenerationRequest], int],
        step_s: float,
        max_num_seqs: int,
        swap_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """`length_of(request)`: how many tokens it gets. `step_s`: seconds per token, whatever the batch size."""
        self._length_of = length_of
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._swap_s = swap_s
        self._sleep = sleep
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._between_steps = asyncio.Lock()
        self._stepper: asyncio.Task[None] | None = None
        self._staged: dict[str, Any] | None = None
        self._death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._global_steps = -1
        self._num_submitted = 0
        self._frozen_at = 0.0

    async def generate(self, request: GenerationRequest) -> Completion:
        if self._death.done():
            raise self._death.result()
        self._num_submitted += 1
        length, limit = self._length_of(request), request.sampling.max_tokens
        finish_reason = "length" if length > limit else "stop"
        sequence = _Sequence(min(length, limit), finish_reason, asyncio.get_running_loop().create_future())
        self._waiting.append(sequence)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        try:
            return await sequence.done
        finally:
            if not sequence.done.done() or sequence.done.cancelled():
                self._forget(sequence)

    async def pause(self) -> None:
        self._may_step.clear()
        async with self._between_steps:
            self._frozen_at = asyncio.get_running_loop().time()

    async def resume(self) -> float:
        self._may_step.set()
        return asyncio.get_running_loop().time() - self._frozen_at

    async def stage(self, manifest: dict[str, Any]) -> None:
        self._staged = manifest

    async def swap(self, global_steps: int) -> list[WeightTag]:
        staged, self._staged = self._staged, None
        if staged is None or staged["global_steps"] != global_steps:
            found = None if staged is None else staged["global_steps"]
            raise RuntimeError(f"cannot swap in version {global_steps}: staged is {found}")
        await self._sleep(self._swap_s)
        self._global_steps = global_steps
        return [WeightTag(global_steps, staged["checksum"])]

    async def tag_loaded(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def wait_dead(self) -> BaseException:
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        """Every request, now and later, fails with EngineDiedError."""
        error = EngineDiedError("the simulated engine was killed")
        if not self._death.done():
            self._death.set_result(error)
        for sequence in [*self._running, *self._waiting]:
            if not sequence.done.done():
                sequence.done.set_exception(error)
        self._running.clear()
        self._waiting.clear()

    def gauges(self) -> dict[str, float]:
        return {"engine_requests": self._num_submitted}

    def shutdown(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()

    async def _step_until_idle(self) -> None:
        while self._running or self._waiting:
            await self._may_step.wait()
            async with self._between_steps:
                if not self._may_step.is_set():  # paused again since it woke up
                    continue
                while self._waiting and len(self._running) < self._max_num_seqs:
                    self._running.append(self._waiting.popleft())
                await self._sleep(self._step_s)
                for sequence in self._running:
                    sequence.tokens.append(self._global_steps)
            for sequence in [s for s in self._running if len(s.tokens) >= s.length]:
                self._running.remove(sequence)
                if not sequence.done.done():  # cancelled in this very step
                    sequence.done.set_result(_completion(sequence.tokens, sequence.finish_reason))

    def _forget(self, sequence: _Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)


def _completion(tokens: list[int], finish_reason: str) -> Completion:
    spans, start = [], 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or tokens[end] != tokens[start]:
            spans.append(VersionSpan(start, end, tokens[start]))
            start = end
    return Completion(
        token_ids=np.asarray(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        spans=tuple(spans),
        finish_reason=finish_reason,
    )
