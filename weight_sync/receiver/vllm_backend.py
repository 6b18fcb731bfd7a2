"""The receiver as a backend of vLLM's own weight-transfer API, so that a `vllm serve` elsewhere takes our updates.

`weight_sync/vllm_server.py` is the other side, and says how to start the server. vLLM's API has three calls, and ours
differ from its own backends in when they may come:
- `update_weights` begins to fill the shadow, in a thread, and returns: it may come while the engine generates.
- `finish_weight_update` copies the shadow over the live weights: it must come while the engine is paused, and is the
  only call for which it has to be.
No call answers with anything, so the state is asked for by a method of the worker.
"""

import io
import pickle
from base64 import b64decode
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from weight_sync.receiver.vllm_receiver import Staging, WeightReceiver

BACKEND = "slipstream"
MANIFEST_MODULES = ("weight_sync.protocol", "weight_sync.transports.locations")


@dataclass
class InitInfo(WeightTransferInitInfo):
    replica: str
    """The name by which weights are sent to this engine."""
    stage_timeout_s: float
    """The seconds for which a `finish_weight_update` waits for weights that have not all come."""
    staging_on_device: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    manifest: str
    """The manifest as bytes of pickle in base64. An empty one ends an update that will not be finished."""


class ManifestUnpickler(pickle.Unpickler):
    """Makes manifests, and nothing else that a caller of the server's routes may send."""

    def find_class(self, module: str, name: str) -> Any:
        if module in MANIFEST_MODULES and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if (module, name) == ("pathlib", "PosixPath"):  # the place of files
            return Path
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a manifest")


class ShadowEngine(WeightReceiver, WeightTransferEngine[InitInfo, UpdateInfo]):
    """Stages by `WeightReceiver`, which finds here what it needs of a worker."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rank = self.parallel_config.rank
        self.init_info: InitInfo | None = None
        self.current: Staging | None = None
        """The staging of the update that has been started."""
        self.live: tuple[int, int] | None = None
        """(version, checksum) of the live weights; None before the first update and while they are torn."""
        self.is_torn = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Take the name. May be called again, by a trainer that starts again."""
        if (reason := self.receiver_refusal()) is not None:
            raise RuntimeError(reason)
        self.init_info = init_info

    def start_weight_update(self) -> None:
        """Forget what an update before may have staged, and was not finished. Nothing is done to the model."""
        self.current = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Begin to receive. Unlike the base, wait for no device: nothing has been written to one that computes."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.init_info is None:
            raise RuntimeError("init_weight_transfer_engine comes first")
        if not update_info.manifest:
            raise RuntimeError("the update was given up, as it was asked to be")
        pickled = b64decode(update_info.manifest)
        ManifestUnpickler(io.BytesIO(pickled)).load()  # it is loaded once more, and only if this raises nothing
        self.receiver_stage(pickled, self.init_info.replica, self.init_info.staging_on_device)
        self.current = self.receiver_staging

    def drain_pending(self) -> None:
        if self.current is not None and self.init_info is not None:
            wait([self.current.checksum], self.init_info.stage_timeout_s)

    def finish_weight_update(self) -> None:
        """Copy over the live weights, which takes as long as one copy where all has come."""
        self.drain_pending()
        if self.current is None or self.current.result() is None:
            raise RuntimeError("no weights are staged")
        self.is_torn, self.live = True, None
        self.live = self.receiver_swap(self.current.global_steps)
        self.is_torn = False

    def shutdown(self) -> None:
        """Forget the trainer, and keep the memory of the shadow for the next one."""
        self.init_info = None

    def state(self) -> dict[str, Any]:
        """Return what `VllmServer` asks for, as JSON."""
        staged, error = None, None
        try:
            staged = None if self.current is None else self.current.result()
        except RuntimeError as failure:
            error = str(failure)
        return {
            "refusal": self.receiver_refusal(),
            "caches_prefixes": bool(self.vllm_config.cache_config.enable_prefix_caching),
            "staged": staged,
            "error": error,
            "live": self.live,
            "is_torn": self.is_torn,
        }

    def receiver_refusal(self) -> str | None:
        if self.vllm_config.lora_config is not None:
            return "a server with --enable-lora serves adapters that it loads by itself: start it without"
        return super().receiver_refusal()

    def _receiver_is_native(self) -> bool:
        return False

    def _receiver_model(self) -> torch.nn.Module:
        return self.model


class Extension:
    """The class for `--worker-extension-cls`: importing it registers the backend in the worker."""

    def slipstream_state(self) -> dict[str, Any]:
        engine = self.weight_transfer_engine  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(engine, ShadowEngine):
            raise RuntimeError(f'the server needs --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'')
        return engine.state()


WeightTransferEngineFactory.register_engine(BACKEND, ShadowEngine)
