"""The vLLM engine with clocks in it. Imports vLLM, whose environment variables must be set before."""

import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from rollout.engines.base import EngineSpec
from rollout.engines.vllm.engine import RequestOutputKind, VllmEngine, _sampling_params
from rollout.replica.continuation import generate_in_parts
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, GenerationRequest
from scripts.bench.weight_sync import recompute_meter
from weight_sync.protocol import Manifest, WeightTag


class TimedEngine(VllmEngine):
    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.swapped = (0.0, 0.0)
        """When the last swap, or load, was requested and when it was answered."""

    async def swap(self, global_steps: int) -> list[WeightTag]:
        started = time.perf_counter()
        tags = await super().swap(global_steps)
        self.swapped = (started, time.perf_counter())
        return tags

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        started = time.perf_counter()
        tags = await super().load(manifest)
        self.swapped = (started, time.perf_counter())
        return tags

    def num_prefilled(self) -> int:
        """Count the requests in flight that have a token."""
        return sum(count > 0 for count in self._llm.output_counts().values())

    async def stream(self, request: GenerationRequest, times: list[float]) -> Completion:
        """Generate like `generate`, and append the arrival time of each token to `times`."""
        params = _sampling_params(request.sampling)
        params.output_kind = RequestOutputKind.CUMULATIVE  # so that the last output is the one that `generate` gets
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        name, final, arrived = str(request.request_id), None, 0
        async for output in self._llm.generate(prompt, params, name):
            final, before = output, arrived
            arrived = len(output.outputs[0].token_ids)
            times += [time.perf_counter()] * (arrived - before)
        assert final is not None and final.finished
        return self._completion(final, self._boundaries.pop(name, []))

    async def install_meter(self) -> None:
        await self._on_worker(recompute_meter.install_meter)

    async def tokens_computed_again(self) -> int:
        """Tokens since the meter was installed."""
        return await self._on_worker(recompute_meter.read_meter)

    async def _on_worker(self, function: Callable[[Any], Any]) -> Any:
        [answer] = await self._llm.collective_rpc(cloudpickle.dumps(function))  # pyright: ignore[reportArgumentType]
        return answer


class StreamedTrajectory:
    """A request streamed by a client, over all its parts: an aborted one continues as another request."""

    def __init__(self, engine: TimedEngine, replica: RolloutReplica, request: GenerationRequest):
        self.request_id = request.request_id
        self.times: list[float] = []
        self._engine = engine
        self._replica = replica
        self._request = request

    async def run(self) -> Completion:
        completion, _ = await generate_in_parts(
            self._request, lambda part, _: self._engine.stream(part, self.times), self._replica._was_interrupted
        )
        return completion
