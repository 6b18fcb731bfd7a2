"""The interface of a rollout engine. `vllm/` is one; `simulated.py` is one with a clock and no model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.engines.admission import Admission
from rollout.engines.usage import Usage
from rollout.request_ids import RequestId
from rollout.types import Completion, FloatArray, GenerationRequest, IntArray
from weight_sync.protocol import Manifest, WeightTag


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    model_path: str
    device: str  # "cpu" or "cuda"
    dtype: str
    max_model_len: int
    """Prompt and response of one trajectory."""
    max_num_seqs: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    tensor_parallel_size: int
    enforce_eager: bool
    data_parallel_size: int = 1
    gpu_share: float = 1.0
    """Share of each GPU. Below 1 only with one GPU."""
    staging_on_device: bool = False
    log_stats: bool = False
    """Collect vLLM's statistics for /metrics, which costs a little per step."""
    prefill_grace_s: float = 5.0
    """Seconds of a pause in which admitted requests may finish their prefill. Those without KV blocks begin again after
    the pause, which costs time and no token. Below the least weight_sync.pause_timeout_s, which is 10."""
    max_position_embeddings: int | None = None
    """Replaces the value in the model's config, which bounds max_model_len; None keeps it."""
    adapter: "ServedAdapter | None" = None
    """Updates bring an adapter, which the engine computes beside the weights that it loaded."""
    speculative: Mapping[str, Any] | None = None
    """The value of vLLM's `speculative_config`. With it, `gauges` count drafted and accepted tokens."""
    replay_routes: bool | None = False
    """Say which experts were chosen for each token (`Routes`). None: if the model has experts and the engine can."""
    transfer_backend: str | None = None
    """The backend of vLLM's own weight transfer that brings updates; None: no backend does."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's own arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    max_rank: int
    """The largest rank for which the engine has kernels."""
    layers: tuple[str, ...] | None
    """Ends of the names of the layers that may have one; None: any."""


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

    @property
    def admission(self) -> Admission:
        """The gate that every request passes."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate, waiting while the engine is held or full. Cancelling the call aborts the request. An aborted
        request answers with the tokens it has, none if it never ran, and finish_reason "abort"."""
        ...

    async def score(self, token_ids: IntArray, name: str) -> FloatArray:
        """[L] -> [L - 1]: log-probabilities at temperature 1 of all tokens but the first, each after those before it.
        Waits as `generate` does. Raises RuntimeError where the request `name` is aborted."""
        ...

    async def abort(self, names: Collection[str] | None) -> list[str]:
        """End these requests, running or waiting, with the tokens they have; None is all. Returns those it knew."""
        ...

    @property
    def running(self) -> list[str]:
        """Names of the requests inside, as their clients know them."""
        ...

    async def freeze(self, clear_cache: bool) -> None:
        """While held: stop between two steps, keeping every request; with `clear_cache` without their KV cache."""

    async def flush(self) -> None:
        """While frozen: return when all that was sampled has been handed to those who wait for it."""

    async def thaw(self) -> float:
        """Returns for how many seconds the engine was frozen."""
        ...

    def partials(self, known: Mapping[RequestId, int]) -> dict[RequestId, Completion]:
        """Return what these requests, as far as they run, have sampled after their first `known[request_id]` tokens;
        finish_reason is "". Requests without new tokens may be left out."""
        ...

    async def stage(self, manifest: Manifest) -> None:
        """Receive published weights into staging memory, while generating. Raises when they are not what was sent."""

    async def swap(self, global_steps: int) -> list[WeightTag]:
        """While frozen: make the staged weights live, and tag them. One answer per worker."""
        ...

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        """While frozen: receive published weights straight into the live ones. One answer per worker."""
        ...

    async def require_updatable(self) -> None:
        """Raise ConfigError where updates cannot reach the weights, because the engine transforms them after
        loading."""

    async def tag_loaded(self, global_steps: int) -> None:
        """Tag the weights that the engine was started with."""

    @property
    def num_workers(self) -> int:
        """The number of processes that hold a part or a copy of the model."""
        ...

    async def wait_dead(self) -> BaseException:
        """Returns when the engine has died, with the reason."""
        ...

    @property
    def usage(self) -> Usage:
        """Usage by all requests, those of HTTP clients too."""
        ...

    def kv_usage(self) -> float | None:
        """Return the share of the KV cache in use, as far as the engine knows; None where it does not."""
        ...

    def gauges(self) -> dict[str, float]:
        """Return at least `engine_requests` (requests that began in the engine; one that began twice counts twice),
        `running_requests`, `waiting_requests`, `restarted_requests` where a request can begin twice, and
        `drafted_tokens` and `accepted_tokens` of speculative decoding where there is some."""
        ...

    def exported_metrics(self) -> str:
        """Return the engine's own metrics, as text that Prometheus reads; empty where it keeps none."""
        ...

    def shutdown(self) -> None: ...
