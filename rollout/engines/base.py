"""What a rollout engine is. `vllm.py` has the real one, `simulated.py` one with a clock and no model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from rollout.engines.usage import Usage
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest
from weight_sync.protocol import Manifest, WeightTag


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How a replica's engine is started."""

    model_path: str
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    max_model_len: int
    """Prompt and response tokens of one trajectory at most."""
    max_num_seqs: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    tensor_parallel_size: int
    enforce_eager: bool
    data_parallel_size: int = 1
    gpu_share: float = 1.0
    """Of each GPU. Below 1 only with one GPU."""
    staging_on_device: bool = False
    """Staging memory for new weights beside the live ones, instead of in host memory."""
    log_stats: bool = False
    """Let the engine measure itself, for /metrics. Costs a little per step."""
    max_position_embeddings: int | None = None
    """Replaces that of the model's config, which bounds max_model_len; none keeps it."""


class EngineDiedError(RuntimeError):
    """The engine is gone: every request, now and later, fails with this."""

    def __init__(self, what: str, partial: Completion | None = None):
        """`partial`: what the request had sampled. finish_reason is ""."""
        super().__init__(what)
        self.partial = partial

    def __reduce__(self) -> tuple[type["EngineDiedError"], tuple[str, Completion | None]]:
        return EngineDiedError, (str(self), self.partial)


class Engine(Protocol):
    """All calls come from one event loop. Tokens in, tokens out, each tagged with the version that sampled it."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Waits while held and while `max_num_seqs` others run. Cancelling it aborts the request.

        An aborted request answers with the tokens it has, none if it never ran, and finish_reason "abort".
        """
        ...

    async def hold(self) -> None:
        """Let no new request in. Holds add up."""
        ...

    def release(self) -> None: ...

    async def abort(self, names: Collection[str] | None) -> list[str]:
        """End these requests, running or waiting, with the tokens they have; None is all. Returns those it knew."""
        ...

    @property
    def running(self) -> list[str]:
        """Names of the requests inside."""
        ...

    async def emptied(self) -> None:
        """Returns when no request is running."""
        ...

    async def freeze(self, clear_cache: bool) -> None:
        """While held: stop between two steps, keeping every request; with `clear_cache` without their KV cache.
        Returns when no token is sampled any more. Idempotent."""
        ...

    async def thaw(self) -> float:
        """Returns for how many seconds the engine was frozen."""
        ...

    def partials(self, known: Mapping[RequestId, int]) -> dict[RequestId, Completion]:
        """What these requests, where they run, have sampled after their first `known[request_id]` tokens; finish_reason
        is "". Those that have nothing new may be left out."""
        ...

    async def stage(self, manifest: Manifest) -> None:
        """Take the published weights into staging memory, while generating. Raises when they are not what was sent."""
        ...

    async def swap(self, global_steps: int) -> list[WeightTag]:
        """While frozen: make the staged weights live, and tag them. One answer per worker."""
        ...

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        """While frozen: the published weights straight into the live ones. One answer per worker."""
        ...

    async def tag_loaded(self, global_steps: int) -> None:
        """Take the weights that it was started with for those of `global_steps`. Before the first request only."""
        ...

    @property
    def num_workers(self) -> int:
        """How many processes hold a part of the model, or a copy."""
        ...

    async def wait_dead(self) -> BaseException:
        """Returns when the engine has died, with the reason."""
        ...

    @property
    def usage(self) -> Usage:
        """Of all requests, whoever sent them: agent loops, or clients over HTTP."""
        ...

    def gauges(self) -> dict[str, float]:
        """At least `engine_requests`: how many requests began in the engine, any that began twice counted twice;
        `running_requests` and `waiting_requests` now; `restarted_requests` where any can begin twice."""
        ...

    def shutdown(self) -> None: ...
