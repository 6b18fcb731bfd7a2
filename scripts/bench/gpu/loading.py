"""Loading a model of random weights from safetensors files, as a train worker does."""

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.utils.logging import disable_progress_bar

from scripts.bench.common import peak_host_bytes, write_line
from scripts.bench.gpu.models import Shape, build, shape_of, write_config
from scripts.bench.gpu.outcome import Setting
from scripts.bench.gpu.trainer_step import free_port
from trainer.worker.loading import allocate, open_causal_lm
from trainer.worker.model import decoder_layers, shard


def measure_loading(shape_name: str, setting: Setting) -> dict[str, float]:
    """Seconds, and what is held besides this rank's rows. Raises RuntimeError where that is more than a layer.

    Masters are float32 and files are bfloat16, as for a model of that size.
    """
    shape, device = shape_of(shape_name, setting), torch.device(setting.device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with TemporaryDirectory(prefix="gpu_check-") as folder:
        num_bytes = write_model(shape, Path(folder), setting.device)
        write_line(f"{num_bytes / 1e9:.2f} GB of files")
        dist.init_process_group("nccl" if setting.device == "cuda" else "gloo", rank=0, world_size=1)
        try:
            return _load(folder, num_bytes, device)
        finally:
            dist.destroy_process_group()


def write_model(shape: Shape, folder: Path, device: str) -> int:
    """Write a Hugging Face folder of random bfloat16 weights. Returns the bytes of its files."""
    disable_progress_bar()
    write_config(shape, folder, torch.bfloat16)
    model = build(shape, device, torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _load(folder: str, num_bytes: int, device: torch.device) -> dict[str, float]:
    host_before, started = peak_host_bytes(), time.perf_counter()
    causal_lm, weights = open_causal_lm(folder)
    shard(causal_lm, init_device_mesh(device.type, (1,), mesh_dim_names=("data_parallel",)), torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    allocate(causal_lm, device)
    weights.read_into(causal_lm)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    layer = max(sum(parameter.nbytes for parameter in one.parameters()) for one in decoder_layers(causal_lm))
    figures = {
        "seconds": seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "host_peak_gb": (peak_host_bytes() - host_before) / 1e9,
        "layer_gb": layer / 1e9,
    }
    if device.type == "cuda":
        rows = torch.cuda.memory_allocated()
        extra = torch.cuda.max_memory_allocated() - rows
        figures |= {"device_rows_gb": rows / 1e9, "device_extra_gb": extra / 1e9}
        largest = max(parameter.nbytes for parameter in causal_lm.parameters())
        if extra > max(layer, largest):
            raise RuntimeError(f"loading took {extra / 1e9:.2f} GB besides the rows: more than a layer")
    return figures
