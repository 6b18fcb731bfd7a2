"""Tokens per second and model FLOPs utilisation of one FSDP rank on rows that are full of sequences end to end."""

import socket
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import Config, DType, Layout, RolloutConfig, TrainerConfig
from configs.trainer import GradientCheckpointing
from scripts.bench.common import write_line
from scripts.bench.gpu.models import Shape, build, shape_of
from scripts.bench.gpu.outcome import Setting
from trainer.batch import MicroBatch
from trainer.tokens import TokenSignals
from trainer.worker.model import Policy, prepared, shard
from trainer.worker.worker import TrainWorker

ROWS, LENGTH = 8, 2048
WARM_UPS, STEPS = 2, 5
WITHOUT_OPTIMIZER = "7b"
"""AdamW's moments and the master weights take 122 GB."""
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16, of the SXM modules (NVIDIA's data sheets)."""


def measure_trainer(shape_name: str, setting: Setting) -> dict[str, float]:
    shape, device = shape_of(shape_name, setting), setting.device
    rows, length = (2, 64) if setting.dry_run else (ROWS, LENGTH)
    config = trainer_config(rows * length, DType.float32 if setting.dry_run else DType.bfloat16)
    worker = RandomWorker(config=config, device=device, make_sender=no_sender, shape=shape)
    num_parameters = worker.setup("", rank=0, world_size=1, master=f"127.0.0.1:{free_port()}")
    write_line(f"{num_parameters / 1e9:.2f}B parameters on {device}")
    batch = full_batch(rows, length, shape.vocab_size)

    def step(number: int) -> None:
        if shape_name == WITHOUT_OPTIMIZER:
            worker.forward_backward(batch)
        else:
            worker.train_step((batch,), number)
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for number in range(WARM_UPS + STEPS):
        started = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - started)
        write_line(f"step {number}: {seconds[-1]:.2f} s")
    tokens_per_s = rows * length / median(seconds[WARM_UPS:])
    figures = {"parameters_b": num_parameters / 1e9, "tokens_per_s": tokens_per_s}
    if device == "cuda":
        figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak = peak_flops(torch.cuda.get_device_name())
        if peak is not None:
            figures["mfu"] = tokens_per_s * shape.flops_per_token(num_parameters, length) / peak
    return figures


class RandomWorker(TrainWorker):
    """Trains a model that is made on the device."""

    def __init__(self, *, shape: Shape, **arguments: Any):
        super().__init__(**arguments)
        self._shape = shape

    def _load_policy(self, model_path: str, mesh: DeviceMesh, *, trainable: bool) -> Policy:
        config = self._config
        causal_lm = build(self._shape, self._device_type, torch.float32)
        causal_lm = prepared(causal_lm, model_path, config.trainer)
        policy = Policy(causal_lm, config.rollout.temperature, attention=self._attention).requires_grad_(trainable)
        shard(policy, mesh, getattr(torch, config.trainer.dtype.value))
        return policy


def trainer_config(tokens: int, dtype: DType) -> Config:
    return Config(
        rollout=RolloutConfig(dtype=dtype),
        trainer=TrainerConfig(
            dtype=dtype,
            layout=Layout.packed,
            tokens_per_micro_batch=tokens,
            gradient_checkpointing=GradientCheckpointing.full,
        ),
    )


def full_batch(rows: int, length: int, vocab_size: int) -> MicroBatch:
    """`rows` sequences of `length` random tokens end to end: the first half of each is the prompt."""
    rng = np.random.default_rng(0)
    input_ids = rng.integers(5, vocab_size, rows * length)
    starts = np.repeat(np.arange(rows) * length, length)
    sources = (np.arange(length // 2 - 1, length - 1) + length * np.arange(rows)[:, None]).reshape(-1)
    of_sequence = (sources // length).astype(np.int32)
    count = len(sources)
    tokens = TokenSignals(
        targets=input_ids[sources + 1].astype(np.int32),
        trajectories=of_sequence,
        sequences=of_sequence,
        staleness=np.zeros(count, np.int32),
        steps_behind=np.zeros(count, np.int32),
        rollout_logprobs=np.full(count, -np.log(vocab_size), np.float32),
        advantages=rng.standard_normal(count).astype(np.float32),
        loss_weights=np.full(count, 1 / count, np.float32),
    )
    return MicroBatch(
        input_ids=input_ids[None],
        position_ids=(np.arange(rows * length) - starts)[None],
        last=(starts + length - 1)[None],
        rows=np.zeros(count, np.int64),
        sources=sources,
        index=np.arange(count),
        tokens=tokens,
    )


def peak_flops(device_name: str) -> float | None:
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def no_sender(*_: object) -> Any:
    """Nothing is published."""
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
