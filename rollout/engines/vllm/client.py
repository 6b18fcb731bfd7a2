"""vLLM's AsyncLLM with admission, abort, freeze and thaw.

Facts this rests on (vLLM 0.26 to 0.33):
- Utility replies overtake outputs on the way to the consumer, so when the scheduler has stopped, some tokens are still
  on their way. A client's pause waits for a marker behind them in the queue of outputs; an update does not, because
  versions of tokens come from the engine core's own labels, or, where vLLM has none (before 0.32), from token counts
  taken behind such a marker.
- The scheduler resumes kept requests with their KV cache. A request that was added but not prefilled would be prefilled
  with new weights on top of prefix blocks of old ones: so the prefix cache is salted with the version, the salt is
  chosen on the way in, and `freeze` first lets every admitted request finish its prefill.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollout.engines.admission import Admission
from rollout.engines.usage import Usage
from rollout.engines.vllm.kept_logprobs import KeptLogprobs
from rollout.engines.vllm.markers import OutputMarkers
from rollout.engines.vllm.stop_strings import continue_texts
from rollout.request_ids import ClientNames, repeated

HAS_NATIVE_VERSIONS = "weight_versions" in CompletionOutput.__dataclass_fields__
"""True since 0.32. From 0.27 on the engine takes a version, but labels no tokens with it."""


ABORTS_SEEN_S = 0.01
"""The seconds after which a freeze sees that a request which it waits for is gone: no output says so."""


class GatedLLM(AsyncLLM):
    """AsyncLLM whose every request passes the admission, is salted with the version, and waits while held."""

    def open_gate(self, max_num_seqs: int, prefill_grace_s: float) -> None:
        """Set up the gate, once and before the first request. `prefill_grace_s`: how long a freeze waits for admitted
        requests to be prefilled before it takes them back."""
        self.admission = Admission(max_num_seqs)
        self.prefill_grace_s = prefill_grace_s
        self.global_steps = -1
        self.salt = ""  # version and checksum: other weights under the same number share nothing
        self.salt_prefix_cache = True
        self.serves_adapter = False
        self.adapter: LoRARequest | None = None  # which every request has to name, then
        self.client_ids: dict[str, str] = {}  # request inside -> the id that its client gave it, where they differ
        self.numbers = itertools.count(1)
        self.withdrawn: set[str] = set()
        self.frozen_at: float | None = None  # when the scheduler stopped, on the monotonic clock
        self.num_submitted = 0  # to the engine core, again and again
        self.num_restarted = 0  # submitted again
        self.usage = Usage()
        self.outputs_came = asyncio.Event()
        processor: Any = self.output_processor
        process_outputs = processor.process_outputs

        def counted(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            states = processor.request_states  # an aborted request has none
            for output in outputs:
                if (state := states.get(output.request_id)) is not None:
                    self.usage.tokens += len(output.new_token_ids)
                    if state.is_prefilling and output.new_token_ids:
                        self.usage.began(self._client_name(state))
                        _keep_only_what_was_left(state.logprobs_processor)
            self.outputs_came.set()
            return process_outputs(outputs, *args, **kwargs)

        processor.process_outputs = counted
        continue_texts(processor)

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            self._markers = OutputMarkers(self.engine_core)
        super()._run_output_handler()

    async def add_request(self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.salt_prefix_cache:
                own_salt = prompt.get("cache_salt") or ""  # from a client that shares its prefixes with no other
                prompt = {**prompt, "cache_salt": f"{self.salt}|{own_salt}"}
            if self.serves_adapter:
                kwargs["lora_request"] = self.adapter = self.adapter or await self._open_slots()
            self.num_submitted += 1
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        finally:
            self.admission.submitted(request_id)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, is_continuation: bool = False, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt = _as_dictionary(prompt)
        inside_id = self._name_inside(request_id)
        self.usage.change(+1)
        try:
            may_run = await self.admission.enter(inside_id, sampling_params.n, is_continuation)
            while may_run:
                async with aclosing(super().generate(prompt, sampling_params, inside_id, **kwargs)) as outputs:
                    async for output in outputs:
                        if output.finished and inside_id in self.withdrawn:
                            break  # taken back before its first token: submit again, with the new salt
                        yield _with_end(output)
                if inside_id not in self.withdrawn:
                    return
                self.withdrawn.discard(inside_id)
                last_id, inside_id = inside_id, self._name_inside(request_id)
                self.client_ids.pop(last_id, None)
                self.admission.leave(last_id)
                may_run = await self.admission.enter(inside_id, sampling_params.n, is_continuation=True)
                self.num_restarted += may_run
            yield _unstarted_answer(request_id, prompt, sampling_params)
        finally:
            self.withdrawn.discard(inside_id)
            self.client_ids.pop(inside_id, None)
            self.admission.leave(inside_id)
            self.usage.change(-1)

    def _name_inside(self, request_id: str) -> str:
        """Return an id that is not in use. A client over HTTP may send one twice, and a request taken back is sent
        again."""
        if not self.admission.has(request_id):
            return request_id
        inside_id = repeated(request_id, next(self.numbers))
        self.client_ids[inside_id] = request_id
        return inside_id

    async def abort_requests(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends requests, waiting or running, with the tokens they have. Only while held: none may be on its way in."""
        inside_ids = [*self.admission.waiting, *self.admission.inside]
        known = {inside: self.client_ids.get(inside, inside) for inside in inside_ids}
        if request_ids is not None:
            wanted = set(request_ids)
            known = {key: name for key, name in known.items() if not wanted.isdisjoint(ClientNames.of(name))}
        running = [inside for inside in self.admission.inside if inside in known]
        self.admission.turn_away(known)
        if running:
            await self.abort(running)
            self._require_ended(running)
        return list(known.values())

    def _require_ended(self, names: Collection[str]) -> None:
        """Raise RuntimeError for requests that vLLM still runs after it was told to abort them: it ignores names that
        it does not know."""
        if left := {state.external_req_id for state in self.output_processor.request_states.values()} & set(names):
            raise RuntimeError(f"vLLM has ignored the abort of {', '.join(sorted(left))}, and runs on")

    async def freeze(self, clear_cache: bool) -> None:
        """While held: let the requests inside finish their prefill, then stop the scheduler, which keeps them."""
        if self.frozen_at is None:
            await self._finish_prefills()
            self.frozen_at = time.monotonic()
        # Not pause_generation: it sleeps 20 ms after the scheduler has stopped. The reply comes when no step runs.
        await self.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        if not HAS_NATIVE_VERSIONS:
            await self.flush()

    async def flush(self) -> None:
        """Return when every output that came before has been handed to the stream that waits for it."""
        self._run_output_handler()
        assert self.output_handler is not None
        await self._markers.flush(self.output_handler)
        if self.errored:
            raise EngineDeadError

    async def thaw(self) -> float:
        if self.frozen_at is None:
            return 0.0
        await self.engine_core.resume_scheduler_async()
        frozen_at, self.frozen_at = self.frozen_at, None
        return time.monotonic() - frozen_at

    async def on_every_worker(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the receiver of every worker. Raises RuntimeError with what one of them has raised, when all
        have answered."""
        answers = await self.rpc("receiver_call", method, *args)
        if errors := [error for _, error in answers if error is not None]:
            raise RuntimeError(errors[0])
        return [result for result, _ in answers]

    async def rpc(self, method: Any, *args: Any) -> list[Any]:
        """Call collective_rpc, but return the answers of all data-parallel engines instead of the first one's."""
        call = ("collective_rpc", method, None, args, None)
        if self.vllm_config.parallel_config.data_parallel_size == 1:
            return await self.collective_rpc(method, args=args)
        core: Any = self.engine_core
        engines = (core._call_utility_async(*call, engine=engine) for engine in core.core_engines)
        return [answer for answers in await asyncio.gather(*engines) for answer in answers]

    async def _open_slots(self) -> LoRARequest:
        """Return the adapter of the live slot. The workers hold it in memory, and look for no file."""
        number, *_ = await self.on_every_worker("receiver_open_slots")
        return LoRARequest("policy", number, "in memory")

    def output_counts(self) -> dict[str, int]:
        """Return how many tokens each running request has sampled. Exact only while frozen."""
        return {name: state.detokenizer.num_output_tokens() for name, state in self.running_states().items()}

    def _client_name(self, state: Any) -> str:
        """`state`: vLLM's record of a request."""
        name: str = state.external_req_id
        return self.client_ids.get(name, name)

    def kv_usage(self) -> float | None:
        """Share of the KV cache that the tokens of running requests need. A prefix that several share counts as often
        as they do, so it may be more than 1. None where the size of the cache is not known."""
        cache = self.vllm_config.cache_config
        if not cache.num_gpu_blocks:
            return None
        states: Any = self.output_processor.request_states.values()
        tokens = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)
        return tokens / (cache.num_gpu_blocks * cache.block_size)

    def running_states(self) -> dict[str, Any]:
        """Return vLLM's record of every running request, by the name that its client knows. One of its samples
        stands for all."""
        states = self.output_processor.request_states.values()
        by_inside = {state.external_req_id: state for state in states if state.external_req_id is not None}
        return {self.client_ids.get(inside, inside): state for inside, state in by_inside.items()}

    async def _finish_prefills(self) -> None:
        waited_s = 0.0
        while unstarted := self._not_prefilled():
            if waited_s > self.prefill_grace_s:
                # No KV blocks are free for them. They have no token yet, so taking them back loses nothing.
                self.withdrawn.update(unstarted)
                await self.abort(unstarted)
                self._require_ended(unstarted)
                return
            before = time.monotonic()
            self.outputs_came.clear()  # a prefill ends with its first token; the core does not report it otherwise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.outputs_came.wait(), ABORTS_SEEN_S)
            waited_s += min(time.monotonic() - before, 0.1)  # without a core, this process reads no outputs

    def _not_prefilled(self) -> list[str]:
        """Return the requests of which no sample has begun: if one has, the prompt of all of them has been computed."""
        states = self.output_processor.request_states.values()
        begun = {state.external_req_id for state in states if not state.is_prefilling}
        return list(dict.fromkeys(s.external_req_id for s in states if s.external_req_id not in begun))


def _keep_only_what_was_left(processor: Any) -> None:
    """Let a request that asks for flat logprobs of other tokens than its own have `KeptLogprobs`. `processor`: vLLM's,
    before the first token."""
    if processor is not None and processor.num_logprobs and type(processor.logprobs) is FlatLogprobs:
        processor.logprobs = KeptLogprobs()


def _as_dictionary(prompt: Any) -> dict[str, Any]:
    """Return any form of a prompt that vLLM takes as the one that holds a cache salt. Raises TypeError for others."""
    match prompt:
        case dict():
            return prompt
        case str():
            return {"prompt": prompt}
        case list():
            return {"prompt_token_ids": prompt}
    what = f"{type(prompt).__name__} {prompt!r:.40}"
    raise TypeError(f"a prompt is a text, a list of token ids or one of vLLM's dictionaries, and not {what}")


class _NoTokens(list[int]):
    """An empty list that is true. vLLM's streaming routes take an output without tokens for a part of the prefill and
    skip it, and with it the finish_reason of a request that was aborted before its first token."""

    def __bool__(self) -> bool:
        return True


def _with_end(output: RequestOutput) -> RequestOutput:
    for sampled in output.outputs:
        if sampled.finish_reason is not None and len(sampled.token_ids) == 0:
            sampled.token_ids = _NoTokens()
    return output


def _unstarted_answer(request_id: str, prompt: Any, params: Any) -> RequestOutput:
    """Return the output of a request that was aborted before it ran, with lists of logprobs if it asked for them."""
    flat = KeptLogprobs() if params.logprobs else FlatLogprobs()
    logprobs: Any = None if params.logprobs is None else flat if params.flat_logprobs else []
    prompt_ids = prompt.get("prompt_token_ids")
    prompt_logprobs: Any = None if params.prompt_logprobs is None else [None] * len(prompt_ids or ())
    outputs = [
        CompletionOutput(index, "", _NoTokens(), None, logprobs, finish_reason="abort") for index in range(params.n)
    ]
    return RequestOutput(request_id, prompt.get("prompt"), prompt_ids, prompt_logprobs, outputs, finished=True)
