"""Only what changed, over any other transport.

Every rank compares its rows with those that it published before, and sends positions and values of what differs by an
inner sender of its own. Receivers keep the whole weights of the last version in host memory and write over them: each
worker of a replica for itself, because which rows it needs is known only to the engine's loading code.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weight_sync.protocol import Manifest
from weight_sync.transports import byte_layout as bucket
from weight_sync.transports import changes as delta
from weight_sync.transports import shard_layout as rows
from weight_sync.transports.base import Receiver, Sender, Shards
from weight_sync.transports.byte_layout import Entry, Spec

Named = list[tuple[str, torch.Tensor]]


class DeltaSender:
    """A second copy of the rows stays on `device`."""

    def __init__(self, inner: Sender, rank: int, num_ranks: int, device: torch.device):
        """`inner`: rank 0 of 1, since what changed has another size on every rank."""
        self._inner = inner
        self._rank, self._num_ranks = rank, num_ranks
        self._device = device
        self._kept: list[torch.Tensor] = []
        self._checksums: list[int] = []
        self._version: int | None = None
        """What `_kept` is. None: nothing to compare with."""
        self._payload: Named = []

    def publish(self, specs: Sequence[Spec], shards: Shards, order: dict[str, Any]) -> Manifest:
        entries, _ = bucket.layout(specs)
        own = rows.layout(entries, self._rank, self._num_ranks)
        base = order["base"] if order["base"] == self._version else None
        self._version = None  # until all rows have been compared
        encoding, self._payload = self._whole(own, shards) if base is None else self._changes(own, shards)
        self._version = order["global_steps"]
        payload_specs = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in self._payload]
        inner = self._inner.publish(payload_specs, lambda: iter(self._payload), self._inner_order(order))
        inner["locations"] = [inner.pop("location")]
        manifest = {
            "transport": "delta",
            "global_steps": order["global_steps"],
            "nbytes": inner["nbytes"],
            "tensors": entries,
            "num_ranks": self._num_ranks,
            "location": {"base": base, "encoding": encoding, "inner": inner, "checksums": list(self._checksums)},
        }
        if "checksums" in inner:  # there is nothing to `send`
            inner["checksums"] = [inner["checksums"]]
            manifest["checksums"] = list(self._checksums)
        return manifest

    def _inner_order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Ranks publish beside one another, and each says that it is rank 0."""
        return {**order, "nonce": f"{order['nonce']}{self._rank:04x}"}

    def _whole(self, own: Sequence[Entry], shards: Shards) -> tuple[list[list[Any]], Named]:
        self._kept, self._checksums = [], []
        for _, tensor in rows.checked(shards(), own):
            self._kept.append(torch.empty_like(tensor, device=self._device).copy_(tensor))
            self._checksums.append(bucket.checksum(self._kept[-1]))
        held = [index for index, tensor in enumerate(self._kept) if tensor.numel()]
        return [[index, "whole"] for index in held], [(own[index][0], self._kept[index]) for index in held]

    def _changes(self, own: Sequence[Entry], shards: Shards) -> tuple[list[list[Any]], Named]:
        encoding: list[list[Any]] = []
        payload: Named = []
        for index, ((name, *_), tensor) in enumerate(rows.checked(shards(), own)):
            kept, new = self._kept[index], tensor.to(self._device)
            positions = delta.changed(kept, new)
            if not len(positions):
                continue
            if delta.is_worth_it(positions, new):
                values = delta.take(new, positions)
                delta.put(kept, positions, values)
                encoding.append([index, "sparse"])
                payload += [(f"{name}.positions", positions), (f"{name}.values", values)]
            else:
                kept.copy_(new)
                encoding.append([index, "whole"])
                payload.append((name, kept))
            self._checksums[index] = bucket.checksum(kept)
        return encoding, payload

    def send(self, shards: Shards, manifest: Manifest) -> list[int]:
        location = manifest["locations"][self._rank]
        self._inner.send(lambda: iter(self._payload), location["inner"])
        return location["checksums"]

    def stop(self, manifest: Manifest) -> None:
        self._inner.stop(manifest["locations"][self._rank]["inner"])

    def close(self) -> None:
        self._inner.close()
        self._kept, self._payload, self._version = [], [], None


class DeltaReceiver:
    def __init__(self, make_inner: Callable[[str], Receiver]):
        """`make_inner`: a receiver of the transport of that name. There is one for every trainer rank."""
        self._make_inner = make_inner
        self._inner: dict[tuple[int, str], Receiver] = {}
        self._tensors: list[torch.Tensor] = []
        self._checksums: list[list[int]] = []
        self._version: int | None = None
        """What `_tensors` are. None: of no version."""

    def tensors(self, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that changed, whole, on the host. Raises RuntimeError when it is not this version that was compared."""
        held, self._version = self._version, None  # a failure, here or in who takes the tensors, leaves no base behind
        entries, locations = manifest["tensors"], manifest["locations"]
        bases = {location["base"] for location in locations}
        for base in bases - {None, held}:
            holds = "none" if held is None else held
            raise RuntimeError(f"delta is against version {base}, this replica holds {holds}")
        manifest["checksums"] = [location["checksums"] for location in locations]
        touched = set(range(len(entries))) if bases == {None} else set()
        if touched:
            self._tensors = []
            self._tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for _, dtype, shape, _, _ in entries]
        for rank in range(manifest["num_ranks"]):
            touched |= self._apply(manifest, rank)
        self._verify(manifest, touched)
        for index in sorted(touched):
            yield entries[index][0], self._tensors[index]
        self._version, self._checksums = manifest["global_steps"], manifest["checksums"]

    def _apply(self, manifest: Manifest, rank: int) -> set[int]:
        """The changes of one rank's rows. Returns which tensors they are in."""
        location = manifest["locations"][rank]
        inner = location["inner"]
        own = {key: manifest[key] for key in ("replica", "worker", "device") if key in manifest}
        received = self._receiver(rank, inner["transport"]).tensors({**inner, **own})
        for index, kind in location["encoding"]:
            rows_of_rank = self._rows(manifest, rank, index)
            if kind == "whole":
                rows_of_rank.copy_(next(received)[1].reshape(-1))
            else:
                positions = next(received)[1].to("cpu", torch.int64, copy=True)
                delta.put(rows_of_rank, positions, next(received)[1].cpu())
        for name, _ in received:  # it may verify after the last one
            raise RuntimeError(f"{name} was not announced")
        return {index for index, _ in location["encoding"]}

    def _rows(self, manifest: Manifest, rank: int, index: int) -> torch.Tensor:
        """A rank's rows of a tensor, flat, as a view."""
        tensor, entry = self._tensors[index], manifest["tensors"][index]
        start, end = bucket.part_of(entry, rank, manifest["num_ranks"])
        size = tensor.element_size()
        return tensor.view(-1)[(start - entry[3]) // size : (end - entry[3]) // size]

    def _verify(self, manifest: Manifest, touched: set[int]) -> None:
        """The checksums are of whole tensors. Where nothing changed, nothing may have."""
        for index, entry in enumerate(manifest["tensors"]):
            expected = [of_rank[index] for of_rank in manifest["checksums"]]
            if index in touched:
                found = bucket.checksums_of(self._tensors[index], entry, manifest["num_ranks"])
            else:
                found = [of_rank[index] for of_rank in self._checksums]
            if found != expected:
                raise RuntimeError(f"{entry[0]} has checksums {found} after the changes, the trainer's has {expected}")

    def _receiver(self, rank: int, transport: str) -> Receiver:
        key = (rank, transport)
        if key not in self._inner:
            self._inner[key] = self._make_inner(transport)
        return self._inner[key]
