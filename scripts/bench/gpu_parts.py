"""The parts of the check for one GPU: each takes the setting, measures in its own process, and returns its figures."""

import asyncio
import gc
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils.logging import disable_progress_bar

from configs.checks.vllm_transport import built_in_backends
from configs.runtime.environment import REPO_ROOT
from configs.schema import (
    AttentionKind,
    Config,
    DType,
    Layout,
    RolloutConfig,
    Staging,
    TrainerConfig,
    Transport,
    WeightSyncConfig,
)
from configs.trainer import GradientCheckpointing
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench import trainer, tree
from scripts.bench.common import COIN_REWARD, peak_host_bytes, train
from scripts.bench.harness import Figures, Runs, progress, take_turns
from scripts.bench.models import ON_CPU, SHAPES, Shape, build, write_config
from scripts.bench.updates import (
    GRAPHS_ONLY,
    Arm,
    Host,
    Memcpy,
    Publisher,
    build_sender,
    compare,
    make_adapter,
    model_weights,
    random_engine,
)
from scripts.plan.rehearsal.rehearsal import make_group
from trainer.batch import MicroBatch, assemble
from trainer.tokens import sampled_tokens
from trainer.worker.attention.attention import Attention
from trainer.worker.loading import allocate, open_causal_lm
from trainer.worker.model import Policy, decoder_layers, prepared, shard
from trainer.worker.worker import TrainWorker
from weight_sync.transports.cleanup import DIRECTORY, release_all

if TYPE_CHECKING:  # imports vLLM, whose environment variables must be set before
    from scripts.bench.timed_engine import TimedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    folder: Path
    """The folder of the whole check. A part may make a folder of its own name in it."""
    dry_run: bool
    """Small sizes on the CPU, to see that the code runs. The figures say nothing."""

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry_run else torch.bfloat16

    def shape(self, name: str) -> Shape:
        return ON_CPU if self.dry_run else SHAPES[name]

    def synchronize(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()


# -- tests/gpu ---------------------------------------------------------------------------------------------------------

COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run_gpu_tests(setting: Setting, folder: str) -> Figures:
    """Return the counts of outcomes of the tests of a folder of tests/gpu. Raises RuntimeError when one failed, or none
    was found. On a CPU all are skipped."""
    # Without the conftest and pytest's plugins, whose needs a machine may lack.
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/gpu/{folder}",
        "-q",
        "-rs",
        "--noconftest",
        "--disable-plugin-autoload",
    ]
    done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    progress(done.stdout + done.stderr)
    if done.returncode != 0:
        raise RuntimeError(f"pytest ended with exit code {done.returncode}")
    return {outcome: float(number) for number, outcome in COUNT.findall(done.stdout.splitlines()[-1])}


# -- updates of a vLLM engine ------------------------------------------------------------------------------------------

ROUNDS = 3
SEQ_TOKENS = 3072
RANK, ADAPTER = 32, "adapter"
SETTLE_S = 1.5
"""The seconds in which all requests run undisturbed around the updates of an arm, all rounds together."""
UPDATE_FIGURES = ("pause_ms", "over_floor", "gb_per_s", "update_ms", "sent_mb")


def measure_updates(setting: Setting, size: str, *, with_adapter: bool = False) -> Figures:
    """Return the figures of both stagings. Raises RuntimeError where a token carries a version that it cannot have.

    Args:
        with_adapter: Staged in host memory over one transport only, and by turns with updates of an adapter.
    """
    shape, device, owner = setting.shape(size), setting.device, f"gpu-check-{os.getpid()}"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    weights = model_weights(build(shape, device, setting.dtype))
    progress(f"{weights.nbytes / 1e9:.2f} GB of weights on {device}")
    transports = usable_transports(weights.nbytes, device)[: 1 if with_adapter else None]
    # The same for both engines: memory that a process has mapped which then ended may never be given back.
    publishers = {each.value: (each, Publisher(weights, build_sender(each, owner, device))) for each in transports}
    if with_adapter:
        sender = build_sender(transports[0], owner, device)
        publishers[ADAPTER] = (transports[0], Publisher(weights, sender, make_adapter(weights, RANK)))

    async def measure(staging: Staging) -> Runs:
        floor, on_device = Memcpy(weights.nbytes, device, from_host=staging is Staging.host), staging is Staging.device
        async with random_engine(shape, device, seq_tokens=SEQ_TOKENS, staging_on_device=on_device) as engine:
            host = Host(engine=engine, seq_tokens=SEQ_TOKENS, nbytes=weights.nbytes, settle_s=SETTLE_S)
            arms = {name: Arm(host, publisher, each, staging) for name, (each, publisher) in publishers.items()}
            return await compare(host, arms, floor, rounds=ROUNDS, repeats=1)

    figures: dict[str, float] = {"weights_gb": weights.nbytes / 1e9}
    try:
        for staging in (Staging.host,) if with_adapter else (Staging.host, Staging.device):
            progress(f"starting vLLM, staging in {staging.value} memory")
            runs = asyncio.run(measure(staging))
            for name in publishers:
                prefix = f"{staging.value}_{name}"
                figures |= {f"{prefix}_{figure}": runs.median(figure, name) for figure in UPDATE_FIGURES}
            any_arm = transports[0].value
            figures[f"{staging.value}_floor_ms"] = runs.median("floor_ms", any_arm)
            figures["tokens_per_s"] = runs.median("tokens_per_s", any_arm)
            if with_adapter:
                figures["adapter_pause_over_full"] = runs.ratio("pause_ms", ADAPTER, over=any_arm)
    finally:
        release_all(WeightSyncConfig(), owner)
    return figures


def measure_adapter(setting: Setting, size: str) -> Figures:
    """Compare updates of an adapter with updates of all weights."""
    return measure_updates(setting, size, with_adapter=True)


def usable_transports(nbytes: int, device: str) -> list[Transport]:
    """Return the transports that connect a trainer and a replica on one GPU."""
    transports = [Transport.cuda_ipc] if device == "cuda" else []
    free = shutil.disk_usage(DIRECTORY).free
    if free > nbytes:
        return [*transports, Transport.shared_memory]
    progress(f"{DIRECTORY} has {free / 1e9:.1f} GB free: nothing over shared_memory")
    return transports


# -- drafts by n-grams -------------------------------------------------------------------------------------------------

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
NUM_DRAFTED, NUM_TOKENS = 8, 1024
"""Few requests at once: drafts pay where an engine is not busy with a batch, as at the tail of a step."""


def measure_speculation(setting: Setting, size: str) -> Figures:
    """Compare greedy answers of random weights, which repeat themselves, so that nearly all drafts are taken: an upper
    limit."""
    shape, num_tokens = setting.shape(size), 64 if setting.dry_run else NUM_TOKENS
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    changes: dict[str, Any] = {"enforce_eager": setting.dry_run}
    if not setting.dry_run:
        changes["engine_args"] = {"load_format": "dummy", "compilation_config": GRAPHS_ONLY}
    figures: dict[str, float] = {}
    for name, speculative in (("plain", None), ("ngram", NGRAM)):
        engine = random_engine(shape, setting.device, seq_tokens=SEQ_TOKENS, speculative=speculative, **changes)
        measured = asyncio.run(_generate(engine, num_tokens, has_drafts=speculative is not None))
        progress(f"{name}: {measured}")
        figures |= {f"{name}_{figure}": value for figure, value in measured.items()}
    return figures | {"ngram_over_plain": figures["ngram_tokens_per_s"] / figures["plain_tokens_per_s"]}


async def _generate(
    starting: AbstractAsyncContextManager["TimedEngine"], num_tokens: int, *, has_drafts: bool
) -> Figures:
    async with starting as engine:
        await engine.tag_loaded(0)
        for number in range(2):  # the first captures and compiles
            requests = [
                GenerationRequest(
                    request_id=RequestId(ordinal=number, episode=index),
                    prompt_ids=tuple(5 + (index + place) % 16 for place in range(64)),
                    sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
                )
                for index in range(NUM_DRAFTED)
            ]
            before, started = engine.gauges(), time.perf_counter()
            await asyncio.gather(*map(engine.generate, requests))
            figures = {"tokens_per_s": NUM_DRAFTED * num_tokens / (time.perf_counter() - started)}
            if has_drafts:
                after = engine.gauges()
                drafted, accepted = (after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
                figures["acceptance"] = accepted / max(1.0, drafted)
        return figures


# -- steps of the trainer ----------------------------------------------------------------------------------------------

ROWS, LENGTH = 8, 2048
WARM_UPS, STEPS = 2, 5
WITHOUT_OPTIMIZER = "7b"
"""AdamW's moments and the master weights take 122 GB."""
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16, of the SXM modules (NVIDIA's data sheets)."""


def measure_trainer(setting: Setting, size: str) -> Figures:
    """Measure one FSDP rank on rows that are full of sequences end to end."""
    shape, dtype = setting.shape(size), DType.float32 if setting.dry_run else DType.bfloat16
    rows, length = (2, 64) if setting.dry_run else (ROWS, LENGTH)
    config = Config(
        rollout=RolloutConfig(dtype=dtype),
        trainer=TrainerConfig(
            dtype=dtype,
            layout=Layout.packed,
            tokens_per_micro_batch=rows * length,
            gradient_checkpointing=GradientCheckpointing.full,
        ),
    )
    worker = RandomWorker(config=config, device=setting.device, make_sender=lambda *_: None, shape=shape)  # type: ignore
    num_parameters = worker.setup("", rank=0, world_size=1, master=f"127.0.0.1:{free_port()}")
    progress(f"{num_parameters / 1e9:.2f}B parameters on {setting.device}")
    batch, seconds = full_batch(rows, length), []
    for number in range(WARM_UPS + STEPS):
        started = time.perf_counter()
        if size == WITHOUT_OPTIMIZER:
            worker.forward_backward(batch)
        else:
            worker.train_step((batch,), number)
        setting.synchronize()
        seconds.append(time.perf_counter() - started)
        progress(f"step {number}: {seconds[-1]:.2f} s")
    tokens_per_s = rows * length / median(seconds[WARM_UPS:])
    figures = {"parameters_b": num_parameters / 1e9, "tokens_per_s": tokens_per_s}
    if not setting.dry_run:
        figures["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if (peak := peak_flops(torch.cuda.get_device_name())) is not None:
            figures["mfu"] = tokens_per_s * shape.flops_per_token(num_parameters, length) / peak
    return figures


class RandomWorker(TrainWorker):
    """Trains a model that is made on the device."""

    def __init__(self, *, shape: Shape, **arguments: Any):
        super().__init__(**arguments)
        self._shape = shape

    def model_files(self) -> dict[str, bytes]:
        return {}  # it comes from no folder, and is saved nowhere

    def _load_policy(self, model_path: str, mesh: DeviceMesh, *, trainable: bool) -> Policy:
        config = self._config
        causal_lm = prepared(build(self._shape, self._device_type, torch.float32), model_path, config.trainer)
        policy = Policy(causal_lm, config.rollout.temperature, attention=self._attention).requires_grad_(trainable)
        shard(policy, mesh, getattr(torch, config.trainer.dtype.value))
        return policy


def full_batch(rows: int, length: int) -> MicroBatch:
    """Return `rows` sequences of random tokens end to end, of each of which `length` are computed. The first half of
    each is the prompt."""
    groups = [make_group(ordinal, length // 2, length - length // 2 + 1, 1) for ordinal in range(rows)]
    signals, rng = sampled_tokens(groups, 0), np.random.default_rng(0)
    count = len(signals.targets)
    advantages = rng.standard_normal(count).astype(np.float32)
    signals = replace(signals, advantages=advantages, loss_weights=np.full(count, 1 / count, np.float32))
    [[batch]] = assemble(
        groups, signals, layout=Layout.packed, num_ranks=1, tokens_per_micro_batch=rows * length, keep_idle=True
    ).micro_batches
    return batch


def peak_flops(device_name: str) -> float | None:
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- attention ---------------------------------------------------------------------------------------------------------

SESSIONS, FEW_SESSIONS = tree.Shape(turns=8, group_size=8, turn_tokens=64), tree.Shape(turns=2, group_size=2)
"""Sessions of 2,048 tokens each, three quarters of them a prompt that all have; and of a dry run."""
KINDS = {
    Layout.tree: (AttentionKind.dense, AttentionKind.flex),
    Layout.packed: (AttentionKind.dense, AttentionKind.flex, AttentionKind.varlen),
}
TOLERANCE = 0.05
"""The largest mean difference of logprobs, as a share of their standard deviation, as in trainer/worker/parity.py."""


def measure_attention(setting: Setting, size: str) -> Figures:
    """Compare speed, logprobs and a gradient with dense attention. Raises RuntimeError where logprobs differ."""
    causal_lm = build(setting.shape(size), setting.device, setting.dtype)
    figures: dict[str, float] = {}
    for layout, kinds in KINDS.items():
        groups = [tree.make_group(FEW_SESSIONS if setting.dry_run else SESSIONS, "linear")]
        signals = sampled_tokens(groups, 0)
        step = assemble(groups, signals, layout=layout, num_ranks=1, tokens_per_micro_batch=2**20, keep_idle=True)
        batch = step.micro_batches[0][0]
        usable = [kind for kind in kinds if not (setting.dry_run and kind is AttentionKind.flex)]  # no gradients on CPU
        policies = {kind.value: Policy(causal_lm, 1.0, attention=Attention(kind, setting.device)) for kind in usable}
        compared = {"tokens": float(batch.input_ids.size)} | _compare_kinds(policies, batch, setting)
        figures |= {f"{layout.value}_{name}": value for name, value in compared.items()}
    return figures


def _compare_kinds(policies: Mapping[str, Policy], batch: MicroBatch, setting: Setting) -> dict[str, float]:
    logprobs, gradients = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def run(name: str, _: int) -> Figures:
        policy = policies[name]
        policy.zero_grad()
        started = time.perf_counter()
        logprobs[name], _ = policy(batch, torch.device(setting.device))
        logprobs[name].mean().backward()
        setting.synchronize()
        seconds = time.perf_counter() - started
        # The embedding's gradient: all layers lie after it.
        gradients[name] = policy.causal_lm.get_input_embeddings().weight.grad.float().clone()
        return {"ms": 1e3 * seconds}

    runs = asyncio.run(take_turns(run, list(policies), 5, warm_ups=2))
    figures: dict[str, float] = {}
    for name in policies:
        gap = (logprobs[name] - logprobs["dense"]).abs().mean().item()
        if not gap <= TOLERANCE * logprobs["dense"].std().item():
            raise RuntimeError(f"{name}: logprobs differ from those of dense attention by {gap:.3g} nats a token")
        compared = {
            "ms": runs.median("ms", name),
            "over_dense": runs.ratio("ms", "dense", over=name),
            "logprob_gap": gap,
            "gradient_gap": trainer.relative_gap(gradients[name], gradients["dense"]),
        }
        figures |= {f"{name}_{figure}": value for figure, value in compared.items()}
    return figures


# -- logprobs ----------------------------------------------------------------------------------------------------------

LARGE, SMALL = (
    trainer.Shape(tokens=16_384, vocabulary=151_936, hidden=1536),
    trainer.Shape(tokens=64, vocabulary=512, hidden=32),
)


def measure_logprobs(setting: Setting) -> Figures:
    """Compare forward and backward in fused chunks with checkpointed chunks."""
    shape = SMALL if setting.dry_run else LARGE
    timing = trainer.time_logprobs(shape, 5, device=setting.device, dtype=setting.dtype)
    runs, gap = asyncio.run(timing)
    figures = {f"{figure}_{name}": value for name in runs.by_arm for figure, value in runs.medians(name).items()}
    return figures | {"speedup": runs.ratio("seconds", "checkpointed", over="fused"), "gradient_gap": gap}


# -- loading -----------------------------------------------------------------------------------------------------------


def measure_loading(setting: Setting, size: str) -> Figures:
    """Measure how a rank reads its rows from safetensors files, as a train worker does: float32 masters of bfloat16
    files. Raises RuntimeError where the device held more than a layer besides the rows."""
    shape = setting.shape(size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    disable_progress_bar()
    with TemporaryDirectory(prefix="gpu_check-") as folder:
        write_config(shape, Path(folder), torch.bfloat16)
        build(shape, setting.device, torch.bfloat16).save_pretrained(folder, max_shard_size="2GB")
        if not setting.dry_run:
            gc.collect()  # models of transformers hold themselves
            torch.cuda.empty_cache()
        num_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        progress(f"{num_bytes / 1e9:.2f} GB of files")
        dist.init_process_group("gloo" if setting.dry_run else "nccl", rank=0, world_size=1)
        try:
            return _load(folder, num_bytes, setting)
        finally:
            dist.destroy_process_group()


def _load(folder: str, num_bytes: int, setting: Setting) -> Figures:
    host_before, started = peak_host_bytes(), time.perf_counter()
    causal_lm, read_into = open_causal_lm(folder)
    shard(causal_lm, init_device_mesh(setting.device, (1,), mesh_dim_names=("data_parallel",)), torch.bfloat16)
    if not setting.dry_run:
        torch.cuda.reset_peak_memory_stats()
    allocate(causal_lm, torch.device(setting.device))
    read_into(causal_lm)
    setting.synchronize()
    seconds = time.perf_counter() - started
    layer = max(sum(parameter.nbytes for parameter in each.parameters()) for each in decoder_layers(causal_lm))
    figures = {
        "seconds": seconds,
        "gb_per_s": num_bytes / seconds / 1e9,
        "host_peak_gb": (peak_host_bytes() - host_before) / 1e9,
        "layer_gb": layer / 1e9,
    }
    if not setting.dry_run:
        rows = torch.cuda.memory_allocated()
        extra = torch.cuda.max_memory_allocated() - rows
        figures |= {"device_rows_gb": rows / 1e9, "device_extra_gb": extra / 1e9}
        if extra > max(layer, *(parameter.nbytes for parameter in causal_lm.parameters())):
            raise RuntimeError(f"loading took {extra / 1e9:.2f} GB besides the rows: more than a layer")
    return figures


# -- whole runs of scripts.train ---------------------------------------------------------------------------------------

SHARED_GPU = (
    "device=cuda",
    "gpu_share=0.5",
    "rollout.kv_cache_mb=2048",
    "rollout.dtype=bfloat16",
    "weight_sync.transport=cuda_ipc",
)
"""Trainer and replica on one GPU. FlashAttention needs bfloat16, the tiny model's trainer stays in float32."""
DRY = ("device=cpu", "model=tiny", "model.warmup_steps=20", "data.num_val=16", "data.num_train=128")
ASYNCHRONY_JOB = (
    "model=tiny",
    "model.warmup_steps=0",
    "data.num_val=1",
    "trainer.eval_every=0",
    "rollout.max_response_tokens=256",
    f"rollout.reward={COIN_REWARD}",
)
"""Random weights end a response at about every 500th token: long-tailed, cut off at 256. Half of the rewards are 1."""
FIGURES = (
    "accuracy_before",
    "accuracy_after",
    "steps",
    "training_seconds",
    "trajectories",
    "samples_per_second",
    "spanning_trajectories",
    "pause_ms_p50",
    "pause_ms_p99",
    "max_token_staleness",
    "aborted",
    "restarted",
)
"""The keys of summary.json that are reported."""


def run_over_cuda_ipc(setting: Setting) -> Figures:
    """Train a short run of the tiny model whose replica maps the trainer's memory; over shared memory on a CPU."""
    return _run_tiny(setting, "shared_gpu", ())


def run_over_vllm_ipc(setting: Setting) -> Figures:
    """Train a short run of the tiny model whose weights travel by vLLM's own `ipc` while the replica is paused; over
    shared memory on a CPU. Its pauses compare with those of `run_over_cuda_ipc`."""
    _, sending = built_in_backends() or ((), ())
    if not setting.dry_run and "ipc" not in sending:
        progress("this version of vLLM has no trainer's half of ipc: nothing is run")
        return {}
    transport = () if setting.dry_run else ("weight_sync.transport=vllm:ipc",)
    return _run_tiny(setting, "shared_gpu_vllm", (*transport, "weight_sync.staging=none"))


def _run_tiny(setting: Setting, name: str, overrides: Sequence[str]) -> Figures:
    job = () if setting.dry_run else ("model=tiny", "trainer.total_steps=10", "model.warmup_steps=100")
    return run_training(setting, name, [*job, *overrides, "trainer.eval_every=0"])


def run_default_recipe(setting: Setting) -> Figures:
    return run_training(setting, "recipe", ["trainer.eval_every=0"] if setting.dry_run else [])


def compare_staleness(setting: Setting) -> Figures:
    """Train the same job twice, with max_staleness 0 and 2."""
    rates = {}
    for staleness in (0, 2):
        overrides = [*ASYNCHRONY_JOB, "trainer.total_steps=16", f"rollout.max_staleness={staleness}"]
        rates[staleness] = run_training(setting, f"asynchrony-{staleness}", overrides)["samples_per_second"]
    return {
        "sync_samples_per_s": rates[0],
        "async_samples_per_s": rates[2],
        "async_over_sync": rates[2] / rates[0],
    }


def run_training(setting: Setting, name: str, overrides: Sequence[str]) -> dict[str, float]:
    """Run a short training, and return the figures of its summary.json."""
    # A folder of its own for every call, because one before may have failed.
    run_dir = setting.folder / name / f"run-{time.strftime('%H%M%S')}"
    where = [*DRY, *overrides, "trainer.total_steps=2"] if setting.dry_run else [*SHARED_GPU, *overrides]
    summary = train(run_dir, where)
    return {figure: float(summary[figure]) for figure in FIGURES}
