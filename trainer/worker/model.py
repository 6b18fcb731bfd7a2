"""The policy: a Hugging Face causal LM that returns logprobs of chosen tokens, sharded with FSDP2."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from configs.trainer import CHUNK_LOGITS, GradientCheckpointing, TrainerConfig
from configs.validate import ConfigError
from rollout.types import KeptTokens
from trainer.batch import Int64Array, MicroBatch
from trainer.old_logprobs import Segment
from trainer.worker.attention.attention import ON_CPU, Attention
from trainer.worker.attention.ulysses import SequenceGroup
from trainer.worker.expert_parallel import divide_experts, divided_parameters
from trainer.worker.head import LogprobHead
from trainer.worker.loading import local
from trainer.worker.routing import Routing, padded
from trainer.worker.segments import SegmentCache, decode_segment
from weight_sync.adapter import published_name

GROUPED = torch.ops.aten._grouped_mm.default
COSTLY = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    GROUPED,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.higher_order.flex_attention,
]
"""Products of matrices and attention: their results are kept with gradient_checkpointing=selective. What is between
them (norms, activations, rotations) takes as much memory, and little time to compute again."""


class Policy(nn.Module):
    """Wraps the LM: one forward returns logprobs and entropy of loss tokens, and holds few logits at a time."""

    def __init__(
        self,
        causal_lm: nn.Module,
        temperature: float,
        entropy_has_gradient: bool = False,
        attention: Attention = ON_CPU,
    ):
        super().__init__()
        self.causal_lm: Any = causal_lm
        self.temperature = temperature
        self.attention = attention
        attention.prepare(causal_lm)
        self.routing = Routing(decoder_layers(find_decoder(causal_lm)))
        self._head = LogprobHead(causal_lm, find_decoder(causal_lm), entropy_has_gradient, attention.device_type)

    def forward(self, batch: MicroBatch, device: torch.device, max_logits: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (logprobs [T], entropy [T]) of the batch's targets at the sampling temperature, each over the tokens
        that it was drawn from.

        Those of demonstrations, which nobody sampled, are at temperature 1, as a policy that learns nothing else has
        them. The entropy has a gradient only with `entropy_has_gradient`.

        Args:
            max_logits: the largest number of logits in memory at once; a good one, if not given.
        """
        states = decode(find_decoder(self.causal_lm), batch, device, self.attention, self.routing)
        targets = torch.as_tensor(batch.tokens.targets, dtype=torch.int64, device=device)
        is_sampled = _is_sampled(batch, device)[states.own]
        kept = batch.tokens.kept
        kept = None if kept is None else kept.take(states.own.cpu().numpy())
        logprobs, entropy = self._at_temperatures(states, targets[states.own], is_sampled, max_logits, kept)
        logprobs, entropy = states.gather_targets(logprobs, entropy)
        return logprobs, entropy

    def segment_logprobs(self, segment: Segment, cache: SegmentCache, device: torch.device) -> Tensor:
        """Return the logprobs [T] of the segment's targets at the sampling temperature, over what they were drawn
        from."""
        decoder = find_decoder(self.causal_lm)
        output_type, states = decode_segment(decoder, segment, cache, device, self.attention, self.routing)
        targets = torch.as_tensor(segment.batch.tokens.targets, dtype=torch.int64, device=device)
        return self._head(output_type, states, targets, self.temperature, kept=segment.batch.tokens.kept)[0]

    def _at_temperatures(
        self,
        states: "TargetStates",
        targets: Tensor,
        is_sampled: Tensor,
        max_logits: int | None,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        """Return both [T], of sampled targets at the sampling temperature, and of the others at 1."""
        if self.temperature == 1 or is_sampled.all():
            return self._head(states.output_type, states.chosen, targets, self.temperature, max_logits, kept)
        if not is_sampled.any():
            return self._head(states.output_type, states.chosen, targets, 1.0, max_logits)
        places = [is_sampled.nonzero()[:, 0], (~is_sampled).nonzero()[:, 0]]
        kept_parts = [None if kept is None else kept.take(places[0].cpu().numpy()), None]
        parts = [
            self._head(states.output_type, states.chosen[place], targets[place], temperature, max_logits, own)
            for place, temperature, own in zip(places, (self.temperature, 1.0), kept_parts, strict=True)
        ]
        back = torch.cat(places).argsort()
        logprobs, entropy = (torch.cat(both)[back] for both in zip(*parts, strict=True))
        return logprobs, entropy

    def next_token_logprobs(self, batch: MicroBatch, device: torch.device) -> tuple[Int64Array, Tensor]:
        """Return log pi of every token in the places of the batch's targets, as they are computed to train: [T, V], and
        which targets they are, where others are another rank's."""
        states = decode(find_decoder(self.causal_lm), batch, device, self.attention, self.routing)
        own = states.own.cpu().numpy()
        if not len(own):
            return own, torch.empty(0, vocab_size(self.causal_lm))
        return own, self._head.next_token_logprobs(states.output_type, states.chosen, self.temperature)

    def squared_probabilities(self, batch: MicroBatch, device: torch.device) -> Tensor:
        """Return [T] the sum of pi^2 over the vocabulary in the places of the batch's targets."""
        states = decode(find_decoder(self.causal_lm), batch, device, self.attention, self.routing)
        chunk = max(1, CHUNK_LOGITS[device.type] // vocab_size(self.causal_lm))
        parts = [
            self._head.next_token_logprobs(states.output_type, some, self.temperature).mul(2).exp().sum(-1)
            for some in (states.chosen.split(chunk) if len(states.chosen) else ())
        ]
        (squares,) = states.gather_targets(torch.cat(parts) if parts else torch.empty(0, device=device))
        return squares

    def plain_logprobs(self, input_ids: Tensor) -> Tensor:
        """[N, L] -> [N, L - 1]: logprobs of all tokens but the first, by the model's own forward and nothing else."""
        self.routing.follow(None, input_ids.device)
        logits = self.causal_lm(input_ids=input_ids, use_cache=False).logits[:, :-1].float() / self.temperature
        return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def _is_sampled(batch: MicroBatch, device: torch.device) -> Tensor:
    """[T] bool: the policy sampled the target, and it is not a demonstration's."""
    weights = batch.tokens.ce_weights
    if weights is None:
        return torch.ones(len(batch.tokens.targets), dtype=torch.bool, device=device)
    return torch.as_tensor(weights == 0, device=device)


class TargetStates(NamedTuple):
    """The states from which this rank predicts targets: all of them, or those in its part of the rows."""

    output_type: type
    """The class that the decoder returns."""
    chosen: Tensor  # [T of this rank, H]
    own: Tensor  # int64 [T of this rank] which targets they predict
    owners: Int64Array  # [T] which rank of the group predicts each target
    group: SequenceGroup | None

    def gather_targets(self, *made: Tensor) -> tuple[Tensor, ...]:
        """Gather tensors [T of this rank] from the group as [T]. Tensors without a gradient stay without one."""
        if self.group is None:
            return made
        gathered = self.group.gathered(torch.stack(made), self.owners)
        whole = [values.clone() for values in gathered]  # FSDP wants no views
        return tuple(
            values if mine.requires_grad else values.detach() for values, mine in zip(whole, made, strict=True)
        )


def decode(
    decoder: nn.Module, batch: MicroBatch, device: torch.device, attention: Attention, routing: Routing | None = None
) -> TargetStates:
    """Run the decoder over the batch's rows, or this rank's part of them. Pick the last hidden state of each target.

    Args:
        routing: the decoder's, which follows the batch's routes; None: its routers choose by themselves.
    """
    rows, group = attention.rows(batch, device), attention.group
    length = rows.input_ids.shape[1]
    part = slice(0, length) if group is None else group.part(length)
    input_ids, position_ids = rows.input_ids[:, part], rows.positions[:, part]
    if routing is not None:
        routing.follow(None if batch.routes is None else padded(batch.routes, length)[:, part], device)
    # Without a mask of ones, transformers would guess sequences from the positions. Recurrent layers want none.
    ones = None if rows.last is None and group is None else torch.ones_like(input_ids)
    with attention.within(rows, decoder):
        outputs = decoder(input_ids=input_ids, position_ids=position_ids, attention_mask=ones, use_cache=False)
    owners = batch.sources // (part.stop - part.start)
    own = np.flatnonzero(owners == part.start // (part.stop - part.start))
    places = np.stack([batch.rows[own], batch.sources[own] - part.start, own])
    numbers, sources, targets = torch.as_tensor(places, device=device)
    return TargetStates(type(outputs), outputs.last_hidden_state[numbers, sources], targets, owners, group)


def prepared(causal_lm: Any, path: str, trainer: TrainerConfig) -> Any:
    """Return the model as it is trained. `path` is where it came from.

    It is in evaluation mode, in which nothing is random: whatever its config says of dropout, what is trained are the
    probabilities that sampled.

    Raises:
        ConfigError: layers share parameters, as Zamba's do, which FSDP cannot shard.
    """
    causal_lm = causal_lm.eval()
    layers = decoder_layers(causal_lm)
    owners = Counter(parameter for layer in layers for parameter in layer.parameters())
    if max(owners.values(), default=1) > 1:
        architecture = type(causal_lm).__name__
        raise ConfigError(f"model.path={path}: layers of {architecture} share parameters, which FSDP cannot shard")
    for layer in layers:
        keep_less(layer, trainer)
    return causal_lm


def keep_less(layer: nn.Module, trainer: TrainerConfig) -> None:
    """Wrap the layer's forward as `trainer` says. transformers' own checkpointing works in training mode only."""
    forward: Any = layer.forward
    options: dict[str, Any] = {}
    if trainer.gradient_checkpointing is GradientCheckpointing.selective:
        kept = [product for product in COSTLY if product is not GROUPED or not _adds_to_products(layer)]
        options["context_fn"] = lambda: create_selective_checkpoint_contexts(kept)
    if trainer.gradient_checkpointing is not GradientCheckpointing.none:
        forward = partial(checkpoint, forward, use_reentrant=False, **options)
    if trainer.activation_offload:
        forward = partial(_with_inputs_on_host, forward)
    if trainer.compile:
        forward = torch.compile(forward)
    layer.forward = forward


def _adds_to_products(layer: nn.Module) -> bool:
    """Return whether experts add a bias in place to what `GROUPED` returns, as transformers does (`has_bias`): torch
    refuses to keep what is changed afterwards."""
    return any(vars(module).get("has_bias") for module in layer.modules())


def _with_inputs_on_host(forward: Any, *args: Any, **options: Any) -> Any:
    """Run a layer and keep its inputs in host memory, which is all that a recomputed layer saves. They come back when
    its backward pass begins, one at a time."""
    with save_on_cpu(pin_memory=True):
        return forward(*args, **options)


def find_decoder(causal_lm: Any) -> Any:
    """Return the module that makes hidden states of token ids."""
    decoder = causal_lm.get_decoder()
    if decoder is not causal_lm:
        return decoder
    return next(child for child in causal_lm.children() if decoder_layers(child))  # a model that does not know its own


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded, and recomputed, one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # takes seconds to import

    layers: list[nn.Module] = []
    for child in causal_lm.children():
        layers += [child] if isinstance(child, GradientCheckpointingLayer) else decoder_layers(child)
    return layers


def vocab_size(causal_lm: Any) -> int:
    return causal_lm.config.get_text_config().vocab_size


def shard(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, expert_parallel: bool = False) -> None:
    """Shard with FSDP2: one group per decoder layer, one for the rest. Gradients are reduced in float32.

    Raises:
        ConfigError: `expert_parallel` for a model whose experts the ranks cannot divide.
    """
    if compute_dtype is torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    apart = divide_experts(module, mesh, compute_dtype) if expert_parallel else set()
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision, ignored_params=apart)
    fully_shard(module, mesh=mesh, mp_policy=precision, ignored_params=apart)


def gradients_fit(module: nn.Module, max_mb: int) -> bool:
    """Return whether a rank may keep the module's unsharded float32 gradients, of at most `max_mb` MiB. Divided experts
    have none."""
    trained = {parameter for parameter in module.parameters() if parameter.requires_grad}
    return 4 * sum(parameter.numel() for parameter in trained - divided_parameters(module)) <= max_mb * 2**20


def parameter_specs(
    policy: Policy, dtype: torch.dtype, frozen: bool = True
) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return (name, dtype, shape) of every tensor that `local_shards` yields a part of, in its order."""
    return [(name, dtype, list(tensor.shape)) for name, tensor in _published(policy, frozen)]


def local_shards(policy: Policy, dtype: torch.dtype, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's rows on its device), one by one. FSDP2 shards dimension 0 as torch.chunk does.

    The cast to the rollout's dtype happens here, once, on the sender.

    Args:
        frozen: whether parameters that are not trained are among them.
    """
    for name, tensor in _published(policy, frozen):
        yield name, local(tensor).to(dtype)


def constant_names(policy: Policy) -> tuple[str, ...]:
    """Return the names of what checkpoints hold besides parameters. It is not trained, and so not published."""
    return tuple(
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in policy.causal_lm.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    )


def _published(policy: Policy, frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters by the names of Hugging Face, and factors of adapters by those of PEFT. A tied one has one
    name."""
    for name, parameter in policy.causal_lm.named_parameters():
        if frozen or parameter.requires_grad:
            yield published_name(name), parameter
