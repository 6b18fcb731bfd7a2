"""An engine that takes the time which a profile says, and leaps from one change of its batch to the next.

It takes the same decoding steps as one that sleeps for each of them: a request joins the batch at the end of a step,
and an update waits for the end of a step. But a thousand tokens of a steady batch cost no more than one.
"""

import asyncio
import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, VersionSpan
from scripts.bench.simulated_engine import SimulatedEngine, SimulatedSequence
from scripts.predict.machine import Machine, Waker
from scripts.predict.profile import Profile
from weight_sync.protocol import Manifest

EPSILON = 1e-9
"""Of a step: times are floats."""


@dataclass(slots=True, eq=False, kw_only=True)
class Decoding(SimulatedSequence):
    name: str
    start: int
    """The engine's count of steps when it began."""


class ProfiledEngine(SimulatedEngine):
    """Answers hold the true number of tokens, whose ids mean nothing, and the versions that sampled them."""

    def __init__(self, profile: Profile, machine: Machine, max_num_seqs: int):
        super().__init__(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=profile.step_s,
            max_num_seqs=max_num_seqs,
            swap_s=profile.swap_s,
        )
        self._profile = profile
        self._machine = machine
        self._waker = Waker()
        self._count = 0
        """Decoding steps since the start."""
        self._ends: list[tuple[int, int, Decoding]] = []  # (count at its end, number, sequence), a heap
        self._new: list[Decoding] = []  # without a token
        self._number = 0
        self._prefill_s = 0.0
        self._borders: list[tuple[int, int]] = []  # (count, version): from this step on it samples
        self._freezes = False

    def _start(self, request: GenerationRequest) -> Decoding:
        name, length = str(request.request_id), self._length_of(request)
        done = asyncio.get_running_loop().create_future()
        sequence = Decoding(length=length, finish_reason="stop", done=done, name=name, start=self._count)
        self._prefill_s += len(request.prompt_ids) * self._profile.prefill_s_per_token
        self._new.append(sequence)
        self._running[name] = sequence
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        else:
            self._waker.wake()
        return sequence

    async def freeze(self, clear_cache: bool) -> None:
        self._freezes = True
        self._waker.wake()
        try:
            await super().freeze(clear_cache)
        finally:
            self._freezes = False

    async def stage(self, manifest: Manifest) -> None:
        await asyncio.sleep(self._profile.stage_s)
        await super().stage(manifest)

    def partials(self, known: Mapping[RequestId, int]) -> dict[RequestId, Completion]:
        """None: no replica is lost here, and no episode continues elsewhere."""
        return {}

    async def _step_until_idle(self) -> None:
        self._machine.engine_works(True)
        try:
            while self._running and not self._death.done():
                if not self._may_step.is_set():
                    self._machine.engine_works(False)
                    await self._may_step.wait()
                    self._machine.engine_works(True)
                async with self._between_steps:
                    if self._may_step.is_set() and self._running:
                        await self._leap()
                self._hand_out()
        finally:
            self._machine.engine_works(False)

    async def _leap(self) -> None:
        """Take steps until a sequence ends, a request comes or an update freezes the engine."""
        self._join()
        profile, clock = self._profile, asyncio.get_running_loop().time
        batch, waiting = len(self._running), len(self._new)
        step_s = profile.step_s + profile.step_s_per_request * batch
        prefill_s, self._prefill_s = self._prefill_s, 0.0
        steps = 1 if waiting else max(1, self._ends[0][0] - self._count)
        done_s = 0.0
        while done_s < (whole_s := prefill_s + steps * step_s) * (1 - EPSILON):
            slowdown, began = self._machine.slowdown(), clock()
            woken = await self._machine.sleep((whole_s - done_s) * slowdown, self._waker)
            done_s += (clock() - began) / slowdown
            if not woken:
                break
            if self._freezes or len(self._new) > waiting:  # only to the end of the step
                steps = min(steps, max(1, math.ceil((done_s - prefill_s) / step_s - EPSILON)))
        if not self._borders or self._borders[-1][1] != self._global_steps:
            self._borders.append((self._count, self._global_steps))
        self._count += steps
        self.usage.tokens += steps * batch
        for sequence in self._new[:waiting]:
            self.usage.began(sequence.name)
        del self._new[:waiting]

    def _join(self) -> None:
        """Those that came since the last step begin with the next."""
        self._new = [sequence for sequence in self._new if self._running.get(sequence.name) is sequence]
        for sequence in self._new:
            sequence.start = self._count
            self._number += 1
            heapq.heappush(self._ends, (self._count + sequence.length, self._number, sequence))
        while self._ends and self._running.get(self._ends[0][2].name) is not self._ends[0][2]:  # aborted
            heapq.heappop(self._ends)

    def _hand_out(self) -> None:
        """Answer those that have all their tokens."""
        while self._ends and self._ends[0][0] <= self._count:
            sequence = heapq.heappop(self._ends)[2]
            if self._running.get(sequence.name) is sequence:
                del self._running[sequence.name]
                if not sequence.done.done():
                    sequence.done.set_result(self._completion(sequence))

    def _completion(self, sequence: Decoding) -> Completion:
        spans, end = [], sequence.start + sequence.length
        first = bisect_right(self._borders, (sequence.start, 1 << 62)) - 1
        for index in range(first, len(self._borders)):
            begins, version = self._borders[index]
            ends = self._borders[index + 1][0] if index + 1 < len(self._borders) else end
            if begins >= end:
                break
            start = max(begins, sequence.start) - sequence.start
            spans.append(VersionSpan(start, min(ends, end) - sequence.start, version))
        return Completion(
            token_ids=np.broadcast_to(np.int32(0), sequence.length),
            logprobs=np.broadcast_to(np.float32(0), sequence.length),
            spans=tuple(spans),
            finish_reason=sequence.finish_reason,
        )
