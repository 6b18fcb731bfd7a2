"""The vLLM engine. The only user of vLLM's Python API; vLLM's differences between versions end here.

Facts this rests on (vLLM 0.32):
- Utility replies overtake outputs on the way to the consumer, so counting tokens at the consumer when `pause` returns
  is wrong. Versions of tokens therefore come from the engine core's own labels, or, where vLLM has none (before 0.32),
  from counts taken behind a barrier in the output queue.
- The scheduler resumes kept requests with their KV cache. A request that was added but not prefilled would be prefilled
  with new weights on top of prefix blocks of old ones: so the prefix cache is salted with the version, the salt is
  chosen under the gate, and `pause` first lets every admitted request finish its prefill.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM

from rollout.engines.base import EngineSpec, WeightTag
from rollout.types import Completion, GenerationRequest, SamplingParams, VersionSpan

RECEIVER = "weight_sync.vllm_receiver.WeightReceiver"
HAS_NATIVE_VERSIONS = "update_weight_version" in vars(AsyncLLM)
PREFILL_GRACE_S = 5.0
"""How long a pause waits for admitted requests to be prefilled before it takes them back."""


class GatedLLM(AsyncLLM):
    """AsyncLLM whose every client passes the gate: submissions are salted with the version and wait while paused."""

    gate: asyncio.Lock
    """Held by a submission while it reaches the engine core, and by `freeze` until `thaw`."""
    seats: asyncio.Semaphore
    """As many requests as the engine runs at once. The others wait here, where they have no salt yet."""
    global_steps: int
    salt_prefix_cache: bool
    withdrawn: set[str]
    frozen_at: float
    """When the scheduler was told to stop, on the monotonic clock."""
    num_submitted: int
    """Requests that reached the engine core, those submitted again after a withdrawal included."""

    def open_gate(self, max_num_seqs: int) -> None:
        self.gate = asyncio.Lock()
        self.seats = asyncio.Semaphore(max_num_seqs)
        self.global_steps = -1
        self.salt_prefix_cache = True
        self.withdrawn = set()
        self.num_submitted = 0

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        async with self.gate:
            if self.salt_prefix_cache:
                prompt = {**prompt, "cache_salt": f"{self.global_steps}"}
            self.num_submitted += 1
            return await super().add_request(request_id, prompt, params, *args, **kwargs)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        async with self.seats:
            for attempt in itertools.count():
                attempt_id = f"{request_id}~{attempt}" if attempt else request_id
                outputs = super().generate(prompt, sampling_params, attempt_id, **kwargs)
                async for output in outputs:
                    if output.finished and attempt_id in self.withdrawn:
                        break  # taken back before its first token: submit again, with the new salt
                    yield output
                if attempt_id not in self.withdrawn:
                    return
                self.withdrawn.discard(attempt_id)

    async def freeze(self) -> None:
        """Close the gate, let admitted requests finish their prefill, then stop the scheduler, keeping everything."""
        await self.gate.acquire()
        try:
            await self._finish_prefills()
            self.frozen_at = time.monotonic()
            # Not pause_generation: it sleeps 20 ms after the scheduler has stopped. The reply comes when no step runs.
            await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            if not HAS_NATIVE_VERSIONS:
                await self._drain_outputs()
        except BaseException:
            self.gate.release()
            raise

    async def thaw(self) -> float:
        """Returns for how many seconds the scheduler stood still."""
        await self.engine_core.resume_scheduler_async()
        self.gate.release()
        return time.monotonic() - self.frozen_at

    def output_counts(self) -> dict[str, int]:
        """Tokens sampled so far by each running request. Exact only while frozen."""
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in self.output_processor.request_states.values()
            if state.detokenizer is not None
        }

    async def _finish_prefills(self) -> None:
        deadline = time.monotonic() + PREFILL_GRACE_S
        while unstarted := self._unstarted():
            if time.monotonic() > deadline:
                # No KV blocks are free for them. They have no token yet, so taking them back loses nothing.
                self.withdrawn.update(unstarted)
                await self.abort(unstarted)
                return
            await asyncio.sleep(0.0005)  # the engine core does not tell when a prefill ends

    def _unstarted(self) -> list[str]:
        states = self.output_processor.request_states.values()
        return [state.external_req_id for state in states if state.is_prefilling]

    async def _drain_outputs(self) -> None:
        """Every output that came before the pause reply has been processed when this returns: a sentinel behind them
        in the queue is taken only after they are."""
        queue = self.engine_core.outputs_queue  # pyright: ignore[reportAttributeAccessIssue]
        queue.put_nowait(EngineCoreOutputs())
        while not queue.empty():
            await asyncio.sleep(0)


class VllmEngine:
    """The `Engine` protocol over GatedLLM."""

    def __init__(self, spec: EngineSpec, native_versions: bool = HAS_NATIVE_VERSIONS, salt_prefix_cache: bool = True):
        """Starts the engine: seconds to minutes. The last two are for tests that compare with doing without."""
        self._native_versions = native_versions
        llm = GatedLLM.from_engine_args(_engine_args(spec))
        assert isinstance(llm, GatedLLM)
        self._llm = llm
        self._llm.open_gate(spec.max_num_seqs)
        self._llm.salt_prefix_cache = salt_prefix_cache
        self._counts: dict[str, int] = {}  # tokens of each running request at the pause
        self._boundaries: dict[str, list[tuple[int, int]]] = {}  # request -> (tokens so far, version from there on)

    async def generate(self, request: GenerationRequest) -> Completion:
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        final: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, _sampling_params(request.sampling), request.request_id):
                final = output
        finally:
            boundaries = self._boundaries.pop(request.request_id, [])
        assert final is not None and final.finished
        return self._completion(final, boundaries)

    async def pause(self) -> None:
        await self._llm.freeze()
        if not self._native_versions:
            self._counts = self._llm.output_counts()

    async def resume(self) -> float:
        return await self._llm.thaw()

    async def stage(self, manifest: dict[str, Any]) -> None:
        await self._llm.collective_rpc("receiver_stage", args=(manifest,))

    async def swap(self, global_steps: int) -> list[WeightTag]:
        answers = await self._llm.collective_rpc("receiver_swap", args=(global_steps,))
        if self._native_versions:
            await self._llm.update_weight_version(str(global_steps))
        else:
            for request_id, count in self._counts.items():
                self._boundaries.setdefault(request_id, [(0, self._llm.global_steps)]).append((count, global_steps))
        self._llm.global_steps = global_steps
        return [WeightTag(*answer) for answer in answers]

    async def tag_loaded(self, global_steps: int) -> None:
        if self._native_versions:
            await self._llm.update_weight_version(str(global_steps))
        self._llm.global_steps = global_steps

    async def wait_dead(self) -> BaseException:
        # The handler of outputs is the first to see the engine core go. It exists once a request has been sent.
        self._llm._run_output_handler()
        assert self._llm.output_handler is not None
        await asyncio.wait([self._llm.output_handler])
        return RuntimeError("the vLLM engine core died")

    def gauges(self) -> dict[str, float]:
        return {"engine_requests": self._llm.num_submitted}

    def shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # its finalizer must not run as late as the interpreter's exit

    def _completion(self, output: RequestOutput, boundaries: list[tuple[int, int]]) -> Completion:
        sampled = output.outputs[0]
        token_ids = np.asarray(sampled.token_ids, np.int32)
        assert sampled.finish_reason is not None
        assert isinstance(sampled.logprobs, FlatLogprobs) and len(sampled.logprobs.logprobs) == len(token_ids)
        if self._native_versions:
            spans = [VersionSpan(s.start, s.end, int(s.version)) for s in sampled.weight_versions or []]
        else:
            starts = boundaries or [(0, self._llm.global_steps)]
            ends = [start for start, _ in starts[1:]] + [len(token_ids)]
            spans = [VersionSpan(start, end, version) for (start, version), end in zip(starts, ends, strict=True)]
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(sampled.logprobs.logprobs, np.float32),
            spans=tuple(span for span in spans if span.end > span.start),
            finish_reason=sampled.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
        )


def _engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    on_cpu: dict[str, Any] = {}
    if spec.device == "cpu":
        # The uni-process executor saves a process and its import of torch; blocks of 32 cache short prompts.
        executor = "uni" if spec.tensor_parallel_size == 1 else "mp"
        on_cpu = {"distributed_executor_backend": executor, "block_size": 32}
    longer = spec.max_position_embeddings
    return AsyncEngineArgs(
        model=spec.model_path,
        dtype=spec.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=spec.max_model_len,
        hf_overrides={} if longer is None else {"max_position_embeddings": longer},
        max_num_seqs=spec.max_num_seqs,
        kv_cache_memory_bytes=spec.kv_cache_bytes,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        tensor_parallel_size=spec.tensor_parallel_size,
        enforce_eager=spec.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # those of the distribution that is sampled from
        worker_extension_cls=RECEIVER,
        disable_log_stats=True,
        **on_cpu,
    )


def _sampling_params(sampling: SamplingParams) -> VllmSamplingParams:
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,  # one list of floats, not a dictionary per token
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
