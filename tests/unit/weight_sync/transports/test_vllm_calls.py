"""Calls of trainer rank 0 into workers, through a store."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fakes import make_order
from tests.support.transport_cases import LocalStore
from weight_sync.transports.process_group import Transfer, announce
from weight_sync.transports.vllm_calls import END, Calls, packed, unpacked

SENT = {"names": ["a", "b"], "handle": (torch.Tensor, torch.Size([2, 3]), torch.bfloat16, b"\0\xff", None, 7)}


class World:
    """A trainer of two ranks and two replicas with one worker each, in one transfer."""

    def __init__(self, timeout_s: float = 20.0, store: Any = None, nonce: str = "0") -> None:
        store = LocalStore() if store is None else store
        order = replace(make_order(1), receivers={"a": 1, "b": 1}, timeout_s=timeout_s, nonce=nonce)
        meeting = announce(store, order, num_ranks=2, bucket_bytes=0)
        transfers = [Transfer(store, meeting, rank) for rank in range(4)]
        self.transfers = transfers
        self.calls = [Calls(store, transfer, meeting, 2) for transfer in transfers]

    def work(self, rank: int) -> list[Any]:
        return [*self.calls[rank].taken(rank)]


def test_every_worker_does_every_call_and_gets_all_checksums() -> None:
    world = World()
    with ThreadPoolExecutor() as threads:
        working = [threads.submit(world.work, rank) for rank in (2, 3)]
        world.calls[0].call("start_weight_update")
        world.calls[0].call("update_weights", SENT)
        world.calls[0].say_checksums(0, (1, 2))
        world.calls[1].say_checksums(1, (3, 4))
        world.calls[0].call(END)
        expected = [("start_weight_update", ()), ("update_weights", (SENT,))]
        assert [each.result(20) for each in working] == [expected, expected]
    assert world.calls[2].all_checksums() == ((1, 2), (3, 4))


def test_the_store_which_lasts_for_a_run_holds_no_more_after_many_transfers() -> None:
    store, sizes = LocalStore(), list[int]()
    for number in range(3):
        world = World(store=store, nonce=str(number))
        with ThreadPoolExecutor() as threads:
            working = [threads.submit(world.work, rank) for rank in (2, 3)]
            world.calls[0].call("update_weights", SENT)
            getting = threads.submit(world.calls[2].all_checksums)
            for rank in (0, 1):
                world.calls[rank].say_checksums(rank, (number, rank))
            world.calls[0].call(END)
            assert [len(each.result(20)) for each in working] == [1, 1]
            assert getting.result(20) == ((number, 0), (number, 1)), "and not those of the transfer before"
        sizes.append(store.num_keys())
    assert sizes == [2, 2, 2], "the checksums of the last transfer"


def test_the_worker_that_does_not_answer_is_named() -> None:
    world = World(timeout_s=0.3)
    with ThreadPoolExecutor() as threads:
        working = threads.submit(world.work, 2)
        with pytest.raises(RuntimeError, match=r"^b worker 0 did not end update_weights within 0\.3 s"):
            world.calls[0].call("update_weights", {})
        assert "no call of the trainer came" in str(working.exception(20))


def test_a_worker_that_fails_ends_the_call_at_once() -> None:
    world = World()
    world.transfers[3].fail(ValueError("no memory"))
    with pytest.raises(RuntimeError, match="b worker 0 failed: ValueError: no memory"):
        world.calls[0].call("update_weights", {})


@pytest.mark.parametrize("value", [print, torch.load, torch.nn.Linear])
def test_what_is_no_plain_value_is_not_unpickled(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no part of a call to a worker"):
        unpacked(packed(value).encode())
