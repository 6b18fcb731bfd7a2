"""Check `rollout.engine_args` against what vLLM knows and against the keys of this project.

vLLM is read and not imported, which takes seconds: a wrong name is refused as soon as any other key.
"""

import ast
import difflib
import json
from collections.abc import Iterator
from functools import cache

from configs.checks.problem import Problem
from configs.installed import parsed_source
from configs.model import LoraServing
from configs.rollout import MOST_KEPT, TIES
from configs.schema import Config, Device, DType, Staging
from configs.weight_forms import QUANTIZATIONS

SECTION = "rollout.engine_args"
LEAST_LOGPROBS = MOST_KEPT + TIES
SIZES = "the GPUs of a replica are rollout.tensor_parallel_size x rollout.data_parallel_size"
ON_ONE_MACHINE = "a replica is on one machine, in processes of its own"
SAMPLED = "the recorded logprobs must be of the distribution that is sampled from"
OURS = {
    "model": "set model.path",
    "model_weights": "set model.path",
    "tokenizer": "set model.path",
    "hf_config_path": "set model.path",
    "dtype": "set rollout.dtype",
    "seed": "set seed and rollout.seeded_sampling",
    "max_model_len": "set data.max_prompt_tokens and rollout.max_response_tokens, whose sum it is",
    "hf_overrides": "trainer and engine must have the same model: set model.max_position_embeddings",
    "max_num_seqs": "set rollout.max_num_seqs",
    "kv_cache_memory_bytes": "set rollout.kv_cache_mb",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "enforce_eager": "set rollout.enforce_eager",
    "tensor_parallel_size": "set rollout.tensor_parallel_size",
    "data_parallel_size": "set rollout.data_parallel_size",
    "data_parallel_size_local": "set rollout.data_parallel_size",
    "pipeline_parallel_size": SIZES,
    "prefill_context_parallel_size": SIZES,
    "device_ids": SIZES,
    "distributed_executor_backend": ON_ONE_MACHINE,
    "data_parallel_backend": ON_ONE_MACHINE,
    "data_parallel_address": ON_ONE_MACHINE,
    "nnodes": ON_ONE_MACHINE,
    "node_rank": ON_ONE_MACHINE,
    "logprobs_mode": SAMPLED,
    "return_sampling_mask": "it refuses greedy requests; what rollout.top_p, top_k and min_p leave travels anyway",
    "enable_return_routed_experts": "set model.replay_routes",
    "aux_output_config": "set model.replay_routes",
    "enable_eplb": "it moves experts while the engine runs, and updates would write over others",
    "eplb_config": "it moves experts while the engine runs, and updates would write over others",
    "speculative_config": "set rollout.speculative",
    "logits_processors": SAMPLED,
    "worker_extension_cls": "ours receives the weight updates",
    "weight_transfer_config": "set weight_sync.transport",
    "disable_log_stats": "only `make serve` needs the statistics, and has them",
}
"""Argument -> the key that says it, or why it cannot be given."""
TESTED = " and ".join(sorted(QUANTIZATIONS))
QUANTIZATIONS_ON_GPUS = "updates of quantized weights are tested on CPUs only"
QUANTIZED = (
    f"the weights of a quantized engine cannot be updated, but for quantization={TESTED}; training needs "
    "model.lora.serve=adapter for it"
)
QUANTIZING = {"quantization": QUANTIZED, "quantization_config": QUANTIZED}
ADAPTERS = "a run that trains says what adapters its replicas have: set model.lora"
LORA_ARGUMENTS = ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_dtype", "lora_target_modules")
SERVING_ADAPTERS = dict.fromkeys(LORA_ARGUMENTS, ADAPTERS)


def engine_args_problems(config: Config, trains: bool) -> Iterator[Problem]:
    """Arguments that vLLM does not have, that contradict a key of ours, or that training cannot have."""
    arguments = config.rollout.engine_args
    known = known_arguments() if arguments else frozenset[str]()
    refused = SERVING_ADAPTERS | ({} if config.model.lora.serve is LoraServing.adapter else QUANTIZING)
    for name, value in arguments.items():
        if name in OURS:
            allowed = OURS[name]
        elif trains and name in refused:
            if name == "quantization" and value in QUANTIZATIONS:
                yield from _updated_problems(config, value)
                continue
            allowed = refused[name]
        elif name == "max_logprobs" and isinstance(value, int) and -1 < value < LEAST_LOGPROBS:
            allowed = f"at least {LEAST_LOGPROBS}: what sampling left to draw from is read from them"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else "its documentation of EngineArgs lists them"
            allowed = f"vLLM has no such engine argument; {hint}"
        else:
            continue
        yield Problem(f"{SECTION}.{name}", allowed, json.dumps(value))


def _updated_problems(config: Config, quantization: str) -> Iterator[Problem]:
    """Yield what a run cannot have whose updates are quantized into the shadow."""
    why = f"with {SECTION}.quantization={quantization}"
    if config.device is Device.cuda:
        allowed = f"{QUANTIZATIONS_ON_GPUS}: set model.lora.serve=adapter"
        yield Problem(f"{SECTION}.quantization", allowed, json.dumps(quantization))
    if config.rollout.dtype is DType.float32:
        yield Problem("rollout.dtype", f"must be bfloat16 {why}: vLLM quantizes no float32 weights")
    if config.weight_sync.staging is Staging.none:
        yield Problem("weight_sync.staging", f"must be host or device {why}: weights are quantized in the shadow")


@cache
def known_arguments() -> frozenset[str]:
    """The fields of the installed vLLM's AsyncEngineArgs; none where there is no vLLM."""
    return frozenset(
        field.target.id
        for node in parsed_source("vllm", "engine", "arg_utils.py") or ()
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    )
