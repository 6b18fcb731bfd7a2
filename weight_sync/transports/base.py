"""What a transport is: a sender in every trainer rank and a receiver in every worker of a replica."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from weight_sync.protocol import Manifest
from weight_sync.transports.byte_layout import Spec

Shards = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields (name, this rank's rows) of every tensor, in the order of the specs and in the dtype that replicas take."""


class Sender(Protocol):
    def publish(self, specs: Sequence[Spec], shards: Shards, order: dict[str, Any]) -> Manifest:
        """Offer the weights. They can be reached once every rank has returned; `checksums` has this rank's only.

        `order` is the same for all ranks: `global_steps`; `nonce`, new each time; `receivers`, replica -> workers;
        `base`, the version that all of them hold, or None.
        """
        ...

    def send(self, shards: Shards, manifest: Manifest) -> list[int]:
        """Move the bytes, where `publish` did not. The checksums of this rank's parts."""
        ...

    def stop(self, manifest: Manifest) -> None:
        """From another thread: let a `send` fail, on this side and at the receivers. A replica is gone that they would
        wait for."""
        ...

    def close(self) -> None:
        """Remove what was published."""
        ...


class Receiver(Protocol):
    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor), each valid until the next is asked for.

        Raises RuntimeError when what came is not what was sent, after the last one at the latest.
        """
        ...
