"""Expert parallelism (GShard, arXiv:2006.16668): each rank computes with its own experts, and tokens travel to them.

FSDP2 gathers the weights of all experts of a layer on every rank, whichever tokens the rank has. Here they stay where
they are. A rank holds the experts that FSDP2 would shard to it, so checkpoints, digests and transports see the same
rows either way.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from configs.validate import ConfigError


def divide_experts(module: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> set[nn.Parameter]:
    """Let the ranks of the mesh compute the module's experts together. Call it before FSDP2 shards the module.

    Returns:
        The parameters of the experts, which FSDP2 must leave alone.

    Raises:
        ConfigError: the module has no experts that can be divided, or not a multiple of the number of ranks.
    """
    for _, experts in stacked_experts(module):
        if experts.num_experts % mesh.size():
            raise ConfigError(
                f"trainer.expert_parallel=true: trainer.num_ranks={mesh.size()} must divide the"
                f" {experts.num_experts} experts of the model"
            )
        experts.forward = DividedExperts(experts, mesh, compute_dtype)
    if not (divided := divided_parameters(module)):
        raise ConfigError(
            "trainer.expert_parallel=true: the model has no experts that ranks can divide: set it to false"
        )
    return divided


def divided_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of the experts that `divide_experts` has divided."""
    return {
        each for child in module.modules() if isinstance(child.forward, DividedExperts) for each in child.parameters()
    }


def stacked_experts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and the modules whose parameters are those of all experts of a layer, stacked."""
    for name, child in module.named_modules():
        if "_is_expert_parallel" in vars(child):  # made by transformers' use_experts_implementation
            yield name, child


class DividedExperts:
    """Computes the experts of one layer together with the other ranks, and takes the place of their forward."""

    def __init__(self, experts: Any, mesh: DeviceMesh, compute_dtype: torch.dtype):
        self._experts = experts
        self._group = mesh.get_group()
        self._dtype = compute_dtype
        self._size = mesh.size()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, _sharded(parameter, mesh))
        # The same forward over fewer experts, with other tensors for every call.
        self._own = copy.copy(experts)
        self._own._parameters = dict(experts._parameters)
        self._own.num_experts = experts.num_experts // self._size

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [..., H], the weighted sum over each token's experts. All ranks must call.

        Args:
            hidden_states: [..., H] of this rank's tokens.
            top_k_index: [T, K] the experts of each token.
            top_k_weights: [T, K] what each one counts.
        """
        tokens, chosen = hidden_states.flatten(0, -2), top_k_index.flatten()
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        sent, received, own_experts = route(chosen, self._experts.num_experts, self._group)
        arrived = exchanged(tokens[order // top_k_index.shape[-1]], sent, received, self._group)
        returned = exchanged(self._computed(arrived, own_experts), received, sent, self._group)
        by_token = returned[order.argsort()].unflatten(0, top_k_index.shape)  # [T, K, H]
        return (by_token * top_k_weights[..., None]).sum(1).to(hidden_states).view_as(hidden_states)

    def _computed(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """[R, H] -> [R, H]: each token by the one expert of this rank that `experts` [R] says."""
        num_tokens = len(tokens)
        if not num_tokens:  # a token that nobody reads: the gradient of the experts is zero then, and not missing
            tokens, experts = nn.functional.pad(tokens, (0, 0, 0, 1)), experts.new_zeros(1)
        weights = {name: self._weights(parameter) for name, parameter in self._experts.named_parameters()}
        one = tokens.new_ones(len(tokens), 1)
        return torch.func.functional_call(self._own, weights, (tokens, experts[:, None], one))[:num_tokens]

    def _weights(self, parameter: DTensor) -> Tensor:
        weights = parameter.to_local()
        if weights.requires_grad:
            weights.register_hook(lambda gradient: gradient / self._size)  # FSDP2 averages over ranks, and this sums
        return weights.to(self._dtype)


def _sharded(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Return a parameter of this rank's rows, without values, as FSDP2 would shard it."""
    shape, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, [Shard(0)])
    rows = parameter.new_empty(shape, requires_grad=False)
    whole = DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def route(chosen: Tensor, num_experts: int, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Tell the other ranks how many tokens each of their experts gets from this one.

    Args:
        chosen: the experts of this rank's tokens.

    Returns:
        How many tokens go to each rank, how many come from each, and [R] the experts of those that come, numbered from
        this rank's first.
    """
    counts = torch.bincount(chosen, minlength=num_experts).view(group.size(), -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
    own = torch.arange(counts.shape[1], device=chosen.device).repeat(group.size())
    return sent, received, own.repeat_interleave(arriving.flatten(), output_size=sum(received))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradients[0], *ctx.back), None, None, None


def exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows to rank 0, the next ones to rank 1 and so on. Return what comes, by rank."""
    return _Exchange.apply(rows, sent, received, group)  # pyright: ignore
