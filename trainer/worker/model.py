"""The policy: a Hugging Face causal LM that returns logprobs of chosen tokens, sharded with FSDP2."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from configs.trainer import TrainerConfig
from configs.validate import ConfigError
from trainer.batch import Int64Array, MicroBatch
from trainer.worker.activations import keep_less
from trainer.worker.attention.attention import ON_CPU, Attention
from trainer.worker.attention.ulysses import SequenceGroup
from trainer.worker.head import LogprobHead
from weight_sync.adapter import published_name


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
        self._head = LogprobHead(causal_lm, decoder_of(causal_lm), temperature, entropy_has_gradient)

    def forward(self, batch: MicroBatch, device: torch.device, max_logits: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (logprobs [T], entropy [T]) of the batch's targets at the sampling temperature.

        The entropy has a gradient only with `entropy_has_gradient`.

        Args:
            max_logits: the largest number of logits in memory at once; a good one, if not given.
        """
        states = decode(decoder_of(self.causal_lm), batch, device, self.attention)
        targets = torch.as_tensor(batch.tokens.targets, dtype=torch.int64, device=device)
        logprobs, entropy = self._head(states.output_type, states.chosen, targets[states.own], max_logits)
        logprobs, entropy = states.of_all(logprobs, entropy)
        return logprobs, entropy

    def plain_logprobs(self, input_ids: Tensor) -> Tensor:
        """[N, L] -> [N, L - 1]: logprobs of all tokens but the first, by the model's own forward and nothing else."""
        logits = self.causal_lm(input_ids=input_ids, use_cache=False).logits[:, :-1].float() / self.temperature
        return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


class TargetStates(NamedTuple):
    """The states from which this rank predicts targets: all of them, or those in its part of the rows."""

    output_type: type
    """What the decoder returns."""
    chosen: Tensor  # [T of this rank, H]
    own: Tensor  # int64 [T of this rank] which targets they predict
    owners: Int64Array  # [T] which rank of the group predicts each target
    group: SequenceGroup | None

    def of_all(self, *made: Tensor) -> tuple[Tensor, ...]:
        """[T of this rank] each -> [T] each. Those without a gradient have none afterwards."""
        if self.group is None:
            return made
        gathered = self.group.gathered(torch.stack(made), self.owners)
        whole = [one.clone() for one in gathered]  # FSDP wants no views
        return tuple(one if mine.requires_grad else one.detach() for one, mine in zip(whole, made, strict=True))


def decode(decoder: nn.Module, batch: MicroBatch, device: torch.device, attention: Attention) -> TargetStates:
    """Run the decoder over the batch's rows, or this rank's part of them. Pick the last hidden state of each target."""
    rows, group = attention.rows(batch, device), attention.group
    length = rows.input_ids.shape[1]
    part = slice(0, length) if group is None else group.part(length)
    input_ids, position_ids = rows.input_ids[:, part], rows.positions[:, part]
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
    """The model as it is trained. `path`: where it came from.

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


def decoder_of(causal_lm: Any) -> Any:
    """Return the module that makes hidden states of token ids."""
    decoder = causal_lm.get_decoder()
    if decoder is not causal_lm:
        return decoder
    return next(child for child in causal_lm.children() if decoder_layers(child))  # a model that does not know its own


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """Return the modules that are sharded, and recomputed, one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # takes seconds to import

    found: list[nn.Module] = []
    for child in causal_lm.children():
        found += [child] if isinstance(child, GradientCheckpointingLayer) else decoder_layers(child)
    return found


def vocab_size(causal_lm: Any) -> int:
    return causal_lm.config.get_text_config().vocab_size


def shard(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard with FSDP2: one group per decoder layer, one for the rest. Gradients are reduced in float32."""
    if compute_dtype is torch.float32:
        precision = MixedPrecisionPolicy()
    else:
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(module, mesh=mesh, mp_policy=precision)


def gradients_fit(module: nn.Module, max_mb: int) -> bool:
    """Whether a rank may keep the module's unsharded float32 gradients, of at most `max_mb` MiB."""
    return 4 * sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad) <= max_mb * 2**20


def parameter_specs(
    policy: Policy, dtype: torch.dtype, frozen: bool = True
) -> list[tuple[str, torch.dtype, list[int]]]:
    """(name, dtype, shape) of every tensor that `local_shards` yields a part of, in its order."""
    return [(name, dtype, list(tensor.shape)) for name, tensor in _published(policy, frozen)]


def local_shards(policy: Policy, dtype: torch.dtype, frozen: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's rows on its device) one by one. FSDP2 shards dimension 0 as torch.chunk does.

    The cast to the rollout's dtype happens here, once, on the sender.

    Args:
        frozen: whether parameters that are not trained are among them.
    """
    for name, tensor in _published(policy, frozen):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        yield name, local.detach().to(dtype)


def _published(policy: Policy, frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """By the names of Hugging Face, and factors of adapters by those of PEFT. Each tied parameter is named once."""
    for name, parameter in policy.causal_lm.named_parameters():
        if frozen or parameter.requires_grad:
            yield published_name(name), parameter
