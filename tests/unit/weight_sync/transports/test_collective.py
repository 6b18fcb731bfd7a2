"""Weights by broadcast over gloo: every trainer rank and every worker is a thread, with a process group of its own."""

import gc
import itertools
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.transport_cases import Fleet, Weights, weights
from weight_sync.protocol import Checksums, Load, Manifest, NamedTensors, Receiver, ReceivingWorker
from weight_sync.transports import process_group as group
from weight_sync.transports.collective import CollectiveReceiver, CollectiveSender
from weight_sync.transports.locations import Meeting
from weight_sync.transports.process_group import Transfer

CPU = torch.device("cpu")
MEETING = Meeting(
    host="localhost",
    port=0,
    nonce="0001",
    timeout_s=60.0,
    bucket_bytes=1024,
    members=("trainer rank 0", "a worker 0"),
    first_rank={"a": 1},
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The members of every process group that was made, once for each of them."""
    groups: list[tuple[str, ...]] = []
    make = group.Membership._make_group

    def counted(self: group.Membership, kept: Any, meeting: Meeting, rank: int, seconds: float) -> Any:
        groups.append(meeting.members)
        return make(self, kept, meeting, rank, seconds)

    monkeypatch.setattr(group.Membership, "_make_group", counted)
    return groups


def fleet(num_ranks: int = 1, bucket_bytes: int = 1024) -> Fleet:
    return Fleet(
        lambda rank, num_ranks: CollectiveSender(rank, num_ranks, bucket_bytes, CPU), CollectiveReceiver, num_ranks
    )


@pytest.mark.usefixtures("local_store")
def test_more_ranks_than_rows_and_buckets_of_one_word() -> None:
    trainer = fleet(num_ranks=3, bucket_bytes=1)
    new = {"two_rows": torch.randn(2, 9), "none": torch.empty(0, 2), "scalar": torch.tensor(2.5)}
    trainer.update(new, 1, {"a": 1}).assert_received(new)


@pytest.mark.usefixtures("local_store")
def test_the_group_is_kept_while_its_members_are_the_same_and_made_again_when_they_change(
    made: list[tuple[str, ...]],
) -> None:
    trainer = fleet()
    for receivers in ({"a": 1}, {"a": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1}, {"b": 1}):
        trainer.update(weights(1), 1, receivers).assert_received(weights(1))
    assert made == [
        *2 * [("trainer rank 0", "a worker 0")],
        *4 * [("trainer rank 0", "a worker 0", "a worker 1", "b worker 0")],
        *2 * [("trainer rank 0", "b worker 0")],
    ]
    trainer.receivers["b", 0] = CollectiveReceiver()  # began anew
    trainer.update(weights(2), 2, {"b": 1}).assert_received(weights(2))
    assert len(made) == 10


@pytest.mark.usefixtures("local_store")
def test_a_new_group_is_made_over_the_connections_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up a name for each new store, one after the other, takes 5 s each while a name server is silent."""
    connect, connections = group.connect_store, []

    def counted(host: str, port: int, timeout_s: float) -> Any:
        connections.append(port)
        return connect(host, port, timeout_s)

    monkeypatch.setattr(group, "connect_store", counted)
    trainer = fleet()
    for receivers in ({"a": 1}, {"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1}):
        trainer.update(weights(1), 1, receivers).assert_received(weights(1))
    assert len(connections) == 2 * 3, "one to meet and one to make groups over, of the trainer and two workers"


def test_a_member_that_dies_before_it_has_connected_is_heard_of_at_once() -> None:
    """All have met, and the others are making the group, which waits for everybody."""
    store = group.serve_store()
    meeting = replace(MEETING, port=store.port)
    errors: list[str] = []

    def join() -> None:
        try:
            with group.Membership(CPU).transfer(meeting, 0):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    began = time.monotonic()
    joining = threading.Thread(target=join)
    joining.start()
    other = group.connect_store("localhost", store.port, 60.0)
    Transfer(other, meeting, 1).meet("")
    time.sleep(0.3)
    assert joining.is_alive()
    group.report_failure(other, "0001", "a worker 0 is gone")
    joining.join(60)
    assert errors == ["a worker 0 is gone"] and time.monotonic() - began < 10


@pytest.mark.usefixtures("local_store")
def test_who_does_not_come_is_named_on_both_sides_at_the_deadline() -> None:
    trainer = fleet(num_ranks=2)
    began = time.monotonic()
    update = trainer.update(weights(1), 1, {"a": 1, "late": 1}, absent="late", timeout_s=0.2)
    assert time.monotonic() - began < 2
    assert len(update.errors) == 3
    assert all(re.search(r"late worker 0 did not come to \S+:\d+ within 0.2 s", error) for error in update.errors)
    trainer.update(weights(2), 2, {"a": 1}).assert_received(weights(2))


@pytest.mark.usefixtures("local_store")
def test_when_one_cannot_come_any_more_a_stop_ends_the_wait_on_both_sides_at_once() -> None:
    trainer = fleet(num_ranks=2)
    began = time.monotonic()
    update = trainer.update(weights(1), 1, {"a": 1, "gone": 1}, absent="gone", stop=True, timeout_s=60.0)
    assert time.monotonic() - began < 5
    assert update.errors == 3 * ["the trainer stopped sending"]
    trainer.update(weights(2), 2, {"a": 1}).assert_received(weights(2))
    trainer.senders[0].stop(update.manifest)  # too late, and harmless


class Failing(Receiver):
    """A receiver that has room for no more than one tensor of version 2."""

    def __init__(self) -> None:
        self._receiver = CollectiveReceiver()

    def receive(self, manifest: Manifest, worker: ReceivingWorker, load: Load) -> tuple[Checksums, ...]:
        def load_one(tensors: NamedTensors) -> None:
            if manifest.global_steps == 2:
                next(tensors)
                raise MemoryError("no room")
            load(tensors)

        return self._receiver.receive(manifest, worker, load_one)


@pytest.mark.usefixtures("local_store")
def test_one_that_fails_half_way_ends_the_transfer_for_all_at_once_and_the_next_one_works(
    made: list[tuple[str, ...]],
) -> None:
    trainer = fleet(num_ranks=2)
    trainer.receivers["b", 0] = Failing()
    trainer.update(weights(1), 1, {"a": 1, "b": 1}).assert_received(weights(1))
    began = time.monotonic()
    update = trainer.update(weights(2), 2, {"a": 1, "b": 1}, timeout_s=60.0)
    assert time.monotonic() - began < 5
    assert sorted(update.errors) == 3 * ["b worker 0 failed: MemoryError: no room"] + ["no room"]
    trainer.update(weights(3), 3, {"a": 1, "b": 1}).assert_received(weights(3))
    assert len(made) == 8


@pytest.mark.usefixtures("local_store")
def test_a_group_that_broke_leaves_neither_threads_nor_connections() -> None:
    """A broadcast of gloo that has begun ends at its deadline, or with the other side, and not before."""
    gc.collect()  # connections of the tests before
    connections = open_files()
    trainer = fleet(num_ranks=2)
    trainer.receivers["b", 0] = Failing()
    update = trainer.update(weights(2), 2, {"a": 1, "b": 1}, timeout_s=60.0)
    assert len(update.errors) == 4  # whose tracebacks are still here
    for thread in threading.enumerate():
        if thread.name == "end-of-weight-group":
            thread.join(5)
            assert not thread.is_alive()
    assert open_files() == connections


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("local_store")
def test_a_trainer_that_fails_says_so_to_the_replicas() -> None:
    trainer = fleet(num_ranks=2)
    shards = trainer.shards

    def broken(new: Weights, rank: int) -> Any:
        return shards({"embed": new["embed"]} if rank == 1 else new, rank)

    trainer.shards = broken  # type: ignore[method-assign]
    update = trainer.update(weights(1), 1, {"a": 1}, timeout_s=60.0)
    assert str(update.received["a", 0]).startswith("trainer rank 1 failed: ValueError: zip() argument 2 is shorter")


@pytest.mark.parametrize(("byte", "name"), [(3, "embed"), (130, "large"), (3330, "one_row")])
@pytest.mark.usefixtures("local_store")
def test_a_byte_that_changed_on_the_way_names_its_tensor(
    byte: int, name: str, made: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fleet()
    broadcast = Transfer.broadcast
    window = itertools.count()

    def disturbed(self: Transfer, tensor: torch.Tensor, root: int) -> Any:
        if self._rank == root and tensor.dtype == torch.uint8 and next(window) == byte // 1024:
            tensor[byte % 1024] ^= 1
        return broadcast(self, tensor, root)

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "broadcast", disturbed)
        update = trainer.update(weights(1), 1, {"a": 1})
    assert isinstance(update.sent[0], tuple)
    assert str(update.received["a", 0]).startswith(f"{name} came with checksums")
    trainer.update(weights(2), 2, {"a": 1}).assert_received(weights(2))
    assert len(made) == 2


def test_over_tcp() -> None:
    trainer = fleet()
    trainer.update(weights(1), 1, {"a": 1}, timeout_s=60.0).assert_received(weights(1))
