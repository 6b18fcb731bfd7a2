"""The digest of weights: what changes it, and what does not."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.worker.digest import WeightsDigest, trained_rows, unsigned

SHAPES = ((5, 6), (4, 3), (7,), (), (3, 2, 2))


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(SHAPES)}


def digest(tensors: dict[str, Tensor], num_ranks: int = 1) -> str:
    """Digest tensors whose rows lie on ranks as torch.chunk gives them out."""
    total = 0
    for rank in range(num_ranks):
        rows: list[tuple[str, Tensor, int]] = []
        for name, tensor in tensors.items():
            if tensor.dim() == 0:
                rows += [(name, tensor, 0)] if rank == 0 else []
                continue
            chunk = -(-len(tensor) // num_ranks)
            rows.append((name, tensor[rank * chunk : (rank + 1) * chunk], rank * chunk))
        total += int(WeightsDigest().part(rows).item())
    return unsigned(total)


@given(st.integers(0, 99), st.data())
def test_any_changed_bit_changes_the_digest(seed: int, data: st.DataObject) -> None:
    before, after = weights(seed), weights(seed)
    words = after[data.draw(st.sampled_from(sorted(after)))].view(-1).view(torch.int32)
    place, bit = data.draw(st.integers(0, len(words) - 1)), data.draw(st.integers(0, 31))
    words[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert digest(after) != digest(before)


def test_exchanged_values_rows_and_names_change_the_digest() -> None:
    plain = weights(1)
    exchanged = [weights(1) for _ in range(4)]
    exchanged[0]["w0"][0, [0, 2]] = exchanged[0]["w0"][0, [2, 0]]
    exchanged[1]["w0"][[0, 1]] = exchanged[1]["w0"][[1, 0]]
    exchanged[2]["w2"][[0, 1]] = exchanged[2]["w2"][[1, 0]]
    exchanged[3]["w9"] = exchanged[3].pop("w0")
    digests = {digest(tensors) for tensors in (plain, *exchanged)}
    assert len(digests) == 5


@given(st.integers(1, 9), st.permutations(range(len(SHAPES))))
def test_it_depends_on_neither_ranks_nor_order(num_ranks: int, order: list[int]) -> None:
    tensors = weights(2)
    shuffled = {name: tensors[name] for name in (f"w{index}" for index in order)}
    assert digest(shuffled, num_ranks) == digest(tensors)


def test_it_takes_what_is_trained_and_rows_that_are_not_aligned() -> None:
    module = nn.Linear(3, 5)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    module.register_parameter("frozen", frozen)
    names = [name for name, _, _ in trained_rows({"policy": module})]
    assert names == ["policy/weight", "policy/bias"]
    storage = torch.randn(25)
    shifted = storage[1:].view(6, 4)
    assert digest({"w": shifted}) == digest({"w": shifted.clone()})


def test_half_precision_is_digested_too() -> None:
    values = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    other = values.clone()
    other[2, 1] += 1
    assert digest({"w": values}) != digest({"w": other})


def test_a_worker_that_digests_again_finds_what_a_new_worker_finds() -> None:
    again = WeightsDigest()
    parts = [int(again.part((name, tensor, 0) for name, tensor in weights(seed).items())) for seed in (1, 2)]
    assert [unsigned(part) for part in parts] == [digest(weights(1)), digest(weights(2))]
