"""Weights by a backend of vLLM's own weight transfer, the half of a replica's worker (transports/vllm_native.py).

The worker's own methods do the work, as vLLM's server calls them: init_weight_transfer_engine, start_weight_update,
update_weights, finish_weight_update. The backends write into the live weights, most of them layer by layer with the
parameters on the meta device meanwhile. So an update that fails half-way leaves a model that no other update can mend.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from configs.weight_sync import VLLM_BACKENDS, VLLM_PREFIX
from weight_sync.protocol import Checksums, Manifest, ReceivingWorker
from weight_sync.receiver.samples import shortened
from weight_sync.transports.checksums import part_checksums, require_same
from weight_sync.transports.locations import VllmMeeting
from weight_sync.transports.process_group import Transfer, connect_store
from weight_sync.transports.vllm_calls import Calls

INIT, START = "init_weight_transfer_engine", "start_weight_update"
METHODS = (INIT, START, "update_weights", "finish_weight_update")


class NativeReceiver:
    def __init__(self, worker: Any):
        """Take vLLM's worker, whose engine was started with a backend."""
        self._worker = worker
        self._held = ""
        """The transfer whose members this worker's half is connected to."""
        self._is_torn = False

    def receive(self, manifest: Manifest, own: ReceivingWorker) -> tuple[Checksums, ...]:
        """Do what the trainer's half calls for, and return every rank's checksums. RuntimeError where it fails, and
        where what was loaded is not what was sent; all further updates of this worker are refused then."""
        if self._is_torn:
            raise RuntimeError(
                f"an update by {self._name} failed half-way: only a new replica has whole weights to begin with"
            )
        place: VllmMeeting = manifest.locations[0]
        meeting, num_ranks = place.meeting, manifest.num_ranks
        rank = meeting.first_rank[own.replica] + own.index
        store = connect_store(meeting.host, meeting.port, meeting.timeout_s)
        transfer = Transfer(store, meeting, rank)
        calls = Calls(store, transfer, meeting, num_ranks)
        held, self._held = self._held, ""
        actual: dict[str, list[int]] = {}
        try:
            is_connected = transfer.meet(held)
            with self._noting(manifest, actual):
                for method, arguments in calls.taken(rank):
                    self._do(method, arguments, meeting.first_rank[own.replica] - num_ranks)
            sent = calls.all_checksums()
            self._verify(manifest, actual, sent)
        except BaseException as error:
            transfer.fail(error)
            raise
        self._is_torn = False
        self._held = held if is_connected else meeting.nonce
        return sent

    def _do(self, method: str, arguments: tuple[Any, ...], workers_before: int) -> None:
        """Call the worker's own method."""
        if method not in METHODS:
            raise RuntimeError(f"the trainer calls {method}, which is none of {', '.join(METHODS)}")
        if method == INIT:
            self._worker.shutdown_weight_transfer_engine()  # of the members before
            (info,) = arguments
            if "rank_offset" in info:  # vLLM counts the workers of one engine only
                info["rank_offset"] += workers_before
        self._is_torn |= method == START
        getattr(self._worker, method)(*arguments)

    @contextlib.contextmanager
    def _noting(self, manifest: Manifest, actual: dict[str, list[int]]) -> Iterator[None]:
        """Take the checksums of what the model's `load_weights` is given."""
        model: Any = self._worker.weight_transfer_engine.model
        original, entries = model.load_weights, {entry.name: entry for entry in manifest.tensors}

        def noted(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name not in entries:
                    raise RuntimeError(f"{self._name} brought {name}, which was not published")
                actual[name] = part_checksums(tensor.contiguous(), entries[name], manifest.num_ranks)
                yield name, tensor

        model.load_weights = lambda tensors: original(noted(tensors))  # the backends look for it at the model
        try:
            yield
        finally:
            del model.load_weights

    def _verify(self, manifest: Manifest, actual: dict[str, list[int]], sent: tuple[Checksums, ...]) -> None:
        names = [entry.name for entry in manifest.tensors]
        for name, *expected in zip(names, *sent, strict=True):
            if name in actual:
                require_same(name, actual[name], expected)
        backend = VLLM_BACKENDS.get(self._backend)
        if (backend is None or backend.is_verified) and (missing := sorted({*names} - actual.keys())):
            raise RuntimeError(f"{self._name} did not load {shortened(missing)}: nothing says which weights these are")

    @property
    def _backend(self) -> str:
        return self._worker.vllm_config.weight_transfer_config.backend

    @property
    def _name(self) -> str:
        return f"weight_sync.transport={VLLM_PREFIX}{self._backend}"
