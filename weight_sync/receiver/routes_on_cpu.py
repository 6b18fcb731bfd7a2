"""Lets vLLM on a CPU say which experts it chose, in a worker's process.

vLLM's own runner there is V1; its V2 needs a Triton that has a backend for CPUs. But only V2 hands the rows of
`RoutedExpertsCapturer` on. Here V1 does, to the same connector, so that all the rest is vLLM's: rows of tokens from the
prefix cache come from its store, by the hash of their block, and rejected drafts leave none.

Facts this rests on (vLLM 0.32 and 0.33):
- `execute_model` runs the forward pass. Afterwards the batch has the order of the tokens in it, until the step's
  `sample_tokens` has returned; the numbers of computed tokens are those before the step.
- On a CPU, steps follow one another: no step begins before the last one's tokens are known.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def say_routes() -> None:
    """Change the runner of engines that are asked for routes. An older vLLM has no connector, and is not asked."""
    if find_spec("vllm.distributed.aux_output_connector") is None:
        return
    runner: Any = CPUModelRunner
    initialize_kv_cache, execute_model, sample_tokens = (
        runner.initialize_kv_cache,
        runner.execute_model,
        runner.sample_tokens,
    )

    def initialized(self: Any, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        initialize_kv_cache(self, kv_cache_config, is_profiling, **options)
        self.routes = None
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            try:
                self.routes = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)
            except ValueError as error:  # a router or kernel that says nothing
                raise ValueError(f"set model.replay_routes=false: {error}") from error

    def executed(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        if self.routes is None:
            return execute_model(self, scheduler_output, *args, **options)
        self.routes.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute_model(self, scheduler_output, *args, **options)
        self.pending_routes = None
        if scheduler_output.total_num_scheduled_tokens:
            self.pending_routes = self.routes.prepare_output(_batch(self.input_batch, scheduler_output))
            self.num_drafts = {
                name: len(drafts) for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items()
            }
        return output

    def sampled(self: Any, *args: Any, **options: Any) -> Any:
        output = sample_tokens(self, *args, **options)
        if self.routes is not None and (pending := self.pending_routes) is not None:
            tokens = [output.sampled_token_ids[output.req_id_to_index[name]] for name in pending.request_ids]
            num_sampled = np.array([len(each) for each in tokens])
            num_drafts = np.array([self.num_drafts.get(name, 0) for name in pending.request_ids])
            num_rejected = np.where((num_sampled > 0) & (num_drafts > 0), num_drafts + 1 - num_sampled, 0)
            pending.enqueue_cpu_copy(num_sampled, num_rejected)
            output.aux_output_connector_output, self.pending_routes = pending.process_output(), None
        return output

    runner.initialize_kv_cache, runner.execute_model, runner.sample_tokens = initialized, executed, sampled
    config: Any = VllmConfig  # it is checked again where a worker derives one of it, and the check wants V2
    config._verify_aux_output_compatibility = lambda self: None


def _batch(batch: Any, scheduler_output: Any) -> Any:
    """Return the batch of V1 with what the connector reads of one of V2."""
    names = list(batch.req_ids)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
    return SimpleNamespace(
        req_ids=names,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
