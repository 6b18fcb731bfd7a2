"""A checksum of weights that each rank computes of its rows: the sum of all ranks' parts is that of the whole."""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


def word_sum(values: Tensor) -> int:
    """Return the 64-bit sum of the 32-bit words of the values in float32."""
    return int(values.float().contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64).item())


def over_ranks(sums: Mapping[str, int], sharded: Tensor) -> dict[str, int]:
    """Return the sums of whole parameters from those of each rank's rows. All ranks must call.

    Args:
        sharded: any parameter of the model. It knows the ranks that have the other rows.
    """
    if not isinstance(sharded, DTensor):
        return dict(sums)
    placements = [Partial() if isinstance(placement, Shard) else Replicate() for placement in sharded.placements]
    mine = torch.tensor(list(sums.values()), dtype=torch.int64, device=sharded.device)
    total = DTensor.from_local(mine, sharded.device_mesh, placements, run_check=False).full_tensor()
    return dict(zip(sums, total.tolist(), strict=True))


def combine_sums(sums: Mapping[str, int]) -> int:
    """Return 32 bits over names and sums, in their order."""
    value = 0
    for name, word_sum in sums.items():
        value = zlib.crc32(f"{name} {word_sum}".encode(), value)
    return value


def base_checksum(causal_lm: nn.Module) -> int:
    """Return the checksum of the names and values of a model as it was loaded in float32, before it has adapters."""
    return combine_sums({name: word_sum(parameter.detach()) for name, parameter in causal_lm.named_parameters()})
