"""An engine that takes the time which a profile says, and leaps from one change of its batch to the next.

It takes the same decoding steps as one that sleeps for each of them: a request joins the batch at the end of a step,
and an update waits for the end of a step. But a thousand tokens of a steady batch cost no more than one.
"""

import asyncio
import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollout.engines.simulated import SimulatedEngine, SimulatedSequence
from rollout.types import Completion, GenerationRequest, KeptTokens, VersionSpan
from scripts.simulate.kv_cache import KvCache, KvSegment
from scripts.simulate.machine import Machine, Waker
from scripts.simulate.profile import Profile
from weight_sync.protocol import Manifest, WeightTag

EPSILON = 1e-9
"""The share of a step that counts as rounding: times are floats."""


@dataclass(slots=True, eq=False, kw_only=True)
class Decoding(SimulatedSequence):
    name: str
    prompt: Sequence[KvSegment]
    """The segments of its prompt in the KV cache."""
    num_cached: int = 0
    """Tokens of its prompt that were in the cache when it began."""
    version: int = -1
    """The version of the weights when it came into the batch: later ones share nothing with its keys and values."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """The engine's counts of steps between which it has decoded, for each time that it was in the batch before."""
    start: int = 0
    """The count at which it came into the batch."""
    num_before: int = 0
    """Tokens of `parts`."""
    entry: int = -1
    """The number of its entry among the ends."""

    @property
    def segments(self) -> Sequence[KvSegment]:
        """Its segments when it comes into the batch: of one that was preempted, with what it had sampled."""
        *first, (name, tokens) = self.prompt
        version = self.version
        return [((version, name), tokens) for name, tokens in first] + [((version, name), tokens + self.num_before)]


class ProfiledEngine(SimulatedEngine):
    """Answers hold the true number of tokens, whose ids mean nothing, and the versions that sampled them."""

    def __init__(self, profile: Profile, machine: Machine, max_num_seqs: int, leap_s: float = math.inf):
        """`leap_s`: the longest leap in seconds. What the engine reports during a leap is from its beginning."""
        super().__init__(step_s=profile.step_s, max_num_seqs=max_num_seqs, swap_s=profile.swap_s)
        self._profile = profile
        self._machine = machine
        self._leap_s = leap_s
        self._waker = Waker()
        self._count = 0
        """Decoding steps since the start."""
        self._batch: dict[str, Decoding] = {}  # in the order in which they came into it
        self._ends: list[tuple[int, int, Decoding]] = []  # (count at its end, number of the entry, sequence), a heap
        self._waiting: deque[Decoding] = deque()  # inside without KV cache; those that were preempted are the first
        self._number = 0
        self._kv = KvCache(profile.kv_tokens or math.inf)
        self.num_preempted = 0
        self.num_prefilled = 0
        self._borders: list[tuple[int, int]] = []  # (count, version): from this step on it samples
        self._freezes = False

    def _start(self, request: GenerationRequest) -> Decoding:
        name, length = str(request.request_id), self._length_of(request)
        done = asyncio.get_running_loop().create_future()
        sequence = Decoding(
            length=length,
            finish_reason="stop",
            done=done,
            is_truncated=request.sampling.truncates,
            name=name,
            prompt=self.segments(request),
        )
        self._waiting.append(sequence)
        self._running[name] = sequence
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        else:
            self._waker.wake()
        return sequence

    def segments(self, request: GenerationRequest) -> Sequence[KvSegment]:
        """Return the prompt as segments: an episode shares it with its next turn, and with nobody else."""
        return [(replace(request.request_id, attempt=0, turn=0, part=0), len(request.prompt_ids))]

    async def freeze(self, clear_cache: bool) -> None:
        self._freezes = True
        self._waker.wake()
        try:
            await super().freeze(clear_cache)
        finally:
            self._freezes = False

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        tags = await super().load(manifest)
        self._kv.forget()  # the prefix cache is salted with the version
        return tags

    async def stage(self, manifest: Manifest) -> None:
        await asyncio.sleep(self._profile.stage_s)
        await super().stage(manifest)

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
        """Take steps until a sequence ends, a request comes, the KV cache is full or an update freezes the engine."""
        fresh, prefill_s = self._join()
        profile, clock = self._profile, asyncio.get_running_loop().time
        batch, waiting = len(self._batch), len(self._waiting)
        step_s = profile.step_s + profile.step_s_per_request * batch
        steps = 1 if fresh else max(1, self._ends[0][0] - self._count)
        if self._leap_s < math.inf:
            steps = max(1, min(steps, int(self._leap_s / step_s)))
        if profile.kv_tokens:
            steps = max(1, min(steps, int(self._kv.room) // batch))
        done_s = 0.0
        while done_s < (whole_s := prefill_s + steps * step_s) * (1 - EPSILON):
            slowdown, began = self._machine.slowdown(), clock()
            woken = await self._machine.sleep((whole_s - done_s) * slowdown, self._waker)
            done_s += (clock() - began) / slowdown
            if not woken:
                break
            if self._freezes or len(self._waiting) > waiting:  # only to the end of the step
                steps = min(steps, max(1, math.ceil((done_s - prefill_s) / step_s - EPSILON)))
        if not self._borders or self._borders[-1][1] != self._global_steps:
            self._borders.append((self._count, self._global_steps))
        self._count += steps
        self._kv.sample(steps * batch)
        self.usage.tokens += steps * batch
        for sequence in fresh:
            self.usage.began(sequence.name)

    def _join(self) -> tuple[list[Decoding], float]:
        """Admit waiting sequences to the batch as far as the KV cache has room, or preempt the newest of the batch if
        there is no room for its next step. Return the admitted sequences, and the seconds of their prefill."""
        if len(self._batch) + len(self._waiting) != len(self._running):  # some were aborted
            self._waiting = deque(s for s in self._waiting if self._running.get(s.name) is s)
            for sequence in [s for name, s in self._batch.items() if self._running.get(name) is not s]:
                self._leave(sequence)
        is_full = self._kv.room < len(self._batch)
        while self._kv.room < len(self._batch) and len(self._batch) > 1:
            self._preempt()
        fresh, prefill_s = list[Decoding](), 0.0
        while self._waiting and not is_full:
            sequence = self._waiting[0]
            sequence.version = self._global_steps
            if self._batch and self._kv.room < self._kv.needed(sequence.segments) + len(self._batch) + 1:
                break
            uncached = sum(tokens for _, tokens in sequence.segments) - self._begin(self._waiting.popleft())
            fresh.append(sequence)
            self.num_prefilled += uncached
            prefill_s += uncached * self._profile.prefill_s_per_token
        while self._ends and not self._is_end(*self._ends[0]):
            heapq.heappop(self._ends)
        return fresh, prefill_s

    def kv_usage(self) -> float | None:
        """Return the share that the requests inside need. As in a real engine, a prefix that several share counts for
        each of them."""
        if not self._profile.kv_tokens:
            return None
        inside = [sequence for sequence in self._running.values() if isinstance(sequence, Decoding)]
        decoded = sum(self._count - sequence.start for sequence in self._batch.values())
        tokens = sum(tokens for sequence in inside for _, tokens in sequence.segments) + decoded
        return tokens / self._profile.kv_tokens

    def _begin(self, sequence: Decoding) -> int:
        """Let it into the batch. Returns how many of its tokens are in the cache."""
        self._number += 1
        sequence.start, sequence.entry = self._count, self._number
        cached = self._kv.begin(sequence.segments)
        if not sequence.parts:
            sequence.num_cached = cached
        self._batch[sequence.name] = sequence
        end = self._count + sequence.length - sequence.num_before
        heapq.heappush(self._ends, (end, self._number, sequence))
        return cached

    def _leave(self, sequence: Decoding) -> None:
        """Let it out of the batch. Its keys and values stay until others need their room."""
        is_of_use = self._profile.kv_tokens > 0 and sequence.version == self._global_steps
        self._kv.end(sequence.segments, self._count - sequence.start, is_of_use=is_of_use)
        del self._batch[sequence.name]

    def _preempt(self) -> None:
        """Take the KV cache from the newest of the batch, as vLLM does. It keeps its tokens, and computes their keys
        and values again when it comes back."""
        sequence = next(reversed(self._batch.values()))
        self._leave(sequence)
        sequence.parts.append((sequence.start, self._count))
        sequence.num_before += self._count - sequence.start
        self._waiting.appendleft(sequence)
        self.num_preempted += 1

    def _is_end(self, count: int, number: int, sequence: Decoding) -> bool:
        """Return whether an entry is not of a sequence that was aborted, or preempted since."""
        return sequence.entry == number and self._batch.get(sequence.name) is sequence

    def _hand_out(self) -> None:
        """Answer those that have all their tokens."""
        while self._ends and self._ends[0][0] <= self._count:
            entry = heapq.heappop(self._ends)
            sequence = entry[2]
            if self._is_end(*entry) and self._running.get(sequence.name) is sequence:
                completion = self._sampled(sequence, sequence.finish_reason)
                self._leave(sequence)
                del self._running[sequence.name]
                if not sequence.done.done():
                    sequence.done.set_result(completion)

    def _sampled(self, sequence: SimulatedSequence, finish_reason: str) -> Completion:
        assert isinstance(sequence, Decoding)
        parts = list(sequence.parts)
        if self._batch.get(sequence.name) is sequence:
            parts.append((sequence.start, min(self._count, sequence.start + sequence.length - sequence.num_before)))
        spans, length = list[VersionSpan](), 0
        for first, last in parts:
            index = bisect_right(self._borders, (first, 1 << 62)) - 1
            while index < len(self._borders) and self._borders[index][0] < last:
                begins, version = self._borders[index]
                index += 1
                ends = self._borders[index][0] if index < len(self._borders) else last
                until = length + min(ends, last) - first
                if spans and spans[-1].global_steps == version:
                    spans[-1] = replace(spans[-1], end=until)
                else:
                    spans.append(VersionSpan(length + max(begins, first) - first, until, version))
            length += last - first
        token_ids = np.broadcast_to(np.int32(0), length)
        kept = KeptTokens(counts=np.broadcast_to(np.int32(1), length), token_ids=token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=np.broadcast_to(np.float32(0), length),
            spans=tuple(spans),
            finish_reason=finish_reason,
            cached_tokens=sequence.num_cached,
            kept=kept if sequence.is_truncated else None,
        )
