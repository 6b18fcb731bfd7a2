"""The memory that a run takes, part by part, as far as it follows from the config and the sizes of the model.

What Python and the libraries take comes on top: about 0.5 GB of host memory and 1 GB of a GPU for each process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.mixture import longest_source, sources_of
from configs.model import LoraServing, names_experts
from configs.rollout import MOST_KEPT, TIES, RolloutConfig
from configs.schema import Config, DType, Staging, Transport
from configs.trainer import CHUNK_LOGITS, GradientCheckpointing
from scripts.plan.model_shape import LayerShape, Mixture, ModelShape

FLOAT32 = 4
NUM_BYTES = {DType.float32: 4, DType.bfloat16: 2}
BYTES_OF_SCORES = {DType.float32: 8, DType.bfloat16: 6}
"""Bytes for each token that a teacher reads at once and each word of its vocabulary: logits, and logprobs in
float32."""
KEPT_BYTES = 16
"""Bytes on the device of a rank for each token that truncated sampling left to draw from: its place and its number."""
ROUTE_BYTES = 2
"""Bytes on the device of a rank for each expert that was chosen."""
COPIES_OF_LOGITS = 3
"""The copies of a chunk's logits that exist at once: the logits, their powers, and the gradient."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    num_bytes: float
    advice: str
    """The key that makes it smaller."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one process."""

    device: tuple[Part, ...]
    host: tuple[Part, ...]

    def on(self, kind: str) -> "Memory":
        """Return the memory as it lies on this kind of device: with device=cpu, all of it is host memory."""
        return self if kind == "cuda" else Memory((), (*self.device, *self.host))


def total(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def rank_memory(config: Config, shape: ModelShape, device: str) -> Memory:
    """Return the memory of a train worker at its highest: in the backward pass of a micro-batch that is not the
    step's first."""
    return Memory(
        (*_policy_parts(config, shape), *_pass_parts(config, shape, device), *_other_parts(config, shape)),
        tuple(rank_host_parts(config, shape)),
    ).on(device)


def replica_worker_memory(config: Config, shape: ModelShape, device: str, gpu_bytes: float | None = None) -> Memory:
    """Return the memory of one worker of a vLLM engine. `gpu_bytes` is the size of its GPU, of which vLLM takes a
    share."""
    rollout, staging, is_merged = config.rollout, config.weight_sync.staging, _travels_whole(config)
    weights = shape.num_parameters * NUM_BYTES[rollout.dtype]
    worker_weights = Part("weights", weights / rollout.tensor_parallel_size, "rollout.tensor_parallel_size")
    on_device, on_host = [worker_weights], []
    copy = Part("staging", worker_weights.num_bytes, "weight_sync.staging")
    if staging is not Staging.none and is_merged:
        (on_device if staging is Staging.device else on_host).append(copy)
    if config.model.lora.rank is not None and is_merged:
        on_host.append(Part("what adapters are merged into", weights, "model.lora.rank"))
    if config.weight_sync.delta:
        on_host.append(Part("the version before", weights, "weight_sync.delta"))
    if rollout.kv_cache_mb is not None:
        on_device.append(Part("KV cache", rollout.kv_cache_mb * 2**20, "rollout.kv_cache_mb"))
    elif gpu_bytes is not None:
        rest = rollout.gpu_memory_utilization * gpu_bytes - worker_weights.num_bytes
        on_device.append(Part("KV cache and vLLM's own", max(0.0, rest), "rollout.gpu_memory_utilization"))
    return Memory(tuple(on_device), tuple(on_host)).on(device)


def teacher_worker_memory(config: Config, shape: ModelShape, device: str, gpu_bytes: float | None = None) -> Memory:
    """Return the memory of one worker of an engine that scores and takes no weights. `gpu_bytes`: as in
    `replica_worker_memory`."""
    teacher = config.teacher
    weights = shape.num_parameters * NUM_BYTES[teacher.dtype] / teacher.tensor_parallel_size
    parts = [Part("weights", weights, "teacher.tensor_parallel_size")]
    if teacher.kv_cache_mb is not None:
        parts.append(Part("KV cache", teacher.kv_cache_mb * 2**20, "teacher.kv_cache_mb"))
    elif gpu_bytes is not None:
        rest = max(0.0, teacher.gpu_memory_utilization * gpu_bytes - weights)
        parts.append(Part("KV cache and vLLM's own", rest, "teacher.gpu_memory_utilization"))
    if shape.layer is not None:
        vocabulary = shape.head_parameters / shape.layer.hidden
        size = teacher.max_num_batched_tokens * vocabulary * BYTES_OF_SCORES[teacher.dtype]
        parts.append(Part("distributions", size, "teacher.max_num_batched_tokens"))
    return Memory(tuple(parts), ()).on(device)


def shared_memory_bytes(config: Config, shape: ModelShape) -> float:
    """Return the bytes of shared memory that the run takes on the machine, once for all of its processes."""
    if config.weight_sync.transport is not Transport.shared_memory or not _travels_whole(config):
        return 0
    return shape.num_parameters * NUM_BYTES[config.rollout.dtype]


def _travels_whole(config: Config) -> bool:
    """Return true where replicas get all weights at least once: not where there are no replicas, nor where they load
    the weights themselves and are sent an adapter only."""
    return config.rollout.num_replicas > 0 and config.model.lora.serve is LoraServing.merged


def kv_tokens(config: Config, shape: ModelShape, memory: Memory) -> int | None:
    """Return the number of tokens for which the KV cache of a worker has room, or None where it is not known."""
    if shape.kv_values is None:
        return None
    token_bytes = shape.kv_values * NUM_BYTES[config.rollout.dtype] / config.rollout.tensor_parallel_size
    caches = [part.num_bytes for part in (*memory.device, *memory.host) if part.name.startswith("KV cache")]
    return int(caches[0] / token_bytes) if caches else None


def _trained(config: Config, shape: ModelShape) -> int:
    lora = config.model.lora
    return shape.num_parameters if lora.rank is None else shape.adapter_parameters(lora.rank, lora.targets)


def _policy_parts(config: Config, shape: ModelShape) -> Iterator[Part]:
    trainer, trained, ranks = config.trainer, _trained(config, shape), config.trainer.num_ranks
    if config.model.lora.rank is not None:
        frozen = shape.num_parameters * NUM_BYTES[trainer.dtype] / ranks
        yield Part("frozen weights", frozen, "trainer.num_ranks")
    yield Part("weights", trained * FLOAT32 / ranks, "trainer.num_ranks")
    if not trainer.optimizer_on_host:
        yield Part("moments", 2 * trained * FLOAT32 / ranks, "trainer.optimizer_on_host")
    yield _gradients(config, trained, _divided(config, shape) if config.model.lora.rank is None else 0)


def _divided(config: Config, shape: ModelShape) -> int:
    """Return the number of parameters that FSDP does not gather, because ranks divide the experts."""
    return 0 if shape.mixture is None or not config.trainer.expert_parallel else shape.mixture.num_parameters


def _gradients(config: Config, trained: int, divided: int) -> Part:
    """Return the part of gradients. `divided` of the trained parameters are never whole on a rank."""
    ranks, most = config.trainer.num_ranks, config.trainer.unsharded_gradients_mb
    whole = (trained - divided) * FLOAT32
    if ranks == 1 or whole > most * 2**20:
        return Part("gradients", trained * FLOAT32 / ranks, "trainer.num_ranks")
    return Part("gradients, whole", whole + divided * FLOAT32 / ranks, "trainer.unsharded_gradients_mb")


def _pass_parts(config: Config, shape: ModelShape, device: str) -> Iterator[Part]:
    """Yield the parts of forward and backward. FSDP gathers the layer at work, the next one, and what belongs to no
    layer."""
    width, ranks, trains_all = NUM_BYTES[config.trainer.dtype], config.trainer.num_ranks, config.model.lora.rank is None
    experts = shape.mixture.layer_parameters if shape.mixture is not None and _divided(config, shape) else 0
    layer = shape.layer_parameters - experts
    yield Part("gathered weights", (shape.rest_parameters + 2 * layer) * width, "trainer.dtype")
    gradients = _gradients(config, _trained(config, shape), _divided(config, shape) if trains_all else 0)
    if ranks > 1 and gradients.name == "gradients":
        reduced = shape.rest_parameters + layer if trains_all else 0
        yield Part("gathered gradients", reduced * (width + FLOAT32), "trainer.dtype")
    if shape.mixture is not None and not trains_all and names_experts(config.model.lora.targets):
        yield Part("experts with adapters merged", _merged_experts(config, shape.mixture), "model.lora.targets")
    if experts:
        yield Part("own experts at work", _experts_at_work(config, shape, experts), "trainer.num_ranks")
    if (activations := activation_bytes(config, shape)) is not None:
        yield Part("activations", activations, advice_for_activations(config))
    yield Part("logits", COPIES_OF_LOGITS * CHUNK_LOGITS[device] * FLOAT32, "trainer.tokens_per_micro_batch")
    if most_kept := kept_at_most(config):
        mask = CHUNK_LOGITS[device] + _micro_batch(config) * most_kept * KEPT_BYTES
        yield Part("what sampling kept, at most", mask, "rollout.top_k")
    if chosen := routes_of_token(config, shape):
        yield Part("routes", _micro_batch(config) * chosen * ROUTE_BYTES, "trainer.tokens_per_micro_batch")


def _experts_at_work(config: Config, shape: ModelShape, layer_parameters: int) -> float:
    """Return what a rank makes of its own experts of a layer: a copy in trainer.dtype, kept of every layer where
    nothing is recomputed, and gradients of it that are on their way."""
    width, mixture = NUM_BYTES[config.trainer.dtype], shape.mixture
    assert mixture is not None
    is_kept = config.trainer.gradient_checkpointing is GradientCheckpointing.none
    copied = mixture.num_parameters if is_kept else layer_parameters
    copies = copied * width if width < FLOAT32 else 0
    on_their_way = layer_parameters * (width + FLOAT32) if config.model.lora.rank is None else 0
    return (copies + on_their_way) / config.trainer.num_ranks


def _merged_experts(config: Config, mixture: Mixture) -> int:
    """Return what experts with adapters take to compute: those of a layer twice in float32 on their way, and as they
    are in trainer.dtype, kept of every layer where nothing is recomputed."""
    is_kept = config.trainer.gradient_checkpointing is GradientCheckpointing.none
    kept = mixture.num_parameters if is_kept else mixture.layer_parameters
    return mixture.layer_parameters * 2 * FLOAT32 + kept * NUM_BYTES[config.trainer.dtype]


def kept_at_most(config: Config) -> int:
    """Return the number of tokens that truncated sampling may leave to draw a token from; 0 where all are left."""
    return max(_kept_at_most(source.config.rollout) for source in sources_of(config))


def _kept_at_most(rollout: RolloutConfig) -> int:
    if rollout.num_replicas == 0 or (rollout.top_p, rollout.top_k, rollout.min_p) == (1, -1, 0):
        return 0
    return (MOST_KEPT if rollout.top_k == -1 else rollout.top_k) + TIES


def routes_of_token(config: Config, shape: ModelShape) -> int:
    """Return the number of experts that are said of a token; 0 where none are."""
    if shape.mixture is None or config.model.replay_routes is False or config.rollout.num_replicas == 0:
        return 0
    return shape.num_layers * shape.mixture.per_token


def _micro_batch(config: Config) -> float:
    """Tokens of a micro-batch on one rank: of trainer.tokens_per_micro_batch, or of the longest row."""
    return max(config.trainer.tokens_per_micro_batch, _row(config)) / config.trainer.sequence_parallel


def advice_for_activations(config: Config) -> str:
    trainer = config.trainer
    if trainer.gradient_checkpointing is not GradientCheckpointing.full:
        return "trainer.gradient_checkpointing"
    if _row(config) > trainer.tokens_per_micro_batch:
        return "rollout.max_response_tokens"
    return "trainer.tokens_per_micro_batch"


def _row(config: Config) -> int:
    """Tokens of the longest sequence."""
    sampled = longest_source(config).context_tokens
    return max(sampled, config.sft.max_tokens or 0) if config.algorithm.ce_coef else sampled


def activation_bytes(config: Config, shape: ModelShape) -> float | None:
    """Return the activations of a micro-batch of trainer.tokens_per_micro_batch, or of the longest row, without
    attention masks."""
    if shape.layer is None:
        return None
    trainer, layer, width = config.trainer, shape.layer, NUM_BYTES[config.trainer.dtype]
    whole, input_bytes = layer_bytes(layer, width), layer.hidden * width
    match trainer.gradient_checkpointing:
        case GradientCheckpointing.none:
            kept = shape.num_layers * whole
        case GradientCheckpointing.selective:
            kept = shape.num_layers * (input_bytes + costly_bytes(layer, width)) + whole - costly_bytes(layer, width)
        case GradientCheckpointing.full:
            kept = whole + (2 if trainer.activation_offload else shape.num_layers) * input_bytes
    flowing = (2 * layer.feed_forward + 3 * layer.hidden) * width  # the gradients in the layer at work
    last = layer.hidden * (width + 2 * FLOAT32)  # what the final norm keeps, and the gradient of the states
    return _micro_batch(config) * (kept + flowing + last)


def layer_bytes(layer: LayerShape, width: int) -> float:
    """Return the bytes per token that autograd saves of a layer: the inputs of matrices, attention, activation and
    norms. A norm keeps its input in float32, and its result before the weight."""
    feed_forward = (4 if layer.is_gated else 2) * layer.feed_forward
    inputs = 2 * layer.hidden + layer.query  # of the first matrices, and of the one after attention
    dispatched = 2 * layer.experts * layer.hidden
    in_attention = layer.query + 2 * layer.key
    return width * (inputs + in_attention + feed_forward + dispatched) + (FLOAT32 + width) * layer.norms


def costly_bytes(layer: LayerShape, width: int) -> float:
    """The results of matrices and attention of a layer, for each token."""
    feed_forward = (2 if layer.is_gated else 1) * layer.feed_forward + max(1, layer.experts) * layer.hidden
    return width * (2 * layer.query + 2 * layer.key + layer.hidden + feed_forward)


def _other_parts(config: Config, shape: ModelShape) -> Iterator[Part]:
    """Yield the parts of reference and critic, and what an update keeps."""
    ranks, algorithm = config.trainer.num_ranks, config.algorithm
    if algorithm.needs_reference and config.model.lora.rank is None:
        size = shape.num_parameters * NUM_BYTES[config.trainer.dtype] / ranks
        yield Part("reference", size, "algorithm.kl_loss_coef")
    if algorithm.needs_critic:
        size = shape.num_parameters * FLOAT32 / ranks * (1 if config.trainer.optimizer_on_host else 3)
        gradients = _gradients(config, shape.num_parameters, _divided(config, shape)).num_bytes
        yield Part("critic", size + gradients, "algorithm.advantage")
    yield from published_parts(config, shape)


def published_parts(config: Config, shape: ModelShape) -> Iterator[Part]:
    """Yield what a rank keeps on its device of the weights that it published."""
    sync = config.weight_sync
    if sync.delta or sync.transport is Transport.cuda_ipc:
        size = _trained(config, shape) * NUM_BYTES[config.rollout.dtype] / config.trainer.num_ranks
        yield Part("published weights", size, "weight_sync.delta" if sync.delta else "weight_sync.transport")
    if sync.vllm_backend == "sparse_nccl":  # on rank 0, which finds out what has changed
        size = _trained(config, shape) * NUM_BYTES[config.rollout.dtype]
        yield Part("the version before", size, "weight_sync.transport")


def rank_host_parts(config: Config, shape: ModelShape) -> Iterator[Part]:
    trainer, trained = config.trainer, _trained(config, shape)
    num_trained = trained + (shape.num_parameters if config.algorithm.needs_critic else 0)
    if trainer.optimizer_on_host:
        yield Part("moments", 2 * num_trained * FLOAT32 / trainer.num_ranks, "trainer.num_ranks")
    if trainer.activation_offload and shape.layer is not None:
        inputs = shape.num_layers * shape.layer.hidden * NUM_BYTES[trainer.dtype]
        yield Part("offloaded activations", _micro_batch(config) * inputs, "trainer.tokens_per_micro_batch")
    if config.algorithm.needs_old_versions:
        versions = config.rollout.max_staleness + (config.weight_sync.interval > 1)
        size = versions * NUM_BYTES[trainer.dtype] + (FLOAT32 if versions else 0)  # and the weights, while one is lent
        yield Part("old versions", trained * size / trainer.num_ranks, "rollout.max_staleness")
    if config.checkpoint.every > 0:
        staged = 3 * num_trained * FLOAT32 / trainer.num_ranks
        yield Part("a checkpoint while it is written", staged, "checkpoint.every")
        if config.checkpoint.memory_every > 0:  # the one before is dropped when all ranks have made another
            yield Part("copies of the state", 2 * staged, "checkpoint.memory_every")
