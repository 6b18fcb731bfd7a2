"""The rows of a parameter that this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def rows_of(parameter: Tensor) -> slice:
    """Those of dimension 0, which FSDP2 shards as torch.chunk does; all of them, where nothing is sharded."""
    if not isinstance(parameter, DTensor):
        return slice(0, parameter.shape[0])
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return slice(offset[0], offset[0] + shape[0])


def local(parameter: Tensor) -> Tensor:
    """The values of these rows, in the memory of the parameter."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
