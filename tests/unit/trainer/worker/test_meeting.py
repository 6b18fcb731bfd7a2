"""The meeting of the ranks, before they make their process group."""

import threading

import pytest

from tests.support.worker_runs import free_master
from trainer.worker.worker import meet

RANKS = ["on node1 (10.77.0.1), process 11", "on node2 (10.77.0.2), process 22", "on node3 (10.77.0.3), process 33"]


def test_ranks_that_all_come_share_a_store() -> None:
    master, stores = free_master(), {}

    def come(rank: int) -> None:
        stores[rank] = meet(master, rank, RANKS, 60.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[2].set("key", "value")
    assert stores[0].get("key") == b"value"


def test_who_does_not_come_is_named_with_its_machine() -> None:
    master = free_master()
    missing = rf"train worker 1 on node2 \(10.77.0.2\), process 22, train worker 2 on node3 .* did not come to {master}"
    with pytest.raises(TimeoutError, match=rf"^{missing} within 0.2 s, a quarter of trainer.start_timeout_s$"):
        meet(master, 0, RANKS, 0.2)


def test_a_rank_that_cannot_reach_the_first_names_itself_and_the_place() -> None:
    master = free_master()
    with pytest.raises(TimeoutError, match=rf"^train worker 1 on node2 .* does not reach {master} within 1 s"):
        meet(master, 1, RANKS, 1.0)
