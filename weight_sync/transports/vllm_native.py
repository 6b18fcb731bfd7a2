"""Weights by a backend of vLLM's own weight transfer (`weight_sync.transport=vllm:NAME`), the trainer's half.

The replicas are paused meanwhile (weight_sync.staging=none): their workers take part by receiver/vllm_native.py, and
the bytes move in whatever way the backend has. The table in docs/weight-sync.md says what other transports promise and
these do not. The backends that vLLM brings need GPUs: with this file, none of them has ever been run.

Facts this rests on (vLLM 0.32):
- A trainer's half is made on every rank, with what its `init_info_cls` has as fields, and keeps its source for good.
- `send_weights` calls start, update and finish through the client, on rank 0 alone. All ranks iterate the source.
- `sparse_nccl` has no source: it takes patches. Without any, it calls nothing.
- The workers of each engine take the ranks from `rank_offset` on: receiver/vllm_native.py adds what other engines have.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from vllm.distributed.weight_transfer import factory
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.plugins import load_general_plugins
from vllm.utils.network_utils import get_open_port

from configs.validate import ConfigError
from configs.vllm_plugins import plugin_env
from configs.weight_sync import VLLM_PREFIX
from weight_sync.protocol import Checksums, Manifest, PublishOrder, Shards, TensorEntry
from weight_sync.transports.locations import VllmMeeting
from weight_sync.transports.process_group import Transfer, announce, connect_store, report_failure, serve_store
from weight_sync.transports.sender import RankSender, Rows
from weight_sync.transports.vllm_calls import END, Calls
from weight_sync.transports.vllm_outgoing import Changed, Outgoing

IPC, M2N, SPARSE = "ipc", "nccl_m2n", "sparse_nccl"
RENDEZVOUS = ("rank", "master_address", "master_port", "world_size", "num_trainer_ranks")
KNOWN = (*RENDEZVOUS, "packed", "packed_buffer_size_bytes")
"""The fields of a backend's init info that this file fills in."""


class WholeTensors(WeightSource):
    """The source of backends that send whole tensors."""

    def __init__(self, outgoing: Outgoing):
        self._outgoing = outgoing

    def metadata(self) -> list[ParamMeta]:
        entries = self._outgoing.entries
        return [ParamMeta(entry.name, getattr(torch, entry.dtype), entry.shape) for entry in entries]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._outgoing.whole()


def own_rows(outgoing: Outgoing) -> WeightSource:
    """Return the source of nccl_m2n, to which every rank gives its own rows."""
    from vllm.distributed.weight_transfer.m2n_common import REPLICATE, REPLICATED, M2NMesh, M2NParamMeta
    from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

    class OwnRows(M2NWeightSource):
        def mesh(self) -> M2NMesh:
            return M2NMesh((outgoing.num_ranks, 1), 0)

        def metadata(self) -> list[ParamMeta]:
            places = REPLICATED if outgoing.num_ranks == 1 else (0, REPLICATE)
            return [
                M2NParamMeta(entry.name, getattr(torch, entry.dtype), entry.shape, places) for entry in outgoing.entries
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return ((entry.name, rows) for entry, rows in outgoing.rows())

    return OwnRows()


class Client:
    """vLLM's client of the inference side, which calls the workers of all replicas."""

    def __init__(self) -> None:
        self.calls: Calls | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, *arguments: Any) -> None:
        assert self.calls is not None
        self.calls.call(method, *arguments)


class VllmSender(RankSender):
    """`publish` says where to meet. `send` lets vLLM's half move the bytes while the replicas are paused."""

    transport = "vllm"

    def __init__(self, backend: str, rank: int, num_ranks: int, bucket_bytes: int, device: torch.device):
        """Raises ConfigError for a backend that vLLM and its plugins do not register, or that needs to know more than
        this file does."""
        super().__init__(rank, num_ranks)
        self._backend, self._bucket_bytes, self._device = backend, bucket_bytes, device
        self._info_class = _info_class(backend)
        self._outgoing = Outgoing(rank, num_ranks)
        self._client, self._changed = Client(), Changed()
        self._store: Any = None
        self._base: int | None = None
        self._half: Any = None
        """vLLM's half, which is connected to the workers of the transfer named `_held`."""
        self._held = ""

    def _offer(
        self, entries: Sequence[TensorEntry], rows: Rows, order: PublishOrder
    ) -> tuple[VllmMeeting | None, Sequence[int] | None]:
        """Rank 0's location serves for all."""
        self._base = order.base
        if self._rank:
            return None, None
        self._store = self._store or serve_store()
        return VllmMeeting(announce(self._store, order, self._num_ranks, self._bucket_bytes), get_open_port()), None

    def send(self, shards: Shards, manifest: Manifest) -> Checksums:
        """Raises RuntimeError when a replica does not come, fails or is late. What the backend is at then goes on in a
        thread that nobody waits for."""
        place: VllmMeeting = manifest.locations[0]
        meeting = place.meeting
        store = connect_store(meeting.host, meeting.port, meeting.timeout_s)
        transfer = Transfer(store, meeting, self._rank)
        held, self._held = self._held, ""
        self._outgoing.entries, self._outgoing.shards = manifest.tensors, shards
        self._client.calls = Calls(store, transfer, meeting, self._num_ranks)
        try:
            is_connected = transfer.meet(held)
            problem = f"{VLLM_PREFIX}{self._backend} did not send"
            transfer.in_thread(lambda: self._send(place, manifest.global_steps, is_connected), problem)
            checksums = tuple(self._outgoing.checksums)
            self._client.calls.say_checksums(self._rank, checksums)
            if self._rank == 0:
                self._client.calls.call(END)
        except BaseException as error:
            transfer.fail(error)
            self._half = None
            raise
        self._held = held if is_connected else meeting.nonce
        return checksums

    def stop(self, manifest: Manifest) -> None:
        if self._store is not None:  # rank 0 reports to all
            report_failure(self._store, manifest.locations[0].meeting.nonce, "the trainer stopped sending")

    def _send(self, place: VllmMeeting, version: int, is_connected: bool) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        if not is_connected:
            if self._half is not None:
                self._half.shutdown()
            info = self._info_class(**self._values(place))
            self._half = factory.WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=self._source()
            )
        if self._backend == SPARSE:
            self._send_patches(version)
        else:
            self._half.send_weights()

    def _send_patches(self, version: int) -> None:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        tensors = self._outgoing.whole()
        if self._rank:
            for _ in tensors:
                pass  # the others gather
            return
        changed = self._changed.patches(tensors, self._base, version)
        self._half.send_weights([SparseWeightPatch(*patch) for patch in changed])

    def _source(self) -> WeightSource | None:
        if self._backend == SPARSE:
            return None
        return own_rows(self._outgoing) if self._backend == M2N else WholeTensors(self._outgoing)

    def _values(self, place: VllmMeeting) -> Mapping[str, Any]:
        names = {field.name for field in fields(self._info_class)}
        num_workers = len(place.meeting.members) - self._num_ranks
        values = {
            "rank": self._rank,
            "master_address": place.meeting.host,
            "master_port": place.port,
            "world_size": num_workers + (self._num_ranks if "num_trainer_ranks" in names else 1),
            "num_trainer_ranks": self._num_ranks,
            "packed": True,
            "packed_buffer_size_bytes": self._buffer_bytes(),
        }
        return {name: value for name, value in values.items() if name in names}

    def _buffer_bytes(self) -> int:
        """Return the size of a buffer. `packed_ipc_producer` takes no tensor that is larger, as embeddings are."""
        largest = max(entry.nbytes for entry in self._outgoing.entries)
        return max(self._bucket_bytes, largest) if self._backend == IPC else self._bucket_bytes


def _info_class(backend: str) -> Any:
    """Return what the backend's trainer half is made of."""
    os.environ |= plugin_env(backend)  # of this process, which the driver has told to load none
    load_general_plugins()
    senders: Mapping[str, Callable[[], Any]] = factory.WeightTransferTrainerFactory._registry
    receivers = factory.WeightTransferEngineFactory._registry
    name = f"weight_sync.transport={VLLM_PREFIX}{backend}"
    if backend not in senders or backend not in receivers:
        both = ", ".join(sorted(senders.keys() & receivers.keys()))
        raise ConfigError(f"{name}: vLLM and its plugins register both halves of {both}")
    half: Any = senders[backend]()
    info_class = half.init_info_cls
    required = [
        field.name
        for field in fields(info_class)
        if field.init and field.default is MISSING and field.default_factory is MISSING
    ]
    if unknown := [field_name for field_name in required if field_name not in KNOWN]:
        raise ConfigError(f"{name}: its {info_class.__name__} needs {', '.join(unknown)}, which a run cannot tell")
    return info_class
