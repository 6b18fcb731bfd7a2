"""Named tensors through one flat buffer and back, bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync import bucket
from weight_sync.bucket import ALIGNMENT

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)
Tensors = list[tuple[str, torch.Tensor]]


def pack(tensors: Tensors) -> tuple[torch.Tensor, list[list[object]]]:
    entries, nbytes = bucket.layout([(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors])
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    bucket.write(buffer, entries, tensors)
    return buffer, entries


def assert_same(found: Tensors, expected: Tensors) -> None:
    for (name, tensor), (expected_name, expected_tensor) in zip(found, expected, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (expected_name, expected_tensor.dtype, expected_tensor.shape)
        assert torch.equal(tensor, expected_tensor)


@st.composite
def tensor_lists(draw: st.DrawFn) -> Tensors:
    specs = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [
        (f"layer.{index}", torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype))
        for index, (dtype, shape) in enumerate(specs)
    ]


@settings(deadline=None)
@given(tensors=tensor_lists())
def test_tensors_of_any_dtype_and_shape_come_back_as_they_were(tensors: Tensors) -> None:
    buffer, entries = pack(tensors)
    assert_same(list(bucket.read(buffer, entries)), tensors)


@settings(deadline=None)
@given(tensors=tensor_lists())
def test_places_are_aligned_disjoint_and_within_the_buffer(tensors: Tensors) -> None:
    entries, total = bucket.layout([(name, tensor.dtype, list(tensor.shape)) for name, tensor in tensors])
    end = 0
    for (_, tensor), (*_, offset, nbytes) in zip(tensors, entries, strict=True):
        assert offset % ALIGNMENT == 0 and offset >= end
        assert nbytes == tensor.numel() * tensor.element_size()
        end = offset + nbytes
    assert end <= total and total > 0


def test_scalars_special_values_and_views_survive() -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, 3.0e38])
    tensors = [
        ("scalar", torch.tensor(2.5, dtype=torch.bfloat16)),
        ("special", special),
        ("transposed", torch.arange(6.0).view(2, 3).T),
        ("every other", torch.arange(10)[::2]),
    ]
    buffer, entries = pack(tensors)
    found = dict(bucket.read(buffer, entries))
    assert found["scalar"].shape == () and found["scalar"].item() == 2.5
    assert torch.equal(found["special"].view(torch.int32), special.view(torch.int32))
    assert torch.equal(found["transposed"], tensors[2][1]) and torch.equal(found["every other"], tensors[3][1])


def test_reading_makes_no_copy() -> None:
    buffer, entries = pack([("a", torch.zeros(4))])
    [(_, tensor)] = bucket.read(buffer, entries)
    buffer.fill_(255)
    assert tensor.isnan().all()


def test_a_manifest_is_plain_data() -> None:
    """It crosses processes that may have another torch."""
    entries, nbytes = bucket.layout([("w", torch.bfloat16, [2, 3]), ("b", torch.float32, [])])
    assert entries == [["w", "bfloat16", [2, 3], 0, 12], ["b", "float32", [], 64, 4]]
    assert nbytes == 128


W, B = torch.zeros(2, 3), torch.zeros(3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("b", B), ("w", W)], r"expected tensor \['w', 'float32', \[2, 3\]\], got \['b', 'float32', \[3\]\]"),
        ([("w", W.bfloat16()), ("b", B)], r"expected tensor \['w', .*, got \['w', 'bfloat16', \[2, 3\]\]"),
        ([("w", W.T), ("b", B)], r"expected tensor \['w', .*, got \['w', 'float32', \[3, 2\]\]"),
        ([("w", W), ("c", B)], r"expected tensor \['b', .*, got \['c'"),
        ([("w", W)], "shorter"),
        ([("w", W), ("b", B), ("c", B)], "longer"),
    ],
    ids=["order", "dtype", "shape", "name", "missing", "one too many"],
)
def test_tensors_that_were_not_announced_are_refused(tensors: Tensors, message: str) -> None:
    entries, nbytes = bucket.layout([("w", torch.float32, [2, 3]), ("b", torch.float32, [3])])
    with pytest.raises(ValueError, match=message):
        bucket.write(torch.zeros(nbytes, dtype=torch.uint8), entries, tensors)


def test_any_flipped_bit_changes_the_checksum() -> None:
    buffer = torch.arange(256).to(torch.uint8)
    before = bucket.checksum(buffer)
    for place in range(256):
        for bit in range(8):
            buffer[place] ^= 1 << bit
            assert bucket.checksum(buffer) != before
            buffer[place] ^= 1 << bit
    assert bucket.checksum(buffer) == before
