"""What the trainer's half of vLLM's weight transfer is given to send."""

from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport_cases import assert_same, local_rows, specs_of, weights
from weight_sync.transports import byte_layout
from weight_sync.transports.vllm_outgoing import Changed, Outgoing, gathered


def after(base: int | None, version: int, changed: Changed, new: Mapping[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(name, len(places)) for name, places, _, _ in changed.patches(iter(new.items()), base, version)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=4))
def test_patches_over_the_version_before_make_the_new_one_bit_for_bit(seeds: list[int]) -> None:
    changed, held = Changed(), weights(seeds[0])
    for version, seed in enumerate(seeds):
        new, base = weights(seed), version - 1 if version else None
        for name, places, values, shape in changed.patches(iter(new.items()), base, version):
            flat = held[name].reshape(-1).clone()
            flat[places.long()] = values
            held[name] = flat.view(shape)
        assert_same(held, new)


def test_only_what_has_changed_is_sent_and_all_to_who_may_hold_another_version() -> None:
    changed, first = Changed(), {"a": torch.zeros(5), "b": torch.ones(2, 2)}
    second = {"a": torch.tensor([0.0, 0.0, -0.0, 3.0, 0.0]), "b": first["b"]}
    assert after(None, 1, changed, first) == [("a", 5), ("b", 4)]
    assert after(1, 2, changed, second) == [("a", 2)], "-0.0 is another number"
    assert after(1, 3, changed, second) == [("a", 5), ("b", 4)], "version 2 was sent, and the receivers hold 1"


def test_whole_tensors_of_one_rank_are_its_rows_and_are_summed() -> None:
    new = weights(1)
    outgoing = Outgoing(0, 1, byte_layout.layout(specs_of(new)), lambda: iter(new.items()))
    for _ in range(2):  # a backend may iterate once for each update
        assert_same(dict(outgoing.whole()), new)
        assert len(outgoing.checksums) == len(new)


def test_ranks_gather_rows_of_unequal_lengths() -> None:
    new, num_ranks = weights(2), 4
    for entry in byte_layout.layout(specs_of(new)):
        rows = [local_rows(new[entry.name], rank, num_ranks).contiguous() for rank in range(num_ranks)]
        padded = [byte_layout.as_bytes(each) for each in rows]

        def all_gather(of_all: torch.Tensor, mine: torch.Tensor, padded: list[torch.Tensor] = padded) -> None:
            for rank, part in enumerate(padded):
                of_all[rank * len(mine) : rank * len(mine) + len(part)] = part

        whole = [gathered(entry, each, num_ranks, all_gather) for each in rows]
        for tensor in whole:
            assert_same({entry.name: tensor}, {entry.name: new[entry.name]})
