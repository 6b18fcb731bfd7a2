"""The worker-side half of a weight update: vLLM mixes this class into every worker (`worker_extension_cls`).

Runs inside vLLM's worker process. Importing it changes what has to be changed on a CPU (vllm_on_cpu.py).
"""

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from configs.schema import Transport
from configs.weight_forms import LATENT_ATTENTION
from weight_sync import background
from weight_sync.protocol import Load, Manifest, ReceivingWorker, combine
from weight_sync.receiver import quantized
from weight_sync.receiver.file_names import FileNames
from weight_sync.receiver.merge import LoadWhole, Merger
from weight_sync.receiver.samples import shortened
from weight_sync.receiver.shadow import Rename, Shadow, load_weights
from weight_sync.receiver.slots import LIVE, AdapterSlots
from weight_sync.receiver.vllm_native import NativeReceiver
from weight_sync.transports.registry import receive

if current_platform.is_cpu():
    from weight_sync.receiver.vllm_on_cpu import change_vllm  # it imports what a GPU's workers need not have

    change_vllm()


logger = logging.getLogger(__name__)
MOE_BACKENDS_THAT_KEEP_WEIGHTS = ("TRITON", "BATCHED_TRITON", "CPU")
"""CPU is among them as `change_vllm` has changed it."""
UNTESTED_NATIVE = "vLLM's own weight transfer is untested with experts and with multi-head latent attention"
SINKS = "_sinks_source"
"""The attribute of an attention backend that computes with a copy of a layer's sinks."""
ABSORBED = {"W_UK_T", "W_UV"}
"""The parameters that vLLM makes of `kv_b_proj` after loading, for the decode of multi-head latent attention. Kernels
with other ones (AMX, fp8 on ROCm, query replication) keep more than updates write."""


def absorb(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Compute W_UK_T and W_UV in place from the kv_b_proj that was loaded, by each attention's own code. That code also
    resets the scales of its KV cache, which belong to the engine that computes: it gets copies of them."""
    for attention in model.modules():
        if isinstance(attention, MLAAttention):
            shared: Any = copy.copy(attention)  # with the same parameters
            shared.__dict__["_buffers"] = {name: copy.deepcopy(buffer) for name, buffer in attention._buffers.items()}
            shared.process_weights_after_loading(dtype)


class WeightReceiver:
    """Stages and swaps. Method names must not clash with those of vLLM's worker, hence the prefix.

    Example, as the engine calls it on every worker, by `receiver_call`:
        receiver_stage(manifest, "replica-0", False)   # begins to receive into the shadow, while the engine generates
        receiver_staged()                              # None until all has come, then its checksum
        receiver_swap(7)                               # while paused: the shadow over the live parameters
    """

    receiver_shadow: Shadow | None = None
    receiver_slots: AdapterSlots | None = None
    receiver_merger: Merger | None = None
    receiver_names: FileNames | None = None
    receiver_native: NativeReceiver | None = None
    receiver_staging: "Staging | None" = None
    receiver_tensors: frozenset[str] = frozenset()
    """The names of the tensors of the last version: a later one has them too."""
    receiver_stream: torch.cuda.Stream | None = None
    """The same for all versions, because memory that was freed on one stream is not used again on another."""

    def receiver_call(self, method: str, *args: Any) -> tuple[Any, str | None]:
        """Call a method, and return its result, or the error in place of it. vLLM's executor of several workers reads
        their answers up to the first failure, and would take the rest for the answers to its next calls."""
        try:
            return getattr(self, method)(*args), None
        except Exception as error:
            logger.exception("%s failed", method)
            return None, f"{type(error).__name__}: {error}"

    def receiver_open_slots(self) -> int:
        """Open the slots of an engine that serves adapters. Returns the id of the one that its requests have to
        name."""
        self._receiver_slots()
        return LIVE

    def receiver_stage(self, pickled: bytes, replica: str, on_device: bool) -> None:
        """Receives in a thread: this call must not keep the engine from its steps."""
        manifest, worker = self._receiver_manifest(pickled), self._receiver_worker(replica)
        if self._receiver_serves_adapters():
            place, taking = self._receiver_slots(), self._receiver_slots().taking
        else:
            place = shadow = self._receiver_shadow(on_device)

            def taking(manifest: Manifest) -> AbstractContextManager[Load]:
                return self._receiver_merging(manifest, partial(shadow.load, constants=manifest.constants))

        if self.receiver_stream is None and self._receiver_device(True).type == "cuda":
            torch.cuda.synchronize()  # the copies are made on the engine's stream, and staged over on another
            self.receiver_stream = torch.cuda.Stream()
        before, stream = self.receiver_staging, self.receiver_stream
        self.receiver_staging = Staging(manifest, worker, taking, place, stream, before)

    def receiver_staged(self) -> int | None:
        """Return the checksum of what was staged, None while it is still received. Raises what went wrong."""
        assert self.receiver_staging is not None
        try:
            return self.receiver_staging.result()
        except RuntimeError:
            self.receiver_staging = None
            raise

    def receiver_swap(self, global_steps: int) -> tuple[int, int]:
        """While paused: copies the staged weights over the live ones. Returns (global_steps, checksum). RuntimeError
        when others are live then, which are named."""
        staging = self.receiver_staging
        checksum = None if staging is None else staging.result()
        staged = None if staging is None or checksum is None else staging.global_steps
        if checksum is None or staged != global_steps:
            raise RuntimeError(f"cannot swap in version {global_steps}: staged is {staged}")
        assert staging is not None
        self.receiver_staging = None
        with torch.inference_mode():
            staging.place.swap_in()
            staging.place.require_live()
            self._receiver_refresh_sinks()
        return self._receiver_done(global_steps, checksum)

    def receiver_load(self, pickled: bytes, replica: str) -> tuple[int, int]:
        """While paused: receives straight into the live parameters. Returns (global_steps, checksum)."""
        manifest, worker = self._receiver_manifest(pickled), self._receiver_worker(replica)
        if manifest.transport == Transport.vllm.value:
            self._receiver_refuse_transformed()
            self.receiver_native = self.receiver_native or NativeReceiver(self)
            return self._receiver_done(manifest.global_steps, combine(self.receiver_native.receive(manifest, worker)))
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():  # pyright: ignore
            if self._receiver_serves_adapters():
                with self._receiver_slots().taking(manifest) as load:
                    checksums = receive(manifest, worker, load)
                self._receiver_slots().swap_in()
                self._receiver_slots().require_live()
            else:
                self._receiver_refuse_transformed()
                if self.vllm_config.model_config.quantization is not None:  # pyright: ignore
                    raise RuntimeError("weight_sync.staging=none: quantized weights are made in a shadow")
                model = self._receiver_model()
                rename = self._receiver_rename()

                def load_whole(tensors: Iterable[tuple[str, torch.Tensor]], num_tensors: int) -> None:
                    load_weights(model, tensors, num_tensors, rename, self._receiver_finish)

                with self._receiver_merging(manifest, load_whole) as load:
                    checksums = receive(manifest, worker, load)
                self._receiver_refresh_sinks()
        return self._receiver_done(manifest.global_steps, combine(checksums))

    def _receiver_manifest(self, pickled: bytes) -> Manifest:
        """Return the manifest. RuntimeError when a tensor is missing that the version before had: its values would stay
        behind, and no checksum would differ."""
        manifest: Manifest = pickle.loads(pickled)
        if manifest.adapter is not None:  # a layer without factors has none from then on
            return manifest
        names = frozenset(entry.name for entry in manifest.tensors)
        if missing := sorted(self.receiver_tensors - names):
            raise RuntimeError(f"version {manifest.global_steps} lacks tensors of the one before: {shortened(missing)}")
        self.receiver_tensors = names
        return manifest

    def _receiver_done(self, global_steps: int, checksum: int) -> tuple[int, int]:
        if self._receiver_device(True).type == "cuda":
            torch.cuda.synchronize()
        return global_steps, checksum

    def receiver_refusal(self) -> str | None:
        """Return why updates cannot reach the weights of this engine: it keeps them in another form than it loads, so
        that copies would be wrong. None where they can, and where it takes adapters only."""
        if self._receiver_serves_adapters():
            return None
        model = self.vllm_config.model_config  # pyright: ignore[reportAttributeAccessIssue]
        if model.quantization is not None:
            if model.use_mla:
                return f"updates of multi-head latent attention with quantization={model.quantization} are untested"
            if (reason := quantized.refusal(self._receiver_model())) is not None:
                return reason
        if model.use_mla and (kind := model.hf_text_config.model_type) not in LATENT_ATTENTION:
            allowed = ", ".join(sorted(LATENT_ATTENTION))
            return f"updates of the multi-head latent attention of {kind} are untested: they are for {allowed}"
        for module in self._receiver_model().modules():
            if self._receiver_is_native() and isinstance(module, MLAAttention | UnquantizedFusedMoEMethod):
                return f"{UNTESTED_NATIVE}: other values of weight_sync.transport can"
            if isinstance(module, MLAAttention) and set(module._parameters) != ABSORBED:
                what = f"latent attention cannot be updated as {type(module.impl).__name__} keeps its weights"
                return f"{what}: leave rollout.engine_args.attention_backend out, or name another one"
            if "_cpu_unpacked_conv_weight" in vars(module):
                what = f"convolutions of {type(module).__name__} cannot be updated in {model.dtype} on this processor"
                return f"{what}, for which vLLM packs their weights: set rollout.dtype=float32"
            if isinstance(module, UnquantizedFusedMoEMethod):
                backend = module.unquantized_backend.name
                if backend not in MOE_BACKENDS_THAT_KEEP_WEIGHTS:
                    what = f"experts cannot be updated with vLLM's MoE backend {backend}: it transforms their weights"
                    return f"{what}: set rollout.engine_args.moe_backend=triton, which does not"
        return None

    def _receiver_refuse_transformed(self) -> None:
        if (reason := self.receiver_refusal()) is not None:
            raise RuntimeError(reason)

    def _receiver_rename(self) -> Rename:
        """Return the function that renames weights to their names in files, for which vLLM's loaders are made. Only a
        mixture of experts has other names in the trainer."""
        if not any(isinstance(module, UnquantizedFusedMoEMethod) for module in self._receiver_model().modules()):
            return iter
        if self.receiver_names is None:
            self.receiver_names = FileNames.of_model(self.vllm_config.model_config.model)  # pyright: ignore
        return self.receiver_names.reverted

    def _receiver_finish(self, model: torch.nn.Module) -> None:
        absorb(model, self.vllm_config.model_config.dtype)  # pyright: ignore[reportAttributeAccessIssue]

    def _receiver_refresh_sinks(self) -> None:
        """Copy attention sinks once more where a backend computes with a copy of them (FlashInfer's, in float32)."""
        for module in self._receiver_model().modules():
            implementation: Any = vars(module).get("impl")
            if getattr(implementation, SINKS, None) is not None:
                implementation.process_weights_after_loading(self.vllm_config.model_config.dtype)  # pyright: ignore

    def _receiver_is_native(self) -> bool:
        """Return whether a backend of vLLM brings the updates."""
        return self.vllm_config.weight_transfer_config is not None  # pyright: ignore[reportAttributeAccessIssue]

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
            device = self._receiver_device(on_device)
            self.receiver_shadow = Shadow(
                self._receiver_model(), device, self._receiver_rename(), self._receiver_finish, quantized.QUANTIZED
            )
        return self.receiver_shadow

    def _receiver_merging(self, manifest: Manifest, load: LoadWhole) -> AbstractContextManager[Load]:
        """Load by the same merger for all versions, because it keeps what adapters are merged into."""
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
"""The seconds for which the call that begins to stage waits for the end: a small model is staged in one call."""


class Staging:
    """One version on its way into its place, in a thread of its own."""

    def __init__(
        self,
        manifest: Manifest,
        worker: ReceivingWorker,
        taking: Callable[[Manifest], AbstractContextManager[Load]],
        place: Shadow | AdapterSlots,
        stream: torch.cuda.Stream | None,
        before: "Staging | None",
    ):
        """
        Args:
            taking: yields what loads into the place.
            place: holds the version beside the one that computes.
            stream: another one than the engine's; None on CPU.
            before: the staging of the last call, whose end this one waits for, since it may still write into the place
                after its transfer was given up.
        """

        def stage() -> int:
            if before is not None:
                wait([before.checksum])
            if stream is not None:
                torch.cuda.set_device(stream.device)  # of this thread, which would begin and end on the first GPU
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
