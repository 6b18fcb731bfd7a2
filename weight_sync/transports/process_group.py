"""A process group of trainer ranks and replicas' workers that lasts from one transfer to the next.

The members meet at a store that trainer rank 0 serves. There each of them says which group it still holds from the
transfer before. If that is not the same one for all, because members came or went or something failed, a new group is
made. A member that fails says why at the same place, so that the others need not wait for the deadline; for one that
died, the trainer does (`CollectiveSender.stop`).

Connections to the store last from group to group: for each new one torch asks the name server for the name of the other
end, one after the other, and all wait for 5 s when an answer is lost.
"""

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from configs.runtime.network import own_address
from weight_sync import background
from weight_sync.protocol import PublishOrder
from weight_sync.transports.locations import Meeting

STORE_TIMEOUT_S = 60.0
"""The deadline of one call to the store, which answers at once unless its process is gone."""
LOOK_S = 0.2
"""The time after which a waiting member looks again whether another one has failed."""


def serve_store() -> TCPStore:
    """Serves a store on a free port of this machine, for as long as the object lives."""
    timeout = timedelta(seconds=STORE_TIMEOUT_S)
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def report_failure(store: Store, nonce: str, reason: str) -> None:
    """Reports to all members of the transfer `nonce`, which look for it while they wait. The first report stands."""
    with contextlib.suppress(RuntimeError):  # the process that serves the store is gone
        store.compare_set(f"failed {nonce}", "", reason)


def announce(store: TCPStore, order: PublishOrder, num_ranks: int, bucket_bytes: int) -> Meeting:
    """Return where all trainer ranks and the workers of all receivers meet: at the store of this machine."""
    members = [f"trainer rank {rank}" for rank in range(num_ranks)]
    first_rank: dict[str, int] = {}
    for replica, num_workers in order.receivers.items():
        first_rank[replica] = len(members)
        members += [f"{replica} worker {worker}" for worker in range(num_workers)]
    return Meeting(
        host=own_address(),
        port=store.port,
        nonce=order.nonce,
        timeout_s=order.timeout_s,
        bucket_bytes=bucket_bytes,
        members=tuple(members),
        first_rank=first_rank,
    )


class Transfer:
    """One transfer, as one member sees it. Every wait ends by the deadline."""

    def __init__(self, store: Store, meeting: Meeting, rank: int):
        self.group: Any = None
        self._store = store
        self._rank = rank
        self._meeting = meeting
        self._deadline = time.monotonic() + meeting.timeout_s

    @property
    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def meet(self, held: str) -> bool:
        """Waits for all members, and returns whether every one of them holds the group `held`."""
        keys = {f"member {rank}": name for rank, name in enumerate(self._meeting.members)}
        mine, nonce = f"{self._meeting.nonce} {held}", self._meeting.nonce.encode()
        self._store.set(f"place {self._meeting.members[self._rank]}", f"{socket.gethostname()}, {own_address()}")
        self._store.set(f"member {self._rank}", mine)

        def have(keys: list[str]) -> bool:
            return self._store.check(keys) and all(value.startswith(nonce) for value in self._store.multi_get(keys))

        def problem() -> str:
            missing = ", ".join(f"{name}{self._last_place(name)}" for key, name in keys.items() if not have([key]))
            return f"{missing} did not come to {self._meeting.host}:{self._meeting.port}"

        self.until(lambda: have(list(keys)), 0.005, problem)
        return bool(held) and set(self._store.multi_get(list(keys))) == {mine.encode()}

    def _last_place(self, member: str) -> str:
        """Return where the member was when it came to an earlier transfer."""
        key = f"place {member}"
        return f" (last on {self._store.get(key).decode()})" if self._store.check([key]) else ""

    def in_thread(self, make: Callable[[], Any], problem: str = "the members did not connect") -> Any:
        """Returns what `make` makes, which blocks until every member calls it too. It runs in a thread, which is
        abandoned when a member fails, or at the deadline."""
        making = background.start("weight-group", make)
        self.until(making.done, 0.001, lambda: problem)
        if error := making.exception():
            self._raise_failure()
            raise RuntimeError(f"{problem}: {error}") from error
        return making.result()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Begins to send the tensor of `root` into that of every other member."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        options.timeout = timedelta(seconds=self.seconds_left + LOOK_S)
        return self.group.broadcast([tensor], options)

    def wait(self, work: Any) -> None:
        """Waits until the tensor may be read, or written again. RuntimeError at the deadline, or if a member fails."""
        self.until(work.is_completed, 0.001, lambda: "the next bytes did not come")
        try:
            work.wait()  # raises what went wrong; on a GPU, the current stream waits from here on
        except RuntimeError as error:
            self._raise_failure()
            raise RuntimeError(f"the group broke: {error}") from error

    def fail(self, error: BaseException) -> None:
        reason = f"{self._meeting.members[self._rank]} failed: {type(error).__name__}: {error}"
        report_failure(self._store, self._meeting.nonce, reason)

    def until(self, done: Callable[[], bool], every_s: float, problem: Callable[[], str]) -> None:
        """Wait until it is done. RuntimeError at the deadline, or when a member has failed."""
        look_at = time.monotonic() + LOOK_S
        while not done():
            now = time.monotonic()
            if now > look_at:
                self._raise_failure()
                look_at = now + LOOK_S
            if now > self._deadline:
                self._raise_failure()
                raise RuntimeError(f"{problem()} within {self._meeting.timeout_s:g} s")
            time.sleep(every_s)

    def _raise_failure(self) -> None:
        key = f"failed {self._meeting.nonce}"
        if self._store.check([key]):
            raise RuntimeError(self._store.get(key).decode())


class Membership:
    """One member's place in the group, kept from transfer to transfer.

    Example:
        for meeting in meetings:                               # one for each version
            with membership.transfer(meeting, rank) as transfer:
                transfer.wait(transfer.broadcast(tensor, root=0))
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._server: tuple[str, int] | None = None
        self._store: Store | None = None
        self._rendezvous: Store | None = None
        """A connection for making groups: while it waits for the members it answers nothing else."""
        self._group: Any = None
        self._name = ""
        """The group's name: the nonce of its first transfer."""
        self._members: tuple[str, ...] = ()

    @contextlib.contextmanager
    def transfer(self, meeting: Meeting, rank: int) -> Iterator[Transfer]:
        """The transfer, once all members have come. An exception inside breaks the group for all."""
        transfer = Transfer(self._connect(meeting), meeting, rank)
        held, self._name = self._name, ""  # until this transfer ends well, no group is held
        try:
            if not transfer.meet(held if self._members == meeting.members else ""):
                self._end_group()
                kept, self._rendezvous = self._rendezvous, None  # for good, if it waits for a member in vain
                seconds = transfer.seconds_left
                self._group, self._rendezvous = transfer.in_thread(
                    lambda: self._make_group(kept, meeting, rank, seconds)
                )
                held, self._members = meeting.nonce, meeting.members
            transfer.group = self._group
            yield transfer
        except BaseException as error:
            transfer.fail(error)
            transfer.group = None
            traceback.clear_frames(error.__traceback__)  # broadcasts that they hold keep the connections open
            self._end_group()
            raise
        self._name = held

    def _connect(self, meeting: Meeting) -> Store:
        server = (meeting.host, meeting.port)
        if self._store is None or server != self._server:
            self._store = connect_store(*server, timeout_s=min(meeting.timeout_s, STORE_TIMEOUT_S))
            self._server, self._rendezvous = server, None
        return self._store

    def _make_group(self, kept: Store | None, meeting: Meeting, rank: int, seconds: float) -> tuple[Any, Store]:
        """The group, and the connection that the next one can be made over."""
        connection = kept or connect_store(meeting.host, meeting.port, seconds)
        connection.set_timeout(timedelta(seconds=seconds))
        store = PrefixStore(f"group {meeting.nonce}", connection)
        size = len(meeting.members)
        if self._device.type == "cuda":
            return _make_nccl(store, rank, size, seconds, self._device), connection
        return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds)), connection

    def _end_group(self) -> None:
        """Ends it in a thread: gloo waits for the broadcasts that it began, to their deadline, and NCCL for the GPU."""
        last, self._group = [self._group], None
        if last[0] is not None:
            threading.Thread(target=_end, args=(last,), name="end-of-weight-group").start()


def _end(last: list[Any]) -> None:
    """`last` holds the only reference: gloo ends with the object."""
    if last[0].name() == "nccl":
        last[0].abort()
    last.clear()


def _make_nccl(store: Store, rank: int, size: int, seconds: float, device: torch.device) -> Any:
    """NCCL's watchdog ends the process when a broadcast fails or is late, unless the environment says otherwise while
    the group is made. Here a failed transfer is an error like others, and `Transfer.wait` keeps the deadline. (The
    watchdog also makes the process's first group end the process; QUIET_NCCL in its environment prevents that.)

    The first broadcast connects the members, and blocks until all have come: it is done here, with one byte.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * seconds + 600)
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(key)
    os.environ[key] = "0"
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
    torch.cuda.set_device(device)  # of this thread
    one_byte = torch.zeros(1, dtype=torch.uint8, device=device)
    group.broadcast([one_byte], dist.BroadcastOptions()).wait()  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.synchronize(device)
    return group
