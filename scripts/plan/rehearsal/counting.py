"""Counts what a rank does: the bytes that are alive at once, the operations, and what goes over the wire."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.nn.attention.varlen  # makes torch.ops.torch_attn
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.worker.expert_parallel import divided_parameters

aten, c10d, attn = torch.ops.aten, torch.ops.c10d, torch.ops.torch_attn
NOTHING = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.detach,
    aten.lift_fresh,
    aten._unsafe_view,
}
"""Operators that touch no memory."""
BACKWARD_OVER_FORWARD = 2.5
"""The products of flash attention's backward pass over those of the forward pass: five over two."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel, or a message to the other ranks."""

    part: str
    kind: str
    """The kind: matrix, attention, memory or wire."""
    flops: float
    num_bytes: float
    """Bytes that it reads and writes in the device's memory; of a message, those that leave this rank."""
    is_float32: bool = False


class Counting(FSDPMemTracker):
    """Counts inside the `with` block. `part` names what runs, and `positions` are those of the micro-batch at work.

    Example:
        with Counting([policy], [optimizer], world_size=8, shared_by=1) as counting:
            worker.train_step(micro_batches, 0)
        counting.peak, counting.operations
    """

    def __init__(
        self, modules: list[nn.Module], optimizers: list[torch.optim.Optimizer], *, world_size: int, shared_by: int
    ) -> None:
        super().__init__(modules[0], optimizers[0])
        self._root_mod = nn.ModuleList(modules)  # of all, where the tracker knows one
        self._others = optimizers[1:]
        self._world_size, self._shared_by = world_size, shared_by
        self._handles: list[Any] = []
        self._is_aside = False
        self.operations: list[list[Operation]] = []
        """The operations of each thing that `begin` began."""
        self.part = ""
        self.positions: np.ndarray = np.empty(0, np.int64)
        """The positions of the tokens in their sequences: each attends to so many before it, and to itself."""

    def __enter__(self) -> "Counting":
        super().__enter__()
        for module in self._root_mod.children():  # first of all hooks: the tracker knows only one forward pass
            hook = module.register_forward_pre_hook(lambda *_: self._begin_pass(), prepend=True)
            self._handles.append(hook)
        for optimizer in self._others:
            self._track_optimizer_states(_FSDPRefType.OPT, optimizer)
        self._propagate = propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def propagate_uncounted(*args: Any) -> Any:
            # DTensor finds out the shape of a result with tensors of the whole model's size, which nobody computes.
            self._is_aside = True
            try:
                return propagate(*args)
            finally:
                self._is_aside = False

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_uncounted  # pyright: ignore
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate
        for handle in self._handles:
            handle.remove()

    def begin(self, part: str) -> None:
        """Begin another list of operations. Gradients that a micro-batch leaves unreduced are gradients from then
        on."""
        self.part = part
        self.operations.append([])
        for parameter in divided_parameters(self._root_mod):  # which the tracker does not know
            assert isinstance(parameter, DTensor)
            self._update_and_maybe_create_winfos(parameter.to_local(), _FSDPRefType.SHARDED_PARAM)
            if isinstance(parameter.grad, DTensor):
                self._update_and_maybe_create_winfos(parameter.grad.to_local(), _FSDPRefType.SHARDED_GRAD)
        for module in self._root_mod.modules():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for parameter in [] if group is None else group.fsdp_params:
                if (gradient := parameter.unsharded_accumulated_grad) is not None:
                    self._update_and_maybe_create_winfos(gradient, _FSDPRefType.UNSHARDED_GRAD)

    def _begin_pass(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.reset_mod_stats()

    @property
    def peak(self) -> dict[str, int]:
        """The bytes at the moment when most were alive, by the tracker's parts."""
        [(_, parts)] = self.get_tracker_snapshot("peak").items()
        return {part.value if isinstance(part, Enum) else part: size for part, size in parts.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_aside:
            return func(*args, **kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if result is not NotImplemented and self.operations:
            self.operations[-1] += self._operations(func, args, kwargs or {}, result)
        return result

    def _operations(self, func: Any, args: Any, kwargs: Any, result: Any) -> Iterator[Operation]:
        packet, part = func._overloadpacket, self.part
        if torch._C._current_graph_task_id() != -1 and part == "forward":
            part = "backward"
        if func.namespace in ("c10d", "_c10d_functional"):
            yield Operation(part, "wire", 0, self._sent(packet, args))
            return
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if packet in NOTHING or is_view or func.namespace == "prim":
            return
        inputs, outputs = tensors(args), tensors(result)
        touched = float(sum(tensor.nbytes for tensor in {id(each): each for each in [*inputs, *outputs]}.values()))
        is_float32 = bool(inputs) and inputs[0].dtype is torch.float32
        if packet in (attn._varlen_attn, attn._varlen_attn_backward):
            is_forward = packet is attn._varlen_attn
            query = args[0] if is_forward else args[1]
            window = next((each for each in args if isinstance(each, list | tuple)), (-1, -1))[0]
            flops = self._attention(query, window) * (1 if is_forward else BACKWARD_OVER_FORWARD)
            yield Operation(part, "attention", flops, touched)
        elif packet is aten._grouped_mm:
            yield Operation(part, "matrix", _grouped(args[0], outputs[0]), touched, is_float32)
        elif packet in flop_registry:
            kind = "attention" if "attention" in str(packet) else "matrix"
            yield Operation(part, kind, flop_registry[packet](*args, **kwargs, out_val=result), touched, is_float32)
        else:
            yield Operation(part, "memory", 0, touched)

    def _attention(self, query: Tensor, window: int) -> float:
        """Return the operations of two products over the pairs of tokens, in the heads of `query` [T, H, D]."""
        reached = self.positions + 1 if window < 0 else (self.positions + 1).clip(max=window + 1)
        return 4.0 * float(reached.sum()) * query.shape[1] * query.shape[2]

    def _sent(self, packet: Any, args: Any) -> float:
        """Return the bytes that a ring sends from each rank."""
        sizes = [tensor.nbytes for tensor in tensors(args)]
        if not sizes or self._world_size == 1:
            return 0.0
        match packet.__name__:
            case "_allgather_base_" | "_reduce_scatter_base_" | "allgather_" | "reduce_scatter_":
                return float(max(sizes) - min(sizes))
            case "allreduce_" | "all_reduce" | "all_reduce_":
                return 2 * sizes[0] * (1 - 1 / self._world_size)
            case "alltoall_base_" | "alltoall_":
                are_among_all = any(isinstance(each, list) and each for each in args[3:])  # of sizes, as experts' are
                return sizes[0] * (1 - 1 / (self._world_size if are_among_all else self._shared_by))
            case "all_gather_into_tensor" | "all_gather_into_tensor_out":
                return sizes[0] * (self._world_size - 1.0)
        return 0.0


def _grouped(a: Tensor, product: Tensor) -> float:
    """Return the operations of products by groups, which divide either the rows or what is summed over among them."""
    groups = product.shape[0] if a.dim() == 2 and product.dim() == 3 else 1
    return 2.0 * product.numel() * a.shape[-1] / groups


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
