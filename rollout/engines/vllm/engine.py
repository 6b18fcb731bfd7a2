"""The vLLM engine: the `Engine` protocol over GatedLLM.

Facts that `score` rests on, which takes vLLM's prompt logprobs (vLLM 0.26 to 0.33):
- They are of the model's own distribution: temperature, top-p and top-k of a request do not touch its prompt.
- A request that asks for them reads nothing of the prefix cache, whose blocks hold no logits.
- A step computes the logits of all prompt tokens that it reads, in float32, beside what memory vLLM has profiled.
  `max_num_batched_tokens` bounds them.
- With prompt_logprobs=0 only the logprob of the token that is there leaves the worker, and no top k.
- A request cannot end with its prompt: one token is sampled, which nobody reads.
"""

import asyncio
import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams as VllmSamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from configs.rollout import MOST_KEPT, TIES
from configs.validate import ConfigError
from rollout.engines.admission import Admission
from rollout.engines.base import EngineDiedError, EngineSpec
from rollout.engines.usage import Usage
from rollout.engines.vllm.client import HAS_NATIVE_VERSIONS, GatedLLM
from rollout.engines.vllm.kept_logprobs import KeptLogprobs
from rollout.engines.vllm.stop_strings import continuing
from rollout.engines.vllm.version_spans import counted_spans, labelled_spans
from rollout.request_ids import RequestId
from rollout.types import (
    Completion,
    FloatArray,
    GenerationRequest,
    IntArray,
    Routes,
    SamplingParams,
    VersionSpan,
    shift_spans,
)
from weight_sync.protocol import Manifest, WeightTag

ROUTES = "enable_return_routed_experts"
HAS_ROUTES = find_spec("vllm.distributed.aux_output_connector") is not None
"""True since 0.32. Earlier ones say which experts were chosen in other ways, or not."""
RECEIVER = "weight_sync.receiver.vllm_receiver.WeightReceiver"
USAGE = UsageContext.OPENAI_API_SERVER
"""The use by which vLLM chooses how many tokens a step computes where `max_num_batched_tokens` is not set: as for `vllm
serve`, 8,192 on an H100. An engine of any other use has 2,048."""
LEAST_SHARE = 0.05
"""The least that rollout.gpu_memory_utilization may be."""
logger = logging.getLogger(__name__)
FIRST_STAGE_WAIT_S, LAST_STAGE_WAIT_S = 0.002, 0.05


class DraftCounter(StatLoggerBase):
    """A counter of drafts. vLLM hands it the statistics of every step, of all data-parallel engines. An engine counts
    from its start on.

    Example: GatedLLM.from_vllm_config(config, stat_loggers=[drafts.for_engine])
    """

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    def for_engine(self, vllm_config: Any, engine_index: int = 0) -> "DraftCounter":
        """Return the one counter for all data-parallel engines."""
        return self

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None and (drafting := scheduler_stats.spec_decoding_stats) is not None:
            self.drafted += drafting.num_draft_tokens
            self.accepted += drafting.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Write nothing down, unlike vLLM's own loggers."""


class VllmEngine:
    def __init__(self, spec: EngineSpec, replica: str = "replica"):
        """Starts the engine, which takes seconds to minutes. `replica` is the name by which weights are sent to it."""
        self._replica = replica
        self._native_versions = HAS_NATIVE_VERSIONS
        self._drafts = DraftCounter()
        counted: Any = None if spec.speculative is None else [self._drafts.for_engine]  # costs a little per step
        arguments = _engine_args(spec)
        llm = GatedLLM.from_vllm_config(
            engine_config(spec, arguments), stat_loggers=counted, disable_log_stats=arguments.disable_log_stats
        )
        assert isinstance(llm, GatedLLM)
        self._llm = llm
        self._vocab_size = llm.vllm_config.model_config.get_vocab_size()
        self._llm.open_gate(spec.max_num_seqs * spec.data_parallel_size, spec.prefill_grace_s)
        self._llm.serves_adapter = spec.adapter is not None
        self._staging_on_device = spec.staging_on_device
        self._staging: Manifest | None = None  # of the last call
        self._boundaries: dict[str, list[tuple[int, int]]] = {}  # request -> (token, version from there on)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises ValueError for stop strings where the engine has no tokenizer."""
        if request.sampling.stop and self._llm.output_processor.tokenizer is None:
            raise ValueError(f"stop={request.sampling.stop}: an engine with skip_tokenizer_init has no stop strings")
        params, name = self._params(request), str(request.request_id)
        try:
            final = await self._output([*request.prompt_ids], params, name, request.is_continuation)
        except EngineDeadError as error:
            known = self.partials({request.request_id: 0})  # the front end outlives the core, and has all its tokens
            raise EngineDiedError("the vLLM engine core died", known.get(request.request_id)) from error
        finally:
            boundaries = self._boundaries.pop(name, [])
        completion = self._completion(final, boundaries)
        return replace(completion, routes=None) if request.request_id.is_evaluation else completion

    async def _output(
        self, prompt_ids: list[int], params: VllmSamplingParams, name: str, is_continuation: bool = False
    ) -> RequestOutput:
        """Return the one output of a request. Raises EngineDeadError."""
        prompt: Any = {"type": "token", "prompt_token_ids": prompt_ids}
        final: RequestOutput | None = None
        async for output in self._llm.generate(prompt, params, name, is_continuation=is_continuation):
            final = output
        assert final is not None and final.finished
        return final

    def _params(self, request: GenerationRequest) -> VllmSamplingParams:
        params = _sampling_params(request.sampling, request.num_sampled)
        if request.num_routed:
            params.routed_experts_prompt_start = request.num_routed  # unread where nothing is asked of experts
        if request.sampling.truncates and not request.request_id.is_evaluation:  # an evaluation trains nothing
            params.top_k = min(MOST_KEPT if params.top_k < 1 else params.top_k, self._vocab_size)
            params.logprobs = min(params.top_k + TIES, self._vocab_size)
        return params

    async def score(self, token_ids: IntArray, name: str) -> FloatArray:
        params = VllmSamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        try:
            final = await self._output(token_ids.tolist(), params, name)
        except EngineDeadError as error:
            raise EngineDiedError("the vLLM engine core died") from error
        if final.outputs[0].finish_reason == "abort":
            raise RuntimeError(f"the scoring {name} was aborted")
        prompt_logprobs = final.prompt_logprobs
        assert isinstance(prompt_logprobs, FlatLogprobs) and len(prompt_logprobs.logprobs) == len(token_ids) - 1
        return np.asarray(prompt_logprobs.logprobs, np.float32)

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
        return {key: self._piece(states[name], name, known[key]) for key in known if (name := str(key)) in states}

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
        self._require_frozen(global_steps)
        return await self._tag(global_steps, await self._llm.on_every_worker("receiver_swap", global_steps))

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        self._require_frozen(manifest.global_steps)
        answers = await self._llm.on_every_worker("receiver_load", pickle.dumps(manifest), self._replica)
        return await self._tag(manifest.global_steps, answers)

    def _require_frozen(self, global_steps: int) -> None:
        """Raise RuntimeError where tokens could be sampled from weights that are half those of the new version."""
        if self._llm.frozen_at is None:
            raise RuntimeError(f"version {global_steps} cannot be swapped in: the engine runs")

    async def _tag(self, global_steps: int, answers: list[Any]) -> list[WeightTag]:
        """While frozen: from the next token on, tokens carry this version."""
        if self._native_versions:
            await self._llm.update_weight_version(str(global_steps))
        else:
            for request_id, count in self._llm.output_counts().items():
                self._boundaries.setdefault(request_id, [(0, self._llm.global_steps)]).append((count, global_steps))
        self._llm.global_steps, self._llm.salt = global_steps, f"{global_steps}-{answers[0][1]:x}"
        return [WeightTag(*answer) for answer in answers]

    async def require_updatable(self) -> None:
        refusals = await self._llm.on_every_worker("receiver_refusal")
        if reasons := {reason for reason in refusals if reason is not None}:
            raise ConfigError(f"model.path={self._llm.vllm_config.model_config.model}: {'; '.join(sorted(reasons))}")

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

    def exported_metrics(self) -> str:
        return generate_latest(REGISTRY).decode()

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
            kept=sampled.logprobs.kept() if isinstance(sampled.logprobs, KeptLogprobs) else None,
            routes=_routes([] if sampled.routed_experts is None else [sampled.routed_experts]),
        )

    def _piece(self, state: Any, name: str, start: int) -> Completion:
        """`state`: vLLM's record of a running request, whose tokens, logprobs and labels change between two awaits."""
        token_ids = np.asarray(state.detokenizer.output_token_ids[start:], np.int32)
        end, logprobs = start + len(token_ids), state.logprobs_processor.logprobs
        labels = state._weight_version_spans() if self._native_versions else None
        routes = _routes(state.routed_experts_chunks) if HAS_ROUTES else None
        return Completion(
            token_ids=token_ids,
            logprobs=np.asarray(logprobs.logprobs[start:end], np.float32),
            spans=shift_spans(self._spans(labels, self._boundaries.get(name, []), end), -start),
            finish_reason="",
            cached_tokens=state.num_cached_tokens,
            kept=logprobs.kept(start).cut(0, len(token_ids)) if isinstance(logprobs, KeptLogprobs) else None,
            routes=routes if routes is None or start == 0 else routes.last(len(token_ids)),
        )

    def _spans(self, labels: Any, boundaries: list[tuple[int, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
        """Version spans by the engine core's labels, or, where it has none, by the token counts at each update."""
        if self._native_versions:
            return labelled_spans(labels)
        return counted_spans(boundaries, num_tokens, self._llm.global_steps)


def engine_config(spec: EngineSpec, arguments: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's config of the arguments, of an engine that says which experts it chose if that was asked for.

    Raises:
        ConfigError: it cannot, and has to.
    """
    config = arguments.create_engine_config(USAGE)
    if spec.replay_routes is False:
        return config
    if not config.model_config.is_moe:
        problem = f"{spec.model_path} is a dense model"
    elif not HAS_ROUTES:
        problem = "this version of vLLM does not say which experts it chose"
    elif not config.cache_config.enable_prefix_caching:
        problem = "vLLM says which experts it chose with prefix caching only"
    elif spec.device == "cpu":
        config.aux_output_config.enable_return_routed_experts = True  # weight_sync/receiver/routes_on_cpu.py
        return config
    else:
        try:  # vLLM refuses what it cannot: Model Runner V1, pipelines, shared contexts
            arguments = _engine_args(replace(spec, engine_args=dict(spec.engine_args) | {ROUTES: True}))
            return arguments.create_engine_config(USAGE)
        except ValueError as error:
            problem = str(error)
    if spec.replay_routes:
        raise ConfigError(f"model.replay_routes=true: {problem}: set it to null or false")
    if config.model_config.is_moe:
        logger.warning("the trainer chooses experts by itself (model.replay_routes): %s", problem)
    return config


def _routes(chunks: Sequence[Any]) -> Routes | None:
    """Return the experts that vLLM says, of all inputs since the one that was asked for."""
    return Routes(experts=np.concatenate(chunks)) if len(chunks) else None


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
        "gpu_memory_utilization": _memory_share(spec),
        "tensor_parallel_size": spec.tensor_parallel_size,
        "data_parallel_size": spec.data_parallel_size,
        # Left to itself, vLLM sees the actor's placement group, and asks Ray for GPUs that the actor has already.
        "distributed_executor_backend": "uni" if is_alone else "mp",
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "max_logprobs": MOST_KEPT + TIES,
        "worker_extension_cls": RECEIVER,
        "disable_log_stats": not spec.log_stats,
    }
    if spec.speculative is not None:
        arguments["speculative_config"] = dict(spec.speculative)
    if spec.transfer_backend is not None:
        arguments["weight_transfer_config"] = {"backend": spec.transfer_backend}
    if spec.device == "cpu":
        arguments["block_size"] = 32  # caches short prompts
        if not (spec.engine_args.get("attention_config") or {}).get("backend"):  # vLLM takes one of both
            # Of latent attention; other models ignore it. With AMX, vLLM would take one that keeps no plain weights.
            arguments["attention_backend"] = "CPU_MLA"
    if spec.adapter is not None:
        arguments |= {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": spec.adapter.max_rank}
        if spec.adapter.layers is not None and "lora_target_modules" in AsyncEngineArgs.__dataclass_fields__:
            arguments["lora_target_modules"] = list(spec.adapter.layers)  # the others compute nothing for it
    return AsyncEngineArgs(**(arguments | dict(spec.engine_args)))


def _memory_share(spec: EngineSpec) -> float:
    """Return the share of the GPU that must be free when the engine starts. vLLM asks for it also where the size of the
    KV cache is set, which needs no share, and others may have the rest of the GPU by then."""
    is_sized = spec.device != "cpu" and spec.kv_cache_bytes is not None
    return LEAST_SHARE if is_sized else spec.gpu_memory_utilization


def _sampling_params(sampling: SamplingParams, num_sampled: int = 0) -> VllmSamplingParams:
    """`num_sampled`: as in `GenerationRequest`."""
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
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
