"""Deltas send only what changed: what is found, what is sent, and what must be refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport_cases import (
    RECEIVERS,
    Fleet,
    Weights,
    assert_same,
    load_with,
    make_sender,
    weights,
)
from weight_sync.protocol import NamedTensors, TensorEntry
from weight_sync.transports import delta
from weight_sync.transports.delta import DeltaReceiver, DeltaSender


def fleet(directory: Path, num_ranks: int = 1, inner: str = "filesystem") -> Fleet:
    return Fleet(
        lambda rank, num_ranks: DeltaSender(
            make_sender(inner, directory, 0, 1), rank, num_ranks, device=torch.device("cpu")
        ),
        lambda: DeltaReceiver(lambda name: RECEIVERS[name]()),
        num_ranks,
    )


def nudged(old: Weights, **places: int) -> Weights:
    """A copy in which the lowest bit of one element of each of the named tensors has changed."""
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name, place in places.items():
        flat = new[name].view(-1).view(torch.uint8)
        flat[place * new[name].element_size()] ^= 1
    return new


def test_every_bit_counts_and_nothing_else() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0, 1e-45])
    new = torch.tensor([-0.0, float("nan"), 1.0, 2.5, 0.0])
    positions = delta.changed(old, new)
    assert positions.tolist() == [0, 3, 4] and positions.dtype == torch.int32
    assert delta.changed(new, new.clone()).tolist() == []


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool]),
    old=st.lists(st.integers(0, 1), max_size=30),
    data=st.data(),
)
def test_old_and_changes_make_new(dtype: torch.dtype, old: list[int], data: st.DataObject) -> None:
    new = data.draw(st.lists(st.integers(0, 1), min_size=len(old), max_size=len(old)))
    before, after = torch.tensor(old).to(dtype), torch.tensor([1, *new]).to(dtype)[1:]  # not on a word's boundary
    positions = delta.changed(before, after)
    assert positions.tolist() == [place for place in range(len(old)) if old[place] != new[place]]
    delta.put(before, positions, after.view(-1)[positions.long()])
    assert torch.equal(before, after)


@pytest.mark.parametrize(("num_ranks", "num_replicas"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("inner", RECEIVERS)
@pytest.mark.usefixtures("local_store")
def test_three_versions_arrive_bit_by_bit_and_only_what_changed_travels(
    inner: str, num_ranks: int, num_replicas: int, directory: Path
) -> None:
    trainer = fleet(directory, num_ranks, inner)
    receivers = {f"replica-{index}": 1 for index in range(num_replicas)}
    first = weights(1)
    second = nudged(first, embed=34, large=799, scalar=0, mask=4, bytes=0)
    third = nudged(second, large=0, special=2, counts=0)
    expected = {1: list(first), 2: ["embed", "large", "scalar", "mask", "bytes"], 3: ["large", "counts", "special"]}
    models: dict[tuple[str, int], Weights] = {}
    for global_steps, new in enumerate((first, second, third), start=1):
        base = global_steps - 1 or None
        update = trainer.update(new, global_steps, receivers, base=base)
        assert update.errors == [] and len(update.received) == num_replicas
        for worker, found in update.received.items():
            assert isinstance(found, dict) and list(found) == expected[global_steps]
            models[worker] = {**models.get(worker, {}), **found}
            assert_same(models[worker], new)
        if base is not None:
            assert update.manifest.nbytes < 64 * 12


def test_where_nothing_changed_nothing_is_loaded(directory: Path) -> None:
    trainer = fleet(directory, num_ranks=2)
    trainer.update(weights(1), 1, {"a": 1})
    update = trainer.update(weights(1), 2, {"a": 1}, base=1)
    assert update.received["a", 0] == {} and update.errors == []
    trainer.update(nudged(weights(1), embed=0), 3, {"a": 1}, base=2).assert_received(
        {"embed": nudged(weights(1), embed=0)["embed"]}
    )


def test_rows_of_which_much_changed_travel_whole(directory: Path) -> None:
    """Rank 0's 25 x 16 rows of `large` are negated, in rank 1's one element changes."""
    trainer = fleet(directory, num_ranks=2)
    old = weights(1)
    trainer.update(old, 1, {"a": 1})
    new = nudged(old, large=799)
    new["large"][:25] *= -1
    update = trainer.update(new, 2, {"a": 1}, base=1)
    update.assert_received({"large": new["large"]})
    first, second = update.manifest.locations
    assert update.manifest.nbytes == 1600 + 4 + 4
    assert (first.encoding, second.encoding) == (((1, "whole"),), ((1, "sparse"),))
    assert first.inner.tensors == (TensorEntry("large", "float32", (25, 16), 0, 1600),)
    assert second.inner.tensors == (
        TensorEntry("large.positions", "int32", (1,), 0, 4),
        TensorEntry("large.values", "float32", (1,), 64, 4),
    )


@pytest.mark.usefixtures("local_store")
def test_positions_that_do_not_fit_32_bits_have_64(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "INT32_MAX", 10)
    trainer = fleet(directory, inner="collective")
    trainer.update(weights(1), 1, {"a": 1})
    new = nudged(weights(1), large=799)
    update = trainer.update(new, 2, {"a": 1}, base=1)
    update.assert_received({"large": new["large"]})
    [changes] = update.manifest.locations
    assert changes.inner.tensors[0] == TensorEntry("large.positions", "int64", (1,), 0, 8)


@pytest.mark.usefixtures("local_store")
def test_a_stop_ends_the_sending_of_every_rank(directory: Path) -> None:
    trainer = fleet(directory, num_ranks=2, inner="collective")
    update = trainer.update(weights(1), 1, {"a": 1, "gone": 1}, absent="gone", stop=True, timeout_s=60.0)
    assert update.errors == 3 * ["the trainer stopped sending"]
    trainer.update(weights(1), 1, {"a": 1}).assert_received(weights(1))


def test_against_another_base_than_the_trainer_keeps_all_is_sent(directory: Path) -> None:
    trainer = fleet(directory)
    trainer.update(weights(1), 1, {"a": 1})
    trainer.publish(weights(2), 2, {})  # nobody received it
    trainer.update(weights(3), 3, {"a": 1}, base=1).assert_received(weights(3))
    trainer.update(nudged(weights(3), embed=0), 4, {"a": 1}, base=3).assert_received(
        {"embed": nudged(weights(3), embed=0)["embed"]}
    )


def test_after_a_publication_that_failed_all_is_sent(directory: Path) -> None:
    trainer = fleet(directory)
    trainer.update(weights(1), 1, {"a": 1})
    shards = trainer.shards
    trainer.shards = lambda new, rank: shards({"embed": new["embed"]}, rank)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        trainer.publish(nudged(weights(1), embed=0), 2, {}, base=1)
    trainer.shards = shards  # type: ignore[method-assign]
    trainer.update(weights(1), 1, {"a": 1}, base=1).assert_received(weights(1))


def test_a_replica_that_holds_another_version_refuses(directory: Path) -> None:
    trainer = fleet(directory)
    trainer.update(weights(1), 1, {"a": 1})
    trainer.update(weights(2), 2, {"a": 1, "b": 1})
    trainer.update(weights(3), 3, {"b": 1})
    update = trainer.update(weights(4), 4, {"a": 1, "b": 1, "c": 1}, base=3)
    assert str(update.received["a", 0]) == "delta is against version 3, this replica holds 2"
    assert str(update.received["c", 0]) == "delta is against version 3, this replica holds none"
    assert isinstance(update.received["b", 0], dict)


def test_a_receiver_that_was_left_half_way_forgets_its_base(directory: Path) -> None:
    trainer = fleet(directory)
    trainer.update(weights(1), 1, {"a": 1})
    new = nudged(weights(1), embed=0, large=0)

    def load(tensors: NamedTensors) -> None:
        next(tensors)
        raise MemoryError

    with pytest.raises(MemoryError):
        load_with(trainer.receivers["a", 0], trainer.publish(new, 2, {"a": 1}, base=1), load)
    update = trainer.update(new, 3, {"a": 1}, base=2)
    assert str(update.received["a", 0]) == "delta is against version 2, this replica holds none"
    trainer.update(new, 4, {"a": 1}).assert_received(new)


@pytest.mark.slow
@pytest.mark.parametrize("touched", [True, False])
def test_weights_that_are_not_the_trainers_after_the_changes_name_their_tensor(touched: bool, directory: Path) -> None:
    trainer = fleet(directory, num_ranks=2)
    trainer.update(weights(1), 1, {"a": 1})
    manifest = trainer.publish(nudged(weights(1), embed=0, large=0), 2, {"a": 1}, base=1)
    first, second = manifest.locations
    wrong = list(second.checksums)
    wrong[1 if touched else 7] ^= 1
    manifest = replace(manifest, locations=(first, replace(second, checksums=tuple(wrong))))
    name = "large" if touched else "bytes"
    with pytest.raises(RuntimeError, match=f"{name} has checksums .* after the changes, the trainer's has"):
        trainer.receive(("a", 0), manifest)
