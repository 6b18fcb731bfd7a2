"""An engine with a clock and no model: for scale, fault and staleness tests, and for benchmarks of scheduling.

Every running request gains one token per step. The token's id is the version that "sampled" it, so a wrong tag shows.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from rollout.engines.admission import Admission
from rollout.engines.base import EngineDiedError
from rollout.engines.usage import Usage
from rollout.request_ids import RequestId
from rollout.types import Completion, FloatArray, GenerationRequest, IntArray, KeptTokens, VersionSpan
from weight_sync.protocol import Manifest, WeightTag


def simulated_manifest(global_steps: int) -> Manifest:
    """Return what a trainer publishes to simulated engines: a version, and no bytes."""
    return Manifest(
        transport="simulated",
        global_steps=global_steps,
        nbytes=0,
        tensors=(),
        locations=(None,),
        checksums=((global_steps,),),
    )


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A running request."""

    length: int
    finish_reason: str
    done: asyncio.Future[Completion]
    is_truncated: bool
    """Its sampling leaves tokens out, and has to say which it kept."""
    tokens: list[int] = field(default_factory=list)


class SimulatedEngine:
    def __init__(
        self,
        *,
        length_of: Callable[[GenerationRequest], int] = lambda request: request.sampling.max_tokens,
        step_s: float,
        max_num_seqs: int,
        swap_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        """`length_of`: how many tokens a request gets, one every `step_s` seconds, whatever the batch size."""
        self._length_of = length_of
        self._step_s = step_s
        self._swap_s = swap_s
        self._sleep = sleep
        self.admission = Admission(max_num_seqs)
        self._running: dict[str, SimulatedSequence] = {}
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._between_steps = asyncio.Lock()
        self._stepper: asyncio.Task[None] | None = None
        self._staged: Manifest | None = None
        self._death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._global_steps = -1
        self._num_submitted = 0
        self._frozen_at = 0.0
        self.usage = Usage()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises ValueError for stop strings: its tokens have no text."""
        if request.sampling.stop:
            raise ValueError(f"stop={request.sampling.stop}: the simulated engine has no texts, and so no stop strings")
        if self._death.done():
            raise self._death.result()
        self.usage.change(+1)
        try:
            return await self._generate(request)
        finally:
            self.usage.change(-1)

    async def _generate(self, request: GenerationRequest) -> Completion:
        name = str(request.request_id)
        entered = await self.admission.enter(name, is_continuation=request.is_continuation)
        try:
            if self._death.done():
                raise self._death.result()
            if not entered:
                return _completion([], "abort", request.sampling.truncates)
            self._num_submitted += 1
            sequence = self._start(request)
            self.admission.submitted(name)
            return await sequence.done
        except EngineDiedError as error:
            sequence = self._running.get(name)  # None: killed when it was let in
            raise EngineDiedError(str(error), sequence and self._sampled(sequence, "")) from None
        finally:
            self._running.pop(name, None)
            self.admission.leave(name)

    async def score(self, token_ids: IntArray, name: str) -> FloatArray:
        """Answer after as long as one token takes, as certain of all tokens as of its own."""
        self.usage.change(+1)
        try:
            if not await self.admission.enter(name):
                raise RuntimeError(f"the scoring {name} was aborted")
            self._num_submitted += 1
            self.admission.submitted(name)
            await self._may_step.wait()
            step = asyncio.ensure_future(self._sleep(self._step_s))
            await asyncio.wait({step, self._death}, return_when=asyncio.FIRST_COMPLETED)
            step.cancel()
            if self._death.done():
                raise self._death.result()
            self.usage.tokens += 1
            return np.zeros(len(token_ids) - 1, np.float32)
        finally:
            self.admission.leave(name)
            self.usage.change(-1)

    def _start(self, request: GenerationRequest) -> SimulatedSequence:
        length, limit = self._length_of(request), request.sampling.max_tokens
        finish_reason = "length" if length > limit else "stop"
        done = asyncio.get_running_loop().create_future()
        sequence = SimulatedSequence(min(length, limit), finish_reason, done, request.sampling.truncates)
        self._running[str(request.request_id)] = sequence
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_until_idle())
        return sequence

    def _sampled(self, sequence: SimulatedSequence, finish_reason: str) -> Completion:
        """Return what a sequence has sampled until now."""
        return _completion(sequence.tokens, finish_reason, sequence.is_truncated)

    @property
    def running(self) -> list[str]:
        return self.admission.inside

    async def abort(self, names: Collection[str] | None) -> list[str]:
        turned_away = self.admission.turn_away(names)
        ended = [name for name in self._running if names is None or name in names]
        for name in ended:
            sequence = self._running.pop(name)
            if not sequence.done.done():
                sequence.done.set_result(self._sampled(sequence, "abort"))
        return turned_away + ended

    async def freeze(self, clear_cache: bool) -> None:
        if self._may_step.is_set():
            self._may_step.clear()
            async with self._between_steps:
                self._frozen_at = asyncio.get_running_loop().time()

    async def flush(self) -> None:
        await asyncio.sleep(0)  # a step wakes those who wait for its tokens, and they come first

    async def thaw(self) -> float:
        if self._may_step.is_set():
            return 0.0
        self._may_step.set()
        return asyncio.get_running_loop().time() - self._frozen_at

    def partials(self, known: Mapping[RequestId, int]) -> dict[RequestId, Completion]:
        return {
            request_id: self._sampled(self._running[name], "").after(start)
            for request_id, start in known.items()
            if (name := str(request_id)) in self._running
        }

    async def stage(self, manifest: Manifest) -> None:
        self._staged = manifest

    async def swap(self, global_steps: int) -> list[WeightTag]:
        staged = self._staged
        if staged is None or staged.global_steps != global_steps:
            raise RuntimeError(f"cannot swap in version {global_steps}: staged is {staged and staged.global_steps}")
        return await self.load(staged)

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        if self._may_step.is_set():
            raise RuntimeError(f"version {manifest.global_steps} cannot be swapped in: the engine runs")
        await self._sleep(self._swap_s)
        self._global_steps = manifest.global_steps
        assert manifest.checksum is not None, "no bytes are received here that a checksum could be taken of"
        return [WeightTag(self._global_steps, manifest.checksum)]

    async def require_updatable(self) -> None:
        """Take any weights: there are none to transform."""

    async def tag_loaded(self, global_steps: int) -> None:
        self._global_steps = global_steps

    @property
    def num_workers(self) -> int:
        return 1

    async def wait_dead(self) -> BaseException:
        return await asyncio.shield(self._death)

    def kill(self) -> None:
        """Die: every request, now and later, fails with EngineDiedError."""
        error = EngineDiedError("the simulated engine was killed")
        if not self._death.done():
            self._death.set_result(error)
        self.admission.turn_away(None)
        for sequence in self._running.values():
            if not sequence.done.done():
                sequence.done.set_exception(error)

    def kv_usage(self) -> float | None:
        return None

    def exported_metrics(self) -> str:
        return ""

    def gauges(self) -> dict[str, float]:
        return {
            "engine_requests": self._num_submitted,
            "running_requests": len(self.admission.inside),
            "waiting_requests": len(self.admission.waiting),
        }

    def shutdown(self) -> None:
        self.kill()

    async def _step_until_idle(self) -> None:
        while self._running and not self._death.done():
            await self._may_step.wait()
            async with self._between_steps:
                if not self._may_step.is_set() or not self._running:  # paused again, or all aborted, before it woke up
                    continue
                stepping = list(self._running.items())
                await self._sleep(self._step_s)
                self.usage.tokens += sum(not sequence.done.done() for _, sequence in stepping)
                for name, sequence in stepping:
                    sequence.tokens.append(self._global_steps)
                    if len(sequence.tokens) == 1 and not sequence.done.done():
                        self.usage.began(name)
            for name, sequence in stepping:
                if sequence.done.done():  # aborted or cancelled in this very step
                    continue
                if len(sequence.tokens) >= sequence.length:
                    del self._running[name]
                    sequence.done.set_result(self._sampled(sequence, sequence.finish_reason))


def _completion(tokens: list[int], finish_reason: str, is_truncated: bool) -> Completion:
    """`is_truncated`: it says of each token that no other was left to draw from, as its logprob of 0 does."""
    token_ids = np.asarray(tokens, np.int32)
    spans, end = [], 0
    for version, group in itertools.groupby(tokens):
        start, end = end, end + len(list(group))
        spans.append(VersionSpan(start, end, version))
    return Completion(
        token_ids=token_ids,
        logprobs=np.zeros(len(tokens), np.float32),
        spans=tuple(spans),
        finish_reason=finish_reason,
        kept=KeptTokens(counts=np.ones(len(tokens), np.int32), token_ids=token_ids) if is_truncated else None,
    )
