"""The worker-side half of a weight update: vLLM mixes this class into every worker (`worker_extension_cls`).

Runs inside vLLM's worker process. Importing it changes what has to be changed on a CPU (vllm_on_cpu.py).
"""

import contextlib
import pickle
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from weight_sync import background
from weight_sync.protocol import Load, Manifest, ReceivingWorker, combine
from weight_sync.receiver.merge import LoadWhole, Merger
from weight_sync.receiver.shadow import Shadow, load_weights
from weight_sync.receiver.slots import LIVE, AdapterSlots
from weight_sync.receiver.vllm_on_cpu import change_vllm
from weight_sync.transports.registry import receive

if current_platform.is_cpu():
    change_vllm()


MOE_BACKENDS_THAT_KEEP_WEIGHTS = ("TRITON", "BATCHED_TRITON")


class WeightReceiver:
    """Stages and swaps. Method names must not clash with those of vLLM's worker, hence the prefix.

    Example, as the engine calls it on every worker:
        receiver_stage(manifest, "replica-0", False)   # begins to receive into the shadow, while the engine generates
        receiver_staged()                              # None until all has come, then its checksum
        receiver_swap(7)                               # while paused: the shadow over the live parameters
    """

    receiver_shadow: Shadow | None = None
    receiver_slots: AdapterSlots | None = None
    receiver_merger: Merger | None = None
    receiver_staging: "Staging | None" = None
    receiver_stream: torch.cuda.Stream | None = None
    """The same for all versions, because memory that was freed on one stream is not used again on another."""

    def receiver_open_slots(self) -> int:
        """For an engine that serves adapters: returns the id of the one that its requests have to name."""
        self._receiver_slots()
        return LIVE

    def receiver_stage(self, pickled: bytes, replica: str, on_device: bool) -> None:
        """Receives in a thread: this call must not keep the engine from its steps."""
        manifest, worker = pickle.loads(pickled), self._receiver_worker(replica)
        if self._receiver_serves_adapters():
            place, taking = self._receiver_slots(), self._receiver_slots().taking
        else:
            place = self._receiver_shadow(on_device)
            taking = partial(self._receiver_merging, load=place.load)
        if self.receiver_stream is None and self._receiver_device(True).type == "cuda":
            torch.cuda.synchronize()  # the copies are made on the engine's stream, and staged over on another
            self.receiver_stream = torch.cuda.Stream()
        before, stream = self.receiver_staging, self.receiver_stream
        self.receiver_staging = Staging(manifest, worker, taking, place, stream, before)

    def receiver_staged(self) -> int | None:
        """The checksum of what was staged, None while it is still received. Raises what went wrong."""
        assert self.receiver_staging is not None
        try:
            return self.receiver_staging.result()
        except RuntimeError:
            self.receiver_staging = None
            raise

    def receiver_swap(self, global_steps: int) -> tuple[int, int]:
        """While paused: copies the staged weights over the live ones. Returns (global_steps, checksum)."""
        staging = self.receiver_staging
        checksum = None if staging is None else staging.result()
        staged = None if staging is None or checksum is None else staging.global_steps
        if checksum is None or staged != global_steps:
            raise RuntimeError(f"cannot swap in version {global_steps}: staged is {staged}")
        assert staging is not None
        self.receiver_staging = None
        with torch.inference_mode():
            staging.place.swap_in()
        return self._receiver_done(global_steps, checksum)

    def receiver_load(self, pickled: bytes, replica: str) -> tuple[int, int]:
        """While paused: receives straight into the live parameters. Returns (global_steps, checksum)."""
        manifest, worker = pickle.loads(pickled), self._receiver_worker(replica)
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():  # pyright: ignore
            if self._receiver_serves_adapters():
                with self._receiver_slots().taking(manifest) as load:
                    checksums = receive(manifest, worker, load)
                self._receiver_slots().swap_in()
            else:
                self._receiver_refuse_transformed()
                with self._receiver_merging(manifest, load=partial(load_weights, self._receiver_model())) as load:
                    checksums = receive(manifest, worker, load)
        return self._receiver_done(manifest.global_steps, combine(checksums))

    def _receiver_done(self, global_steps: int, checksum: int) -> tuple[int, int]:
        if self._receiver_device(True).type == "cuda":
            torch.cuda.synchronize()
        return global_steps, checksum

    def _receiver_refuse_transformed(self) -> None:
        """Raises for models that keep weights in another form than they load: copies of those would be wrong."""
        model = self.vllm_config.model_config  # pyright: ignore[reportAttributeAccessIssue]
        if model.quantization is not None or model.use_mla:
            what = "multi-head latent attention" if model.use_mla else f"quantization={model.quantization}"
            raise RuntimeError(f"weights of a model with {what} cannot be updated: it transforms them after loading")
        for module in self._receiver_model().modules():
            if isinstance(module, UnquantizedFusedMoEMethod):
                backend = module.unquantized_backend.name
                if backend not in MOE_BACKENDS_THAT_KEEP_WEIGHTS:
                    what = f"experts cannot be updated with vLLM's MoE backend {backend}: it transforms their weights"
                    raise RuntimeError(f"{what}; {' and '.join(MOE_BACKENDS_THAT_KEEP_WEIGHTS)} do not")

    def _receiver_serves_adapters(self) -> bool:
        return self.vllm_config.lora_config is not None  # pyright: ignore[reportAttributeAccessIssue]

    def _receiver_slots(self) -> AdapterSlots:
        if self.receiver_slots is None:
            manager = self.model_runner.lora_manager  # pyright: ignore[reportAttributeAccessIssue]
            self.receiver_slots = AdapterSlots(manager, self._receiver_device(True))
        return self.receiver_slots

    def _receiver_shadow(self, on_device: bool) -> Shadow:
        self._receiver_refuse_transformed()
        if self.receiver_shadow is None:
            self.receiver_shadow = Shadow(self._receiver_model(), self._receiver_device(on_device))
        return self.receiver_shadow

    def _receiver_merging(self, manifest: Manifest, load: LoadWhole) -> AbstractContextManager[Load]:
        """By the same merger for all versions, because it keeps what adapters are merged into."""
        self.receiver_merger = self.receiver_merger or Merger()
        return self.receiver_merger.merging(manifest, self._receiver_device(True), load)

    def _receiver_model(self) -> torch.nn.Module:
        return self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]

    def _receiver_device(self, on_device: bool) -> torch.device:
        return self.device if on_device else torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]

    def _receiver_worker(self, replica: str) -> ReceivingWorker:
        parallel = self.parallel_config  # pyright: ignore[reportAttributeAccessIssue]
        # Not data_parallel_rank: vLLM sets that to 0 in every engine of a dense model.
        index = parallel.data_parallel_index * parallel.world_size + self.rank  # pyright: ignore
        return ReceivingWorker(replica=replica, index=index, device=str(self._receiver_device(True)))


STAGE_WAIT_S = 0.005
"""How long the call that begins to stage waits for the end: a small model is staged in one call."""


class Place(Protocol):
    """Where a version waits beside the one that computes."""

    def swap_in(self) -> None:
        """Make it the one that computes."""


class Staging:
    """One version on its way into its place, in a thread of its own."""

    def __init__(
        self,
        manifest: Manifest,
        worker: ReceivingWorker,
        taking: Callable[[Manifest], AbstractContextManager[Load]],
        place: Place,
        stream: torch.cuda.Stream | None,
        before: "Staging | None",
    ):
        """`taking`: yields what loads into the place. `stream`: another one than the engine's; None on CPU. `before`:
        the staging of the last call, whose end this one waits for, since it may still write into the place after its
        transfer was given up."""

        def stage() -> int:
            if before is not None:
                wait([before.checksum])
            with torch.inference_mode(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                with taking(manifest) as load:
                    checksums = receive(manifest, worker, load)
                if stream is not None:
                    stream.synchronize()
            return combine(checksums)

        self.place = place
        self.global_steps = manifest.global_steps
        self.checksum = background.start("weight-staging", stage)
        wait([self.checksum], STAGE_WAIT_S)

    def result(self) -> int | None:
        if not self.checksum.done():
            return None
        if error := self.checksum.exception():
            raise RuntimeError(f"staging failed: {type(error).__name__}: {error}") from error
        return self.checksum.result()
