"""Named tensors as one string of bytes, through windows and back, bit by bit; and its checksums."""

import math
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.protocol import combine
from weight_sync.transports import byte_layout as bucket
from weight_sync.transports.byte_layout import ALIGNMENT, CHECKSUM_ROW, CHECKSUM_ROWS, Entry

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)
Tensors = list[tuple[str, torch.Tensor]]


def specs_of(tensors: Tensors) -> list[bucket.Spec]:
    return [(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors]


def rows_of(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """As FSDP2 shards. What has no dimension to shard is rank 0's."""
    chunks = torch.chunk(tensor, num_ranks) if tensor.dim() else (tensor,)
    return chunks[rank] if rank < len(chunks) else tensor.reshape(-1)[:0]


def pack(tensors: Tensors, num_ranks: int = 1) -> tuple[torch.Tensor, list[Entry], list[list[int]]]:
    """(bytes, entries, checksums of every rank's parts), each rank writing its own."""
    entries, nbytes = bucket.layout(specs_of(tensors))
    buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
    checksums = [
        bucket.write(buffer, entries, [(n, rows_of(t, rank, num_ranks)) for n, t in tensors], rank, num_ranks)
        for rank in range(num_ranks)
    ]
    return buffer, entries, checksums


def assert_same(found: Tensors, expected: Tensors) -> None:
    for (name, tensor), (expected_name, expected_tensor) in zip(found, expected, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (expected_name, expected_tensor.dtype, expected_tensor.shape)
        assert torch.equal(tensor, expected_tensor)


@st.composite
def tensor_lists(draw: st.DrawFn) -> Tensors:
    specs = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [
        (f"layer.{index}", torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype))
        for index, (dtype, shape) in enumerate(specs)
    ]


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_layout_is_plain_data() -> None:
    """It crosses processes that may have another torch."""
    entries, nbytes = bucket.layout([("w", torch.bfloat16, [2, 3]), ("b", torch.float32, []), ("n", torch.int8, [0])])
    assert entries == [("w", "bfloat16", [2, 3], 0, 12), ("b", "float32", [], 64, 4), ("n", "int8", [0], 128, 0)]
    assert nbytes == 128
    assert bucket.layout([]) == ([], 64), "nothing cannot be mapped"


@settings(deadline=None)
@given(tensors=tensor_lists())
def test_places_are_aligned_disjoint_and_within_the_string(tensors: Tensors) -> None:
    entries, total = bucket.layout(specs_of(tensors))
    end = 0
    for (_, tensor), (*_, offset, nbytes) in zip(tensors, entries, strict=True):
        assert offset % ALIGNMENT == 0 and offset >= end
        assert nbytes == tensor.numel() * tensor.element_size()
        end = offset + nbytes
    assert end <= total and total > 0


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 17), max_size=3),
    num_ranks=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_the_part_of_a_rank_is_its_chunk(shape: list[int], num_ranks: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape)
    entry = ("w", "", shape, 128, tensor.nbytes)
    parts = [bucket.part_of(entry, rank, num_ranks) for rank in range(num_ranks)]
    assert parts[0][0] == 128 and parts[-1][1] == 128 + tensor.nbytes
    flat = tensor.reshape(-1).view(torch.uint8)
    for rank, (start, end) in enumerate(parts):
        assert rank == 0 or start == parts[rank - 1][1]
        rows = rows_of(tensor, rank, num_ranks).reshape(-1).view(torch.uint8)
        assert torch.equal(flat[start - 128 : end - 128], rows)


# -- there and back ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(tensors=tensor_lists(), num_ranks=st.integers(1, 4), window=st.integers(1, 40).map(lambda n: 8 * n))
def test_tensors_come_back_as_they_were_whoever_wrote_them_and_through_whatever_windows(
    tensors: Tensors, num_ranks: int, window: int
) -> None:
    buffer, entries, checksums = pack(tensors, num_ranks)
    assert_same(list(bucket.read([buffer], entries)), tensors)
    windows = [part.clone() for part in buffer.split(window)]
    manifest = {"num_ranks": num_ranks, "tensors": entries, "checksums": checksums}
    found = [(name, tensor.clone()) for name, tensor in bucket.verified(bucket.read(windows, entries), manifest)]
    assert_same(found, tensors)


def test_one_buffer_may_serve_for_all_windows() -> None:
    """A tensor is put together before the next window is asked for."""
    tensors = [(f"{index}", torch.arange(20.0) + index) for index in range(5)]
    data, entries, _ = pack(tensors)
    buffer = torch.empty(64, dtype=torch.uint8)

    def windows() -> Iterator[torch.Tensor]:
        for start in range(0, len(data), 64):
            yield buffer.copy_(data[start : start + 64])

    assert_same([(name, tensor.clone()) for name, tensor in bucket.read(windows(), entries)], tensors)


def test_scalars_special_values_and_views_survive() -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, 3.0e38])
    tensors = [
        ("scalar", torch.tensor(2.5, dtype=torch.bfloat16)),
        ("special", special),
        ("transposed", torch.arange(6.0).view(2, 3).T),
        ("every other", torch.arange(10)[::2]),
    ]
    buffer, entries, _ = pack(tensors)
    found = dict(bucket.read([buffer], entries))
    assert found["scalar"].shape == () and found["scalar"].item() == 2.5
    assert torch.equal(found["special"].view(torch.int32), special.view(torch.int32))
    assert torch.equal(found["transposed"], tensors[2][1]) and torch.equal(found["every other"], tensors[3][1])


def test_a_tensor_that_lies_in_one_window_is_not_copied() -> None:
    buffer, entries, _ = pack([("a", torch.zeros(4))])
    [(_, tensor)] = bucket.read([buffer], entries)
    buffer.fill_(255)
    assert tensor.isnan().all()


def test_windows_that_end_early_name_the_tensor() -> None:
    buffer, entries, _ = pack([("a", torch.zeros(4)), ("b", torch.zeros(40))])
    with pytest.raises(ValueError, match=r"the weights end at byte 128, within b at 64\.\.224"):
        list(bucket.read([buffer[:64], buffer[64:128]], entries))


W, B = torch.zeros(2, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("b", B), ("w", W)], r"expected 24 bytes of \('w', 'float32', \[2, 3\]\), got \('b', 'float32', 12\)"),
        (
            [("w", W.bfloat16()), ("b", B)],
            r"expected 24 bytes of \('w', .*, got \('w', 'bfloat16', 12\) of shape \[2, 3",
        ),
        ([("w", W[:1]), ("b", B)], r"expected 24 bytes of \('w', .*, got \('w', 'float32', 12\) of shape \[1, 3\]"),
        ([("w", W), ("c", B)], r"expected 12 bytes of \('b', .*, got \('c'"),
        ([("w", W)], "shorter"),
        ([("w", W), ("b", B), ("c", B)], "longer"),
    ],
    ids=["order", "dtype", "rows", "name", "missing", "one too many"],
)
def test_tensors_that_were_not_announced_are_refused(tensors: Tensors, message: str) -> None:
    entries, nbytes = bucket.layout([("w", torch.float32, [2, 3]), ("b", torch.float32, [3])])
    with pytest.raises(ValueError, match=message):
        bucket.write(torch.zeros(nbytes, dtype=torch.uint8), entries, tensors, 0, 1)


# -- checksums ---------------------------------------------------------------------------------------------------------


BLOCK = CHECKSUM_ROWS * CHECKSUM_ROW * 8


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plain_checksum(data: bytes) -> int:
    """The definition, word by word: CRC-32 of length, sums of rows, sums of columns, and the padded rest."""
    whole = len(data) // (8 * CHECKSUM_ROW) * 8 * CHECKSUM_ROW
    words = struct.unpack(f"<{whole // 8}Q", data[:whole])
    rows = [sum(words[start : start + CHECKSUM_ROW]) % 2**64 for start in range(0, len(words), CHECKSUM_ROW)]
    columns = [sum(words[column::CHECKSUM_ROW]) % 2**64 for column in range(CHECKSUM_ROW)]
    rest = data[whole:] + bytes(-(len(data) - whole) % 8)
    packed = struct.pack(f"<{len(rows)}Q", *rows) + struct.pack(f"<{CHECKSUM_ROW}Q", *columns) + rest
    return zlib.crc32(packed, len(data))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 4095, 4096, 4097, 3 * 4096 + 13])
def test_the_checksum_is_what_it_is_said_to_be(length: int) -> None:
    data = random_bytes(length)
    assert bucket.checksum(data) == plain_checksum(data.numpy().tobytes())


@pytest.mark.parametrize("num_ranks", [1, 3])  # with three, places are not all aligned
@pytest.mark.parametrize("length", [1, 9, 4095, 4097, BLOCK - 1, BLOCK, BLOCK + 4109, 2 * BLOCK + 1])
@pytest.mark.parametrize("step", [1, 2])  # with two, the tensor is not contiguous
def test_every_byte_is_copied_and_summed_on_the_way(length: int, num_ranks: int, step: int) -> None:
    data = random_bytes(num_ranks * length * step)[::step]
    (entry,), nbytes = bucket.layout([("w", torch.uint8, [num_ranks * length])])
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    for rank in range(num_ranks):
        rows = rows_of(data, rank, num_ranks)
        assert bucket.write(buffer, [entry], [("w", rows)], rank, num_ranks) == [plain_checksum(bytes(rows.tolist()))]
    assert torch.equal(buffer[: num_ranks * length], data) and not buffer[num_ranks * length :].any()


@pytest.mark.parametrize("num_rows", [1, CHECKSUM_ROWS - 1, CHECKSUM_ROWS, 2 * CHECKSUM_ROWS + 3])
def test_sums_are_those_that_a_gpu_computes(num_rows: int) -> None:
    words = random_bytes(num_rows * CHECKSUM_ROW * 8).view(torch.int64).view(-1, CHECKSUM_ROW)
    rows, columns = bucket._sums(words)
    assert np.array_equal(rows, words.sum(1).numpy()) and np.array_equal(columns, words.sum(0).numpy())


@pytest.mark.parametrize("length", [40, 4096, 9001])
def test_the_checksum_does_not_depend_on_where_the_bytes_lie(length: int) -> None:
    data = random_bytes(length)
    for start in range(17):
        place = torch.zeros(start + length + 9, dtype=torch.uint8)[start : start + length]
        assert bucket.checksum(place.copy_(data)) == bucket.checksum(data)
        storage = torch.frombuffer(bytearray(start + length), dtype=torch.uint8, offset=start)
        assert bucket.checksum(storage.copy_(data)) == bucket.checksum(data)
    assert bucket.checksum(data[: length // 8 * 8].view(torch.float64)) == bucket.checksum(data[: length // 8 * 8])


@settings(deadline=None)
@given(length=st.integers(1, 20_000), place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_any_byte_that_changes_changes_it(length: int, place: float, change: int) -> None:
    data = random_bytes(length, seed=length)
    before = bucket.checksum(data)
    data[int(place * length)] ^= change
    assert bucket.checksum(data) != before


@settings(deadline=None, max_examples=50)
@given(unit=st.sampled_from([1, 8, 8 * CHECKSUM_ROW]), a=st.integers(0, 3), b=st.integers(0, 3))
def test_bytes_words_and_rows_in_another_order_change_it(unit: int, a: int, b: int) -> None:
    data = random_bytes(5 * 8 * CHECKSUM_ROW)
    swapped = data.clone()
    swapped[a * unit : (a + 1) * unit], swapped[b * unit : (b + 1) * unit] = (
        data[b * unit : (b + 1) * unit],
        data[a * unit : (a + 1) * unit],
    )
    assert (bucket.checksum(swapped) == bucket.checksum(data)) == torch.equal(swapped, data)


def test_zeros_of_different_lengths_differ() -> None:
    lengths = [*range(20), 4088, 4096, 4097, 8192]
    assert len({bucket.checksum(torch.zeros(length, dtype=torch.uint8)) for length in lengths}) == len(lengths)


def test_what_differs_is_named_with_its_checksums() -> None:
    tensors = [("a", torch.zeros(6, 2)), ("b", torch.ones(6, 2))]
    buffer, entries, checksums = pack(tensors, num_ranks=3)
    manifest = {"num_ranks": 3, "tensors": entries, "checksums": checksums}
    assert [of_rank[1] for of_rank in checksums] == bucket.checksums_of(tensors[1][1], entries[1], 3)
    buffer[entries[1][3] + 20] ^= 1
    checked = bucket.verified(bucket.read([buffer], entries), manifest)
    assert next(checked)[0] == "a"
    sent = [of_rank[1] for of_rank in checksums]
    with pytest.raises(RuntimeError) as raised:
        next(checked)
    found = bucket.checksums_of(dict(bucket.read([buffer], entries))["b"], entries[1], 3)
    assert str(raised.value) == f"b came with checksums {found}, sent were {sent}"
    assert [a == b for a, b in zip(found, sent, strict=True)] == [True, False, True], "the rows of the second rank"


def test_one_checksum_of_all_depends_on_each_and_on_their_order() -> None:
    assert combine([[1, 2], [3]]) == zlib.crc32(struct.pack("<3I", 1, 2, 3))
    assert len({combine([[1, 2], [3, 4]]), combine([[3, 4], [1, 2]]), combine([[1, 2], [3, 5]])}) == 3
