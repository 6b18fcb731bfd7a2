"""Merges adapters into the weights that they are for, which a worker keeps in host memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from weight_sync.adapter import factor_names, is_factor, merged
from weight_sync.protocol import Adapter, Load, Manifest, NamedTensors
from weight_sync.receiver.host_memory import HostMemory

LoadWhole = Callable[[Iterable[tuple[str, Tensor]], int], None]
"""Takes (Hugging Face name, whole tensor) of some weights, and how many make a whole model."""


class Merger:
    """Stands between a transport and the model of one worker. Of adapters it makes weights, from the base every time.

    Example, a version that brings base and adapter, so that all weights are loaded, and one that brings an adapter:
        for manifest in (first, second):
            with merger.merging(manifest, device, shadow.load) as load:
                receive(manifest, worker, load)
    """

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}
        self._held: int | None = None
        """Checksum of `_base`; None while it is not known to be whole."""

    @contextmanager
    def merging(self, manifest: Manifest, device: torch.device, load: LoadWhole) -> Iterator[Load]:
        """Yield what takes the manifest's tensors and loads weights. The block ends when they have been verified.

        Weights that are no adapter's pass through. `device`: where the worker's parameters are, and merges happen.

        Raises:
            RuntimeError: the adapter is for other weights than this worker holds.
        """
        adapter, count = manifest.adapter, len(manifest.tensors)
        if adapter is None:
            yield lambda tensors: load(tensors, count)
            return
        if brings_base := not all(is_factor(entry.name) for entry in manifest.tensors):
            self._held, self._base = None, {}  # first: two copies may not fit
        elif self._held != adapter.base:
            raise RuntimeError(f"the adapter is for weights {adapter.base}, this worker holds {self._held}")

        base_bytes = sum(entry.nbytes for entry in manifest.tensors if not is_factor(entry.name))

        def take(tensors: NamedTensors) -> None:
            factors = self._keep(tensors, device, base_bytes)
            load(self._merged(factors, adapter, device, everything=brings_base), len(self._base))

        yield take
        self._held = adapter.base

    def _keep(self, tensors: NamedTensors, device: torch.device, base_bytes: int) -> dict[str, Tensor]:
        """Copies the base to the host, and returns copies of the factors on `device`."""
        factors: dict[str, Tensor] = {}
        memory = HostMemory(base_bytes, pin=device.type == "cuda")
        for name, tensor in tensors:
            if is_factor(name):
                factors[name] = tensor.to(device, copy=True)
            else:
                self._base[name] = memory.empty_like(tensor).copy_(tensor)
        return factors

    def _merged(
        self, factors: Mapping[str, Tensor], adapter: Adapter, device: torch.device, *, everything: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, weight) of what has an adapter, or of every weight. RuntimeError for a factor of none."""
        unused = set(factors)
        for name, weight in self._base.items():
            a, b = factor_names(name)
            if a in factors:
                unused -= {a, b}
                yield name, merged(weight.to(device, non_blocking=True), factors[a], factors[b], adapter.scale)
            elif everything:
                yield name, weight
        if unused:
            raise RuntimeError(f"{min(unused)} belongs to none of the weights")
