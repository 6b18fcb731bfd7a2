"""Calls from trainer rank 0 into the workers of all replicas, during one transfer, through the store where it meets.

vLLM's trainer halves call the inference side by a client of their own. Here the workers wait for these calls while
their replica is paused: no call needs a way around the driver, and each ends when a member fails, or at the deadline.
"""

import io
import pickle
from base64 import b64decode, b64encode
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from weight_sync.protocol import Checksums
from weight_sync.transports.locations import Meeting
from weight_sync.transports.process_group import Transfer

END = "end"
"""The last call, which is for the loop of the workers."""
OF_TENSORS = ("torch", "torch.storage", "torch.nn.parameter")


class PlainUnpickler(pickle.Unpickler):
    """Makes plain values and what torch says of a tensor's memory, and nothing else that could come over the store."""

    def find_class(self, module: str, name: str) -> Any:
        if module in OF_TENSORS and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type | torch.dtype):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a call to a worker")


def packed(value: Any) -> str:
    return b64encode(pickle.dumps(value)).decode()


def unpacked(text: bytes) -> Any:
    return PlainUnpickler(io.BytesIO(b64decode(text))).load()


class Calls:
    """The calls of one transfer, on either side. Example:

    calls.call("update_weights", {"names": names})   # on rank 0: returns when every worker has done it
    for method, arguments in calls.taken():          # in a worker, to which the last call is `END`
        getattr(worker, method)(*arguments)
    """

    def __init__(self, store: Store, transfer: Transfer, meeting: Meeting, num_ranks: int):
        self._store, self._transfer, self._meeting = store, transfer, meeting
        self._workers = range(num_ranks, len(meeting.members))
        self._count = 0

    def call(self, method: str, *arguments: Any) -> None:
        """Let every worker do it. RuntimeError names those that do not within the deadline."""
        number, self._count = self._count, self._count + 1
        keys = {self._answer(number, rank): self._meeting.members[rank] for rank in self._workers}
        self._store.set(self._key(number), packed((method, arguments)))

        def problem() -> str:
            missing = ", ".join(name for key, name in keys.items() if not self._store.check([key]))
            return f"{missing} did not end {method}"

        self._transfer.until(lambda: self._store.check(list(keys)), 0.001, problem)
        for key in (self._key(number), *keys):  # the store lasts as long as the run
            self._store.delete_key(key)

    def taken(self, rank: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield each call when it comes. It counts as done when the next is asked for."""
        method = ""
        while method != END:
            number, self._count = self._count, self._count + 1
            key = self._key(number)
            self._transfer.until(lambda key=key: self._store.check([key]), 0.001, lambda: "no call of the trainer came")
            method, arguments = unpacked(self._store.get(key))
            if method != END:
                yield method, arguments
            self._store.set(self._answer(number, rank), "done")

    def say_checksums(self, rank: int, checksums: Checksums) -> None:
        """Let the workers know them, in place of those of the transfer before."""
        self._store.set(self._checksums(rank), packed((self._meeting.nonce, checksums)))

    def all_checksums(self) -> tuple[Checksums, ...]:
        """Return those of all trainer ranks, which they say at their end."""
        keys = [self._checksums(rank) for rank in range(self._workers.start)]
        said: list[tuple[str, Checksums]] = []

        def have_come() -> bool:
            said[:] = map(unpacked, self._store.multi_get(keys)) if self._store.check(keys) else ()
            return {nonce for nonce, _ in said} == {self._meeting.nonce}

        self._transfer.until(have_come, 0.001, lambda: "checksums of the weights did not come")
        return tuple(checksums for _, checksums in said)

    def _key(self, number: int) -> str:
        return f"call {self._meeting.nonce} {number}"

    def _answer(self, number: int, rank: int) -> str:
        return f"{self._key(number)} done by {rank}"

    @staticmethod
    def _checksums(rank: int) -> str:
        return f"checksums {rank}"
