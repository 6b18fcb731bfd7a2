"""The vLLM engine with a clock at its tokens, and a meter of what it computes again. Imports vLLM, whose environment
variables must be set before."""

import re
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from rollout.engines.base import EngineSpec
from rollout.engines.vllm.engine import RequestOutputKind, VllmEngine
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest

TRAJECTORY = re.compile(r"\d+-\d+")
"""The beginning of a request's name in the engine, without the suffixes of a continuation and of vLLM."""


class TimedEngine(VllmEngine):
    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self._watched: dict[RequestId, list[float]] = {}

    def num_prefilled(self) -> int:
        """Count the requests in flight that have a token."""
        return sum(count > 0 for count in self._llm.output_counts().values())

    def watch(self, request: RequestId) -> list[float]:
        """Return the list that gets the arrival time of each token of a request, over all its parts: one that an update
        aborts continues as another."""
        return self._watched.setdefault(request, [])

    async def generate(self, request: GenerationRequest) -> Completion:
        times = self._watched.get(request.request_id.whole)
        return await (super().generate(request) if times is None else self._stream(request, times))

    async def _stream(self, request: GenerationRequest, times: list[float]) -> Completion:
        params = self._params(request)
        params.output_kind = RequestOutputKind.CUMULATIVE  # so that the last output is the one that `generate` gets
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        name, final, arrived = str(request.request_id), None, 0
        async for output in self._llm.generate(prompt, params, name, is_continuation=request.is_continuation):
            final, before = output, arrived
            arrived = len(output.outputs[0].token_ids)
            times += [time.perf_counter()] * (arrived - before)
        assert final is not None and final.finished
        return self._completion(final, self._boundaries.pop(name, []))

    async def install_meter(self) -> None:
        await self._on_worker(install_meter)

    async def tokens_computed_again(self) -> int:
        """Return the tokens since the meter was installed."""
        return await self._on_worker(lambda worker: worker.model_runner.recompute_meter.tokens)

    async def _on_worker(self, function: Callable[[Any], Any]) -> Any:
        [answer] = await self._llm.collective_rpc(cloudpickle.dumps(function))  # pyright: ignore[reportArgumentType]
        return answer


class RecomputeMeter:
    """Counts tokens computed at positions of a trajectory that had been computed before. vLLM's own counters leave out
    what is prefilled again after a preemption, and a cleared KV cache is recomputed in that way."""

    def __init__(self) -> None:
        self.tokens = 0
        self._reached: dict[str, int] = {}

    def take(self, request_id: str, start: int, count: int) -> None:
        """Record that `count` tokens are computed from position `start`. Raises ValueError for a name that TRAJECTORY
        does not match."""
        match = TRAJECTORY.match(request_id)
        if match is None:
            raise ValueError(f"request {request_id}: its name does not begin like 0-31")
        reached, end = self._reached.get(match[0], 0), start + count
        self.tokens += max(min(end, reached) - start, 0)
        self._reached[match[0]] = max(end, reached)


def install_meter(worker: Any) -> None:
    """Wrap the worker's model runner; runs in its process."""
    runner, meter = worker.model_runner, RecomputeMeter()
    execute = runner.execute_model

    def execute_model(step: Any, *args: Any, **kwargs: Any) -> Any:
        cached = step.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, start in starts.items():
            meter.take(request_id, start, step.num_scheduled_tokens[request_id])
        return execute(step, *args, **kwargs)

    runner.execute_model, runner.recompute_meter = execute_model, meter
