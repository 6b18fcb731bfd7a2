"""A backend of vLLM's weight transfer that needs no GPU, by files, and the plugin of vLLM that registers it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME, PLUGIN = "by_file", "tests_by_file"


@dataclass
class InitInfo(WeightTransferInitInfo):
    rank_offset: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str


@dataclass
class SenderInfo(TrainerInitInfo):
    backend: ClassVar[str] = NAME
    world_size: int


class Receiving(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Reloads layer by layer, as vLLM's `nccl` and `ipc` do."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.rank_offset < 1:
            raise ValueError("no rank of the trainer comes before")

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(load_file(update_info.path).items())  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class Sending(TrainerWeightTransferEngine[SenderInfo]):
    init_info_cls = SenderInfo
    spoils: ClassVar[str] = ""
    """The name of a tensor that arrives as zeros."""

    @classmethod
    def trainer_init(cls, init_info: SenderInfo, *, client: Any, source: Iterable[Any] | None = None) -> Self:
        assert init_info.world_size >= 2
        if init_info.is_sender:
            client.init_weight_transfer_engine({"rank_offset": 1})
        return cls(client=client, source=source, is_sender=init_info.is_sender)  # pyright: ignore[reportArgumentType]

    def send_weights(self) -> None:
        assert self.source is not None
        tensors = {name: tensor.clone() for name, tensor in self.source}
        if not self.is_sender:
            return
        if self.spoils:
            tensors[self.spoils].zero_()
        with TemporaryDirectory(prefix="by_file-") as folder:
            save_file(tensors, f"{folder}/weights.safetensors")
            self.client.start_weight_update()
            self.client.update_weights({"path": f"{folder}/weights.safetensors"})
            self.client.finish_weight_update()


def register() -> None:
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiving)
        WeightTransferTrainerFactory.register_engine(NAME, Sending)


def install_plugin(folder: Path) -> None:
    """Make a folder that, in sys.path, lets all processes of vLLM load the backend."""
    info = folder / "tests_by_file-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {register.__module__}:register\n")
