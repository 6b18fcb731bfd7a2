"""Weights through a file in shared memory: one host, any device. Every worker of every replica reads it in place."""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver, which only removes files, does without torch
    import torch

    from weight_sync.bucket import Spec
    from weight_sync.protocol import Manifest
    from weight_sync.transports.base import Shards

DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


class SharedMemorySender:
    """Every rank writes its own rows into one file, so nothing is gathered. The file is used again for the next
    version, under another name: a replica that still reads then finds checksums that do not match."""

    def __init__(self, owner: str, rank: int, num_ranks: int):
        """`owner`: part of the file's name, by which `release_all` finds what a crash left."""
        self._owner, self._rank, self._num_ranks = owner, rank, num_ranks
        self._path: Path | None = None

    def publish(self, specs: "Sequence[Spec]", shards: "Shards", order: dict[str, Any]) -> "Manifest":
        from weight_sync import bucket  # noqa: PLC0415

        entries, nbytes = bucket.layout(specs)
        path = DIRECTORY / f"slipstream-{self._owner}-{order['global_steps']}-{order['nonce']}"
        if self._path is None or len(self._buffer) < nbytes:
            self.close()
            self._buffer = _allocate(path, nbytes)
        elif self._rank == 0:
            self._path.rename(path)
        self._path = path
        checksums = bucket.write(self._buffer, entries, shards(), self._rank, self._num_ranks)
        return {
            "transport": "shared_memory",
            "global_steps": order["global_steps"],
            "nbytes": nbytes,
            "tensors": entries,
            "num_ranks": self._num_ranks,
            "location": {"host": socket.gethostname(), "path": str(path)},
            "checksums": checksums,
        }

    def send(self, shards: "Shards", manifest: "Manifest") -> list[int]:
        return manifest["checksums"][self._rank]

    def stop(self, manifest: "Manifest") -> None:
        """Nobody waits for anybody."""

    def close(self) -> None:
        """Mappings that are still open stay valid."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class SharedMemoryReceiver:
    def tensors(self, manifest: "Manifest") -> "Iterator[tuple[str, torch.Tensor]]":
        """Views of the file. Raises RuntimeError on another host."""
        import torch  # noqa: PLC0415

        from weight_sync import bucket  # noqa: PLC0415

        hosts = {location["host"] for location in manifest["locations"]} | {socket.gethostname()}
        if len(hosts) > 1:
            raise RuntimeError(
                f"weight_sync.transport=shared_memory needs replicas and trainer on one machine, they are on "
                f"{', '.join(sorted(hosts))}: collective and filesystem work there"
            )
        # shared=False maps it privately: a reader cannot write into the weights of others.
        mapped = torch.from_file(
            manifest["locations"][0]["path"], shared=False, size=manifest["nbytes"], dtype=torch.uint8
        )
        return bucket.verified(bucket.read([mapped], manifest["tensors"]), manifest)


def _allocate(path: Path, nbytes: int) -> "torch.Tensor":
    """The file, mapped. Its memory is claimed here: to write where none is left would end the process by SIGBUS."""
    import torch  # noqa: PLC0415

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RuntimeError(f"{path.parent} has no room for {nbytes / 1e6:.1f} MB of weights: {error}") from error
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def release_all(owner: str) -> None:
    """Remove every file of `owner`."""
    own = re.compile(rf"slipstream-{re.escape(owner)}--?\d+-[0-9a-f]+")  # not those of an owner "<owner>-2"
    for path in DIRECTORY.glob("slipstream-*"):
        if own.fullmatch(path.name):
            path.unlink(missing_ok=True)
