"""Named tensors as one string of bytes, through windows and back, bit by bit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport_cases import Weights, assert_same, local_rows, pack, specs_of
from weight_sync.protocol import NamedTensors, TensorEntry
from weight_sync.transports import byte_layout
from weight_sync.transports.byte_layout import ALIGNMENT
from weight_sync.transports.checksums import load_verified

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    specs = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {
        f"layer.{index}": torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
        for index, (dtype, shape) in enumerate(specs)
    }


def test_a_layout_is_plain_data() -> None:
    """It crosses processes that may have another torch."""
    entries = byte_layout.layout([("w", torch.bfloat16, [2, 3]), ("b", torch.float32, []), ("n", torch.int8, [0])])
    assert entries == (
        TensorEntry("w", "bfloat16", (2, 3), 0, 12),
        TensorEntry("b", "float32", (), 64, 4),
        TensorEntry("n", "int8", (0,), 128, 0),
    )
    assert (byte_layout.length(entries), byte_layout.length([])) == (68, 0)


@settings(deadline=None)
@given(tensors=weights())
def test_places_are_aligned_disjoint_and_within_the_string(tensors: Weights) -> None:
    entries = byte_layout.layout(specs_of(tensors))
    end = 0
    for tensor, entry in zip(tensors.values(), entries, strict=True):
        assert entry.offset % ALIGNMENT == 0 and entry.offset >= end
        assert entry.nbytes == tensor.numel() * tensor.element_size()
        end = entry.offset + entry.nbytes
    assert end <= byte_layout.length(entries) + ALIGNMENT


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 17), max_size=3),
    num_ranks=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
)
def test_the_part_of_a_rank_is_its_chunk(shape: list[int], num_ranks: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(math.prod(shape)).to(dtype).view(shape)
    entry = TensorEntry("w", "", tuple(shape), 128, tensor.nbytes)
    parts = [byte_layout.rank_part(entry, rank, num_ranks) for rank in range(num_ranks)]
    assert parts[0][0] == 128 and parts[-1][1] == 128 + tensor.nbytes
    flat = tensor.reshape(-1).view(torch.uint8)
    for rank, (start, end) in enumerate(parts):
        assert rank == 0 or start == parts[rank - 1][1]
        rows = local_rows(tensor, rank, num_ranks).reshape(-1).view(torch.uint8)
        assert torch.equal(flat[start - 128 : end - 128], rows)
        [own] = byte_layout.rank_layout([entry], rank, num_ranks)
        assert (own.shape, own.nbytes) == (local_rows(tensor, rank, num_ranks).shape, len(rows))


@settings(deadline=None)
@given(tensors=weights(), num_ranks=st.integers(1, 4), window=st.integers(1, 40).map(lambda n: 8 * n))
def test_tensors_come_back_as_they_were_whoever_wrote_them_and_through_whatever_windows(
    tensors: Weights, num_ranks: int, window: int
) -> None:
    buffer, manifest = pack(tensors, num_ranks)
    assert_same(dict(byte_layout.read([buffer], manifest.tensors)), tensors)
    windows = [part.clone() for part in buffer.split(window)]
    found: Weights = {}

    def load(received: NamedTensors) -> None:
        found.update((name, tensor.clone()) for name, tensor in received)

    assert load_verified(byte_layout.read(windows, manifest.tensors), manifest, load) == manifest.checksums
    assert_same(found, tensors)


def test_a_tensor_that_lies_in_one_window_is_not_copied() -> None:
    buffer, manifest = pack({"a": torch.zeros(4)})
    [(_, tensor)] = byte_layout.read([buffer], manifest.tensors)
    buffer.fill_(255)
    assert tensor.isnan().all()


def test_windows_that_end_early_name_the_tensor() -> None:
    buffer, manifest = pack({"a": torch.zeros(4), "b": torch.zeros(40)})
    with pytest.raises(ValueError, match=r"the weights end at byte 128, within b at 64\.\.224"):
        list(byte_layout.read([buffer[:64], buffer[64:128]], manifest.tensors))


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
def test_tensors_that_were_not_announced_are_refused(tensors: list[tuple[str, torch.Tensor]], message: str) -> None:
    entries = byte_layout.layout([("w", torch.float32, [2, 3]), ("b", torch.float32, [3])])
    with pytest.raises(ValueError, match=message):
        list(byte_layout.checked(tensors, entries))
