"""The vLLM engine: the `Engine` protocol over GatedLLM."""

import asyncio
import pickle
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.engines.admission import Admission
from rollout.engines.base import EngineDiedError, EngineSpec
from rollout.engines.usage import Usage
from rollout.engines.vllm.client import HAS_NATIVE_VERSIONS, GatedLLM
from rollout.engines.vllm.drafts import DraftCounter
from rollout.engines.vllm.scoring import score
from rollout.engines.vllm.stop_strings import continuing
from rollout.request_ids import RequestId
from rollout.types import (
    Completion,
    FloatArray,
    GenerationRequest,
    IntArray,
    SamplingParams,
    VersionSpan,
    shift_spans,
)
from weight_sync.protocol import Manifest, WeightTag

RECEIVER = "weight_sync.receiver.vllm_receiver.WeightReceiver"
FIRST_STAGE_WAIT_S, LAST_STAGE_WAIT_S = 0.002, 0.05


class VllmEngine:
    def __init__(self, spec: EngineSpec, replica: str = "replica"):
        """Starts the engine, which takes seconds to minutes. `replica` is the name by which weights are sent to it."""
        self._replica = replica
        self._native_versions = HAS_NATIVE_VERSIONS
        self._drafts = DraftCounter()
        counted: Any = None if spec.speculative is None else [self._drafts.of_engine]  # costs a little per step
        llm = GatedLLM.from_engine_args(_engine_args(spec), stat_loggers=counted)
        assert isinstance(llm, GatedLLM)
        self._llm = llm
        self._llm.open_gate(spec.max_num_seqs * spec.data_parallel_size, spec.prefill_grace_s)
        self._llm.serves_adapter = spec.adapter is not None
        self._staging_on_device = spec.staging_on_device
        self._staging: Manifest | None = None  # of the last call
        self._boundaries: dict[str, list[tuple[int, int]]] = {}  # request -> (token, version from there on)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises ValueError for stop strings where the engine has no tokenizer."""
        if request.sampling.stop and self._llm.output_processor.tokenizer is None:
            raise ValueError(f"stop={request.sampling.stop}: an engine with skip_tokenizer_init has no stop strings")
        prompt: Any = {"type": "token", "prompt_token_ids": list(request.prompt_ids)}
        params = _sampling_params(request.sampling, request.num_sampled)
        name = str(request.request_id)
        final: RequestOutput | None = None
        try:
            async for output in self._llm.generate(prompt, params, name, is_continuation=request.is_continuation):
                final = output
        except EngineDeadError as error:
            known = self.partials({request.request_id: 0})  # the front end outlives the core, and has all its tokens
            raise EngineDiedError("the vLLM engine core died", known.get(request.request_id)) from error
        finally:
            boundaries = self._boundaries.pop(name, [])
        assert final is not None and final.finished
        return self._completion(final, boundaries)

    async def score(self, token_ids: IntArray, name: str) -> FloatArray:
        return await score(self._llm, token_ids, name)

    @property
    def admission(self) -> Admission:
        return self._llm.admission

    @property
    def running(self) -> list[str]:
        return [self._llm.client_ids.get(name, name) for name in self._llm.admission.inside]

    async def abort(self, names: Collection[str] | None) -> list[str]:
        return await self._llm.abort_requests(names)

    async def freeze(self, clear_cache: bool) -> None:
        await self._llm.freeze(clear_cache)

    async def flush(self) -> None:
        await self._llm.flush()

    async def thaw(self) -> float:
        return await self._llm.thaw()

    def partials(self, known: Mapping[RequestId, int]) -> dict[RequestId, Completion]:
        states = self._llm.running_states()
        return {one: self._piece(states[name], name, known[one]) for one in known if (name := str(one)) in states}

    async def stage(self, manifest: Manifest) -> None:
        self._staging = manifest
        pickled = pickle.dumps(manifest)  # vLLM's own encoding would turn dataclasses into dicts
        await self._llm.on_every_worker("receiver_stage", pickled, self._replica, self._staging_on_device)
        wait_s = FIRST_STAGE_WAIT_S
        while self._staging is manifest and None in await self._llm.on_every_worker("receiver_staged"):
            await asyncio.sleep(wait_s)  # a worker can only be asked, and each question costs a moment between steps
            wait_s = min(2 * wait_s, LAST_STAGE_WAIT_S)
        if self._staging is not manifest:  # the caller of this one has given up
            raise RuntimeError(f"staging version {manifest.global_steps} was given up for another")

    async def swap(self, global_steps: int) -> list[WeightTag]:
        return await self._tag(global_steps, await self._llm.on_every_worker("receiver_swap", global_steps))

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        answers = await self._llm.on_every_worker("receiver_load", pickle.dumps(manifest), self._replica)
        return await self._tag(manifest.global_steps, answers)

    async def _tag(self, global_steps: int, answers: list[Any]) -> list[WeightTag]:
        """While frozen: from the next token on, tokens carry this version."""
        if self._native_versions:
            await self._llm.update_weight_version(str(global_steps))
        else:
            for request_id, count in self._llm.output_counts().items():
                self._boundaries.setdefault(request_id, [(0, self._llm.global_steps)]).append((count, global_steps))
        self._llm.global_steps, self._llm.salt = global_steps, f"{global_steps}-{answers[0][1]:x}"
        return [WeightTag(*answer) for answer in answers]

    async def tag_loaded(self, global_steps: int) -> None:
        if self._native_versions:
            await self._llm.update_weight_version(str(global_steps))
        self._llm.global_steps = global_steps

    @property
    def num_workers(self) -> int:
        parallel = self._llm.vllm_config.parallel_config
        return parallel.world_size * parallel.data_parallel_size

    async def wait_dead(self) -> BaseException:
        # The output handler is the first to see the engine core die. It exists once a request has been sent.
        self._llm._run_output_handler()
        assert self._llm.output_handler is not None
        await asyncio.wait([self._llm.output_handler])
        return EngineDiedError("the vLLM engine core died")

    @property
    def usage(self) -> Usage:
        return self._llm.usage

    def kv_usage(self) -> float | None:
        return self._llm.kv_usage()

    def gauges(self) -> dict[str, float]:
        admission = self._llm.admission
        return {
            "engine_requests": self._llm.num_submitted,
            "restarted_requests": self._llm.num_restarted,
            "running_requests": len(admission.inside),
            "waiting_requests": len(admission.waiting),
            "drafted_tokens": self._drafts.drafted,
            "accepted_tokens": self._drafts.accepted,
        }

    async def openai_app(self, chat_template: str | None) -> Any:
        from rollout.engines.vllm.openai_app import openai_app  # takes a second, and few need it

        return await openai_app(self._llm, chat_template)

    def shutdown(self) -> None:
        self._llm.shutdown()
        del self._llm  # its finalizer must not run as late as the interpreter's exit

    def _completion(self, output: RequestOutput, boundaries: list[tuple[int, int]]) -> Completion:
        sampled = output.outputs[0]
        token_ids = np.asarray(sampled.token_ids, np.int32)
        assert sampled.finish_reason is not None
        assert isinstance(sampled.logprobs, FlatLogprobs) and len(sampled.logprobs.logprobs) == len(token_ids)
        labels = sampled.weight_versions if self._native_versions else None
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(sampled.logprobs.logprobs, np.float32),
            spans=self._spans(labels, boundaries, len(token_ids)),
            finish_reason=sampled.finish_reason,
            cached_tokens=output.num_cached_tokens or 0,
        )

    def _piece(self, state: Any, name: str, start: int) -> Completion:
        """`state`: vLLM's record of a running request, whose tokens, logprobs and labels change between two awaits."""
        token_ids = np.asarray(state.detokenizer.output_token_ids[start:], np.int32)
        end = start + len(token_ids)
        labels = state._weight_version_spans() if self._native_versions else None
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(state.logprobs_processor.logprobs.logprobs[start:end], np.float32),
            spans=shift_spans(self._spans(labels, self._boundaries.get(name, []), end), -start),
            finish_reason="",
            cached_tokens=state.num_cached_tokens,
        )

    def _spans(self, labels: Any, boundaries: list[tuple[int, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
        """Version spans by the engine core's labels, or, where it has none, by the token counts at each update."""
        if self._native_versions:
            spans = [VersionSpan(s.start, s.end, int(s.version)) for s in labels or []]
        else:
            starts = boundaries or [(0, self._llm.global_steps)]
            ends = [start for start, _ in starts[1:]] + [num_tokens]
            spans = [VersionSpan(start, end, version) for (start, version), end in zip(starts, ends, strict=True)]
        return tuple(span for span in spans if span.end > span.start)


def _engine_args(spec: EngineSpec) -> AsyncEngineArgs:
    is_alone = spec.tensor_parallel_size == 1 and (spec.data_parallel_size == 1 or spec.device != "cpu")
    longer = spec.max_position_embeddings
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "hf_overrides": {} if longer is None else {"max_position_embeddings": longer},
        "max_num_seqs": spec.max_num_seqs,
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "data_parallel_size": spec.data_parallel_size,
        # Left to itself, vLLM sees the actor's placement group, and asks Ray for GPUs that the actor has already.
        "distributed_executor_backend": "uni" if is_alone else "mp",
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "worker_extension_cls": RECEIVER,
        "disable_log_stats": not spec.log_stats,
    }
    if spec.speculative is not None:
        arguments["speculative_config"] = dict(spec.speculative)
    if spec.device == "cpu":
        arguments["block_size"] = 32  # caches short prompts
    if spec.adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": spec.adapter.max_rank}
        if spec.adapter.layers is not None and "lora_target_modules" in AsyncEngineArgs.__dataclass_fields__:
            arguments["lora_target_modules"] = list(spec.adapter.layers)  # the others compute nothing for it
    return AsyncEngineArgs(**(arguments | dict(spec.engine_args)))


def _sampling_params(sampling: SamplingParams, num_sampled: int = 0) -> VllmSamplingParams:
    """`num_sampled`: as in `GenerationRequest`."""
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
        detokenize=bool(sampling.stop),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # a stop string may be one, or hold one
        extra_args=continuing(num_sampled) if sampling.stop else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # no one else holds them: no deep copy
    )
