"""Weights through a file in shared memory: one host, any device. Every worker of every replica reads it in place."""

import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from weight_sync import bucket

DIRECTORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


def publish(
    owner: str, specs: "Sequence[bucket.Spec]", tensors: "Iterable[tuple[str, torch.Tensor]]", global_steps: int
) -> dict[str, Any]:
    """Write the tensors, one by one, into a new file and return its manifest. `release` removes the file.

    `owner`: part of the file's name, by which `release_all` finds what a crash left.
    """
    import torch  # noqa: PLC0415  (the driver, which only releases, does without)

    from weight_sync import bucket  # noqa: PLC0415

    entries, nbytes = bucket.layout(specs)
    path = DIRECTORY / f"slipstream-{owner}-{global_steps}-{uuid.uuid4().hex[:8]}"
    free = shutil.disk_usage(DIRECTORY).free
    if free < nbytes:  # writing into a mapped file that finds no memory would kill the process with SIGBUS
        raise RuntimeError(f"{DIRECTORY} has {free / 1e6:.1f} MB left; the weights need {nbytes / 1e6:.1f} MB")
    try:
        with path.open("wb") as file:
            file.truncate(nbytes)
        buffer = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        bucket.write(buffer, entries, tensors)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return {
        "host": socket.gethostname(),
        "path": str(path),
        "nbytes": nbytes,
        "global_steps": global_steps,
        "tensors": entries,
        "checksum": bucket.checksum(buffer),
    }


def open_published(manifest: dict[str, Any]) -> "torch.Tensor":
    """The published bytes as a flat uint8 tensor, mapped, not copied. Raises RuntimeError on another host."""
    if manifest["host"] != socket.gethostname():
        raise RuntimeError(
            f"shared memory of {manifest['host']} cannot be read on {socket.gethostname()}: "
            "replicas and trainer must share a machine"
        )
    import torch  # noqa: PLC0415

    # shared=False maps it privately: a reader cannot write into the weights of others.
    return torch.from_file(manifest["path"], shared=False, size=manifest["nbytes"], dtype=torch.uint8)


def release(manifest: dict[str, Any]) -> None:
    """Remove the file. Mappings that are still open stay valid."""
    Path(manifest["path"]).unlink(missing_ok=True)


def release_all(owner: str) -> None:
    """Remove every file of `owner`."""
    own = re.compile(rf"slipstream-{re.escape(owner)}-\d+-[0-9a-f]{{8}}")  # not those of an owner "<owner>-2"
    for path in DIRECTORY.glob("slipstream-*"):
        if own.fullmatch(path.name):
            path.unlink(missing_ok=True)
