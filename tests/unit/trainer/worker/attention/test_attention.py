"""Dense, flex and varlen attention against softmax over the pairs that the definition allows."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention import flex_attention as torch_flex
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from configs.schema import AttentionKind, Layout
from tests.support.batches import pack
from tests.support.families import random_model
from tests.support.reference import make_group, make_trajectory
from trainer.batch import MicroBatch
from trainer.worker.attention import attention, dense, flex, varlen
from trainer.worker.attention.attention import bucket, chosen
from trainer.worker.attention.dense import key_blocks
from trainer.worker.attention.rows import Mask, MaskFunction, Rows
from trainer.worker.counted_memory import Memory
from trainer.worker.model import Policy

CPU = torch.device("cpu")
REACH = 37
"""The reach of windows and chunks: shorter than a sequence, and no divisor of a block."""
NUM_HEADS, NUM_KEYS, WIDTH = 4, 2, 8
FUNCTIONS: dict[str, tuple[MaskFunction, int | None]] = {
    "causal": (causal_mask_function, None),
    "window": (sliding_window_causal_mask_function(REACH), REACH),
    "chunks": (chunked_causal_mask_function(REACH, torch.zeros(16, dtype=torch.int64)), REACH),
    "wide window": (sliding_window_causal_mask_function(500), 500),
}
Attend = Callable[..., tuple[Tensor, None]]


def branched(layout: Layout) -> MicroBatch:
    """Three prompts of up to 150 tokens, each with responses of up to 200; the trees end to end have 1,300 tokens."""
    random = np.random.default_rng(0)
    groups = []
    for ordinal, (prompt, *lengths) in enumerate([(150, 60, 200, 1), (40, 90, 90, 130, 7), (3, 160, 200)]):
        prompt_ids = random.integers(1, 64, prompt).tolist()
        responses = [make_trajectory(prompt_ids, random.integers(1, 64, length).tolist()) for length in lengths]
        groups.append(make_group(ordinal, responses))
    (batch,) = pack(groups, layout, keep_idle=True).micro_batches[0]
    return batch


def mask(batch: MicroBatch, name: str, attend: Attend, added: int = 0) -> Mask:
    return Mask(Rows.of(batch, batch.input_ids.shape[1] + added, CPU), *FUNCTIONS[name], attend)


def heads(batch_length: int, num_rows: int = 1) -> list[Tensor]:
    """Query, key and value [N, H, L, D]."""
    random = torch.Generator().manual_seed(0)
    shapes = [(num_rows, count, batch_length, WIDTH) for count in (NUM_HEADS, NUM_KEYS, NUM_KEYS)]
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def by_definition(batch: MicroBatch, name: str, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    """[N, L, H, D] of the batch's own tokens, over all pairs."""
    length = batch.input_ids.shape[1]
    places = torch.arange(length)
    last = torch.full((len(query), length), length - 1) if batch.last is None else torch.from_numpy(batch.last)
    positions = torch.from_numpy(batch.position_ids)
    q, k = positions[:, :, None], positions[:, None, :]
    batch_index = torch.zeros(1, dtype=torch.int64)
    allowed = (
        (places <= places[:, None])
        & (places[:, None] <= last[:, None])
        & FUNCTIONS[name][0](batch_index, batch_index, q, k)
    )
    key, value = (one.repeat_interleave(NUM_HEADS // NUM_KEYS, 1) for one in (key, value))
    logits = query @ key.transpose(-1, -2) / WIDTH**0.5
    if "softcap" in more:
        logits = more["softcap"] * torch.tanh(logits / more["softcap"])
    logits = logits.masked_fill(~allowed[:, None], -torch.inf)
    if "s_aux" in more:
        sinks = more["s_aux"][None, :, None, None].expand(*logits.shape[:-1], 1)
        return (torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    return (logits.softmax(-1) @ value).transpose(1, 2)


MODULE: Any = SimpleNamespace(num_key_value_groups=NUM_HEADS // NUM_KEYS, is_causal=True)


def gradients(attended: Tensor, inputs: list[Tensor], length: int) -> list[Tensor]:
    own = attended[:, :length]
    weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad((own * weights).sum(), inputs))


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("layout", "attend", "most_kept"),
    [
        (Layout.tree, dense.attend, dense.MOST_KEPT),
        (Layout.tree, dense.attend, 1000),
        (Layout.packed, dense.attend, dense.MOST_KEPT),
        (Layout.packed, varlen.attend, dense.MOST_KEPT),
        (Layout.rows, dense.attend, dense.MOST_KEPT),
        (Layout.rows, varlen.attend, dense.MOST_KEPT),
    ],
)
def test_values_and_gradients_are_those_of_the_pairs_that_are_allowed(
    layout: Layout, attend: Attend, most_kept: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of blocks are kept in some cases, and made again in the backward pass in others."""
    monkeypatch.setattr(dense, "MOST_KEPT", most_kept)
    batch = branched(layout)
    inputs = heads(batch.input_ids.shape[1], len(batch.input_ids))
    found, _ = attend(MODULE, *inputs, mask(batch, name, attend))
    expected = by_definition(batch, name, *inputs)
    assert_same(found, expected)
    length = found.shape[1]
    for ours, theirs in zip(gradients(found, inputs, length), gradients(expected, inputs, length), strict=True):
        assert_same(ours, theirs)


SINKS = torch.tensor([0.3, -1, 2, 0], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "more"),
    [
        *((Layout.tree, name, {}) for name in FUNCTIONS),
        (Layout.packed, "window", {"softcap": 0.7}),
        (Layout.packed, "causal", {"s_aux": SINKS}),
        (Layout.rows, "chunks", {}),
    ],
)
def test_flex_attention_is_over_the_pairs_that_are_allowed(
    layout: Layout, name: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients too, which torch refuses on CPUs only because there are no kernels for them. With padding."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *heads: None)
    batch, added = branched(layout), 90
    length = batch.input_ids.shape[1]
    inputs = heads(length + added, len(batch.input_ids))
    found, _ = flex.attend(MODULE, *inputs, mask(batch, name, flex.attend, added), **more)
    expected = by_definition(batch, name, *(one[:, :, :length] for one in inputs), **more)
    assert_same(found[:, :length], expected)
    for ours, theirs in zip(gradients(found, inputs, length), gradients(expected, inputs, length), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("layout", [Layout.tree, Layout.packed])
def test_flex_computes_the_blocks_that_have_pairs_and_no_others(layout: Layout, name: str) -> None:
    """Blocks that are near enough and have no pairs may be computed where layers reach back so many positions."""
    batch = branched(layout)
    of_layer = mask(batch, name, flex.attend)
    length = batch.input_ids.shape[1]
    allowed = nn.functional.pad(of_layer.allowed(slice(None), torch.arange(length))[0, 0], (0, -length % 128) * 2)
    tiles = allowed.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2)  # [blocks, blocks, 128, 128]
    some, every = tiles.any(-1).any(-1), tiles.all(-1).all(-1)
    made = flex.block_mask(of_layer)
    assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
    full = listed(made.full_kv_num_blocks, made.full_kv_indices)
    computed = listed(made.kv_num_blocks, made.kv_indices) | full
    assert not (full & ~every).any() and not (some & ~computed).any()
    if of_layer.is_causal:
        assert torch.equal(computed, some) and torch.equal(full, every)
    else:
        assert computed.sum() < torch.ones_like(computed).tril().sum()


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Return the listed blocks as bool [blocks, blocks]."""
    found = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for block, (count, order) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0], strict=True)):
        found[block, order[:count].long()] = True
    return found


def test_blocks_of_queries_are_over_ancestors_only() -> None:
    """A prompt of 100 tokens with responses of 29 and 171, and a second tree of 50."""
    last = np.array([[299] * 100 + [128] * 29 + [299] * 171 + [349] * 50])
    rows = Rows.of(replace(branched(Layout.packed), input_ids=last, position_ids=last, last=last), 350, CPU)
    assert rows.starts.tolist() == [0, 300] and not rows.are_chains
    blocks = [(list(range(350))[queries], keys.tolist()) for queries, keys in key_blocks(rows, None)]
    assert blocks == [
        (list(range(100)), list(range(100))),
        (list(range(100, 200)), list(range(200))),
        (list(range(200, 300)), [*range(100), *range(129, 300)]),
        (list(range(300, 350)), list(range(300, 350))),
    ]


@pytest.mark.parametrize("attend", [dense.attend, varlen.attend])
@pytest.mark.parametrize("name", ["causal", "window"])
def test_no_mask_is_as_large_as_all_pairs_of_a_row(attend: Attend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is one sequence of 16,384 tokens. SDPA over a mask is left out: on a CPU it has all pairs of a block."""
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda query, *others, **given: query)
    length = 16_384
    group = make_group(0, [make_trajectory([1], [2] * length), make_trajectory([3], [4])])
    (batch,) = pack([group], Layout.packed, budget=10**6, keep_idle=True).micro_batches[0]
    inputs = [one.expand(1, -1, length + 1, 1) for one in torch.zeros(3, 1, 4, 1, 1).unbind()]
    module: Any = SimpleNamespace(is_causal=True)
    with Memory() as memory, torch.no_grad():
        attend(module, *inputs, mask(batch, name, attend))
    assert memory.largest <= length**2 // 16


def test_what_flash_attention_is_told_of_windows_and_chunks() -> None:
    """Sequences of 209, 119 ... tokens: chunks begin again in each."""
    batch = branched(Layout.packed)
    starts = np.flatnonzero(batch.position_ids[0] == 0).tolist()
    length = batch.input_ids.shape[1]
    for name, window, expected in (
        ("causal", -1, starts),
        ("wide window", -1, starts),
        ("window", REACH - 1, starts),
        ("chunks", -1, np.flatnonzero(batch.position_ids[0] % REACH == 0).tolist()),
    ):
        bounds, longest, reach = varlen.segments(mask(batch, name, varlen.attend))
        assert bounds.tolist() == [*expected, length] and reach == window, name
        assert longest == max(np.diff(bounds.numpy())) and bounds.dtype == torch.int32


def test_a_window_of_another_kind_is_refused() -> None:
    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query - key < REACH // 2

    rows = Rows.of(branched(Layout.packed), 1 << 12, CPU)
    with pytest.raises(ValueError, match="attend neither to the last nor by chunks"):
        varlen.segments(Mask(rows, near, REACH, varlen.attend))


def test_varlen_refuses_what_flash_attention_cannot() -> None:
    tree, packed = (mask(branched(layout), "causal", varlen.attend) for layout in (Layout.tree, Layout.packed))
    query, _, value = heads(8)
    with pytest.raises(ValueError, match="trainer.attention=varlen: rows have branches"):
        varlen.attend(MODULE, query, value, value, tree)
    assert varlen.refusal(query, value, packed, {"softcap": 2.0}) == "flash attention knows no softcap"
    assert varlen.refusal(query, value, packed, {"softcap": None}) is None
    packed.device_type = "cuda"
    assert "bfloat16, not in torch.float64" in str(varlen.refusal(query, query, packed, {}))
    half = query.bfloat16()
    assert varlen.refusal(half, half, packed, {}) is None
    assert "no heads of width 8 and 4" in str(varlen.refusal(half, half[..., :4], packed, {}))


def test_fsdp_hands_a_mask_on_as_it_is() -> None:
    """It casts the inputs of each layer, and copies dataclasses, whose masks would be made again in each layer."""
    shared = mask(branched(Layout.packed), "causal", varlen.attend)
    cast: Any = _apply_to_tensors(torch.Tensor.bfloat16, {"attention_mask": shared})
    assert cast["attention_mask"] is shared


def test_masks_of_all_pairs_are_made_up_to_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention of some models, such as Falcon's, is their own code."""
    policy = Policy(random_model("falcon"), 1.0)
    batch = branched(Layout.packed)
    monkeypatch.setattr(attention, "LONGEST_MASK", batch.input_ids.shape[1])
    policy(batch, CPU)
    monkeypatch.setattr(attention, "LONGEST_MASK", batch.input_ids.shape[1] - 1)
    with pytest.raises(ValueError, match=r"a row of \d+ tokens: masks of all pairs are made up to"):
        policy(batch, CPU)


def test_lengths_on_gpus_are_few_and_near() -> None:
    buckets = {bucket(length) for length in range(1, 32769)}
    assert all(length <= bucket(length) <= length + max(127, length / 8) for length in range(1, 32769))
    assert len(buckets) <= 48 and all(length % 128 == 0 for length in buckets)


@pytest.mark.parametrize(
    ("dtype", "layout", "added", "kind"),
    [
        (torch.bfloat16, Layout.packed, {}, AttentionKind.varlen),
        (torch.bfloat16, Layout.tree, {}, AttentionKind.flex),
        (torch.float32, Layout.tree, {}, AttentionKind.dense),
        (torch.float32, Layout.packed, {}, AttentionKind.dense),
        (torch.float32, Layout.packed, {"softcap": 2.0}, AttentionKind.flex),
    ],
)
def test_on_a_gpu_float32_needs_no_kernels_that_are_compiled(
    dtype: torch.dtype, layout: Layout, added: dict[str, Any], kind: AttentionKind
) -> None:
    rows = mask(branched(layout), "causal", dense.attend)
    rows.device_type = "cuda"
    query = torch.zeros(1, 4, 8, 64, dtype=dtype)
    assert chosen(query, query, rows, added) is kind


@pytest.mark.slow
def test_flex_is_compiled_once_for_rows_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch has a mask function of its own, over tensors of its own."""
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    attention_of_torch = torch.compile(torch_flex.flex_attention, dynamic=False, fullgraph=True, backend=backend)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *heads: None)
    monkeypatch.setattr(flex, "on", lambda device: attention_of_torch)
    batch = branched(Layout.tree)
    for name in ("causal", "window"):
        for _ in range(3):
            rows = mask(batch, name, flex.attend, added=-batch.input_ids.shape[1] % 128)
            query = torch.randn(len(batch.input_ids), NUM_HEADS, rows.rows.input_ids.shape[1], WIDTH)
            with torch.no_grad():
                flex.attend(MODULE, query, query[:, :NUM_KEYS], query[:, :NUM_KEYS], rows)
    assert len(compiled) == 2
