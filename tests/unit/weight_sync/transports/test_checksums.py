"""Checksums: what they are, what changes them, and that they are taken and verified on the way."""

import struct
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport_cases import pack
from weight_sync.protocol import combine
from weight_sync.transports import byte_layout
from weight_sync.transports.checksums import ROW, checksum, load_verified, part_checksums

BLOCK = 64 * ROW * 8


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain_checksum(data: bytes) -> int:
    """The definition, word by word: CRC-32 of length, sums of rows, sums of columns, and the padded rest."""
    whole = len(data) // (8 * ROW) * 8 * ROW
    words = struct.unpack(f"<{whole // 8}Q", data[:whole])
    rows = [sum(words[start : start + ROW]) % 2**64 for start in range(0, len(words), ROW)]
    columns = [sum(words[column::ROW]) % 2**64 for column in range(ROW)]
    rest = data[whole:] + bytes(-(len(data) - whole) % 8)
    packed = struct.pack(f"<{len(rows)}Q", *rows) + struct.pack(f"<{ROW}Q", *columns) + rest
    return zlib.crc32(packed, len(data))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 4095, 4096, 4097, 3 * 4096 + 13, BLOCK - 1, BLOCK, 2 * BLOCK + 4109])
def test_the_checksum_is_what_it_is_said_to_be(length: int) -> None:
    data = random_bytes(length)
    assert checksum(data) == plain_checksum(data.numpy().tobytes())


@pytest.mark.parametrize("length", [40, 4096, 9001])
def test_the_checksum_does_not_depend_on_where_the_bytes_lie(length: int) -> None:
    data = random_bytes(length)
    for start in range(17):
        place = torch.zeros(start + length + 9, dtype=torch.uint8)[start : start + length]
        assert checksum(place.copy_(data)) == checksum(data)
        storage = torch.frombuffer(bytearray(start + length), dtype=torch.uint8, offset=start)
        assert checksum(storage.copy_(data)) == checksum(data)
    assert checksum(data[: length // 8 * 8].view(torch.float64)) == checksum(data[: length // 8 * 8])


@settings(deadline=None)
@given(length=st.integers(1, 20_000), place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_byte_that_changes_changes_it(length: int, place: float, change: int) -> None:
    data = random_bytes(length, seed=length)
    before = checksum(data)
    data[int(place * length)] ^= change
    assert checksum(data) != before


def test_what_differs_is_named_with_its_checksums() -> None:
    tensors = {"a": torch.zeros(6, 2), "b": torch.ones(6, 2)}
    buffer, manifest = pack(tensors, num_ranks=3)
    entries = manifest.tensors
    assert manifest.checksums is not None
    sent = [of_rank[1] for of_rank in manifest.checksums]
    assert sent == part_checksums(tensors["b"], entries[1], 3)
    buffer[entries[1].offset + 20] ^= 1
    came: list[str] = []
    with pytest.raises(RuntimeError) as raised:
        load_verified(
            byte_layout.read([buffer], entries), manifest, lambda tensors: came.extend(name for name, _ in tensors)
        )
    assert came == ["a"]
    found = part_checksums(dict(byte_layout.read([buffer], entries))["b"], entries[1], 3)
    assert str(raised.value) == f"b came with checksums {found}, sent were {sent}"
    assert [a == b for a, b in zip(found, sent, strict=True)] == [True, False, True], "the rows of the second rank"


def test_one_checksum_of_all_depends_on_each_and_on_their_order() -> None:
    assert combine([[1, 2], [3]]) == zlib.crc32(struct.pack("<3I", 1, 2, 3))
    assert len({combine([[1, 2], [3, 4]]), combine([[3, 4], [1, 2]]), combine([[1, 2], [3, 5]])}) == 3
