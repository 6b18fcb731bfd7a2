"""Only manifests are made of what a caller of a server's routes sends."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

from weight_sync.protocol import Manifest, TensorEntry
from weight_sync.receiver.vllm_backend import ManifestUnpickler
from weight_sync.transports.locations import Changes, GpuMemory, Meeting, SharedFile

ENTRY = TensorEntry(name="a", dtype="float32", shape=(2,), offset=0, nbytes=8)
MEETING = Meeting(
    host="h", port=1, nonce="n", timeout_s=1.0, bucket_bytes=1, members=("a",), first_rank={"replica-0": 1}
)


def manifest(location: Any) -> Manifest:
    return Manifest(transport="x", global_steps=1, nbytes=8, tensors=(ENTRY,), locations=(location,), checksums=((1,),))


CHANGES = Changes(base=None, encoding=((0, "whole"),), inner=manifest(None), checksums=(1,))


@pytest.mark.parametrize(
    "location", [SharedFile("h", "/p"), GpuMemory("h", ((1, "a"),)), MEETING, CHANGES, Path("/shared/a")]
)
def test_manifests_of_every_transport_arrive(location: Any) -> None:
    arrived = ManifestUnpickler(io.BytesIO(pickle.dumps(manifest(location)))).load()
    assert repr(arrived) == repr(manifest(location))


@pytest.mark.parametrize("name", [b"os\nsystem", b"weight_sync.protocol\nmerge", b"weight_sync.protocol\nzlib.crc32"])
def test_functions_are_refused_wherever_they_are_found(name: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no part of a manifest"):
        ManifestUnpickler(io.BytesIO(b"c" + name + b"\n.")).load()
