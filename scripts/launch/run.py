"""One run: starts what it needs in the order that overlaps the most, trains, and ends everything."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import ray

from configs.checkpoint import CHECKPOINTS, is_checkpoint
from configs.runtime.deadline import within
from configs.schema import Config, ModelKind, Staging
from configs.validate import ConfigError
from rollout.agents.loop import AgentLoop
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.engines.base import EngineSpec
from rollout.http.gateway import gateway_app
from rollout.http.server import listen, served, url_of
from rollout.prompts import EncodedRow, Row
from rollout.replica.replica_group import ReplicaActor, create_replicas
from scripts.export_hf import export, find_checkpoint
from scripts.launch import models
from scripts.launch.cluster import cluster, output_to
from scripts.launch.data import encode_rows, load_rows
from scripts.launch.elastic import ReplicaStarter, fleet_socket
from scripts.launch.healing import make_fleet, make_monitor_and_operator
from scripts.launch.parts import Parts
from scripts.launch.resume import Resumed
from scripts.launch.training import train
from scripts.launch.workers import make_workers, owner
from trainer.checkpoint.store import CheckpointError, CheckpointStore
from trainer.tracking.console import Console
from trainer.tracking.recorder import RunRecorder
from trainer.worker.recovery import RecoveringUpdater, RecoveringWorkers
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all


async def run(  # noqa: PLR0913
    config: Config,
    device: str,
    run_dir: Path,
    console: Console,
    recorder: RunRecorder,
    resumed: Resumed | None = None,
) -> dict[str, Any]:
    """Returns the summary. Whatever goes wrong anywhere is raised here, after everything has been ended."""
    rows = load_rows(config)  # a malformed row is an error before anything starts
    listener = listen(config.serve.host, config.serve.port) if config.serve.enabled else None
    release_all(config.weight_sync, owner(run_dir))  # what a killed process of this run left
    console.stage("starting Ray")
    async with cluster(config, device):
        try:
            parts = await start(config, device, run_dir, rows, console, resumed=resumed)
            async with fleet_socket(parts.operator, run_dir):
                if listener is None:
                    return await train(config, parts, console, recorder, resumed)
                control = gateway_app(parts.control, None, config.serve.token)
                async with served(control, listener):
                    console.message(f"control routes: {url_of(listener)}")
                    return await train(config, parts, console, recorder, resumed)
        finally:
            release_all(config.weight_sync, owner(run_dir))


async def start(  # noqa: PLR0913
    config: Config,
    device: str,
    run_dir: Path,
    rows: tuple[list[Row], list[Row]],
    console: Console,
    actor_class: type[ReplicaActor] = ReplicaActor,
    agent_loop: AgentLoop | None = None,
    resumed: Resumed | None = None,
) -> Parts:
    """Engines start on untrained weights while the warm-up makes the real ones, and the trainer loads beside them.

    `rows`: train and held-out.
    """
    on_start = output_to(run_dir)
    boot_path = await boot_model(config, run_dir)
    spec = engine_spec(config, device, boot_path)
    replicas = create_replicas(config.rollout.num_replicas, spec, on_start, actor_class)
    agents = AgentWorkerGroup(
        config=config,
        tokenizer_path=boot_path,
        replicas=[replica.client for replica in replicas],
        on_start=on_start,
        agent_loop=agent_loop,
    )
    store = CheckpointStore(run_dir / CHECKPOINTS)
    workers = make_workers(config, device, run_dir, store, console)
    console.stage(f"starting {config.rollout.num_replicas} replica(s) and {config.trainer.num_ranks} train worker(s)")
    deadline = within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas and train workers")
    async with deadline, asyncio.TaskGroup() as starting:
        for replica in replicas:
            starting.create_task(replica.start(spec, config.weight_sync))
        policy = starting.create_task(_start_workers(config, workers, boot_path, console, resumed))
        data = starting.create_task(_encode(config, agents, rows, console))
    console.message(f"policy: {policy.result() / 1e6:.2f}M parameters; {device}; run folder {run_dir}")
    train_rows, val_rows = data.result()
    fleet, control = make_fleet(config, replicas, console.message)
    manager = RecoveringUpdater(CheckpointManager(workers, fleet, config.weight_sync), workers)
    starter = ReplicaStarter(config, spec, agents, on_start, actor_class, console.message)
    monitor, operator = make_monitor_and_operator(config, fleet, control, manager, starter)
    return Parts(
        monitor=monitor,
        operator=operator,
        replicas=replicas,
        agents=agents,
        workers=workers,
        store=store,
        train_rows=train_rows,
        val_rows=val_rows,
        fleet=fleet,
        control=control,
        manager=manager,
    )


def engine_spec(config: Config, device: str, model_path: str) -> EngineSpec:
    rollout = config.rollout
    return EngineSpec(
        model_path=model_path,
        device=device,
        dtype=rollout.dtype.value,
        max_model_len=config.data.max_prompt_tokens + rollout.max_response_tokens,
        max_position_embeddings=config.model.max_position_embeddings,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=None if rollout.kv_cache_mb is None else rollout.kv_cache_mb * 2**20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_parallel_size,
        data_parallel_size=rollout.data_parallel_size,
        gpu_share=config.gpu_share,
        enforce_eager=rollout.enforce_eager,
        staging_on_device=config.weight_sync.staging is Staging.device,
        prefill_grace_s=config.weight_sync.prefill_grace_s,
    )


async def boot_model(config: Config, run_dir: Path) -> str:
    """What engines start on: the policy itself, or, of the tiny model, one of the same shape."""
    make, path = ray.remote(num_cpus=1)(models.untrained_tiny_model), run_dir / "untrained_model"
    if config.model.kind is ModelKind.hf:
        assert config.model.path is not None
        if not is_checkpoint(Path(config.model.path).expanduser()):
            return config.model.path
        make, path = ray.remote(num_cpus=1)(exported_model), run_dir / "exported_model"
    shutil.rmtree(path, ignore_errors=True)  # of the run that is resumed, and maybe half of one
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", f"making {path.name}"):
        return await make.remote(config, path)


def exported_model(config: Config, folder: Path) -> str:
    """A checkpoint of ours as transformers and vLLM load it. Raises ConfigError."""
    try:
        export(find_checkpoint(Path(config.model.path or "").expanduser()), folder, "float32")
    except CheckpointError as error:
        raise ConfigError(f"model.path={config.model.path}: {error}") from error
    return str(folder)


async def policy_model(config: Config, boot_path: str, console: Console) -> str:
    """What is trained, evaluated or served: of the tiny model, warmed up here."""
    policy_path = boot_path
    if config.model.kind is ModelKind.tiny and config.model.warmup_steps > 0:
        warm_up = ray.remote(num_cpus=1, num_returns="streaming")(models.warm_tiny_model)
        async for reference in warm_up.remote(config):  # pyright: ignore[reportGeneralTypeIssues]
            event = await reference
            if isinstance(event, str):
                policy_path = event
            else:
                console.stage(f"warm-up {event[0]}/{config.model.warmup_steps} loss {event[1]:.2f}")
    return policy_path


async def _start_workers(
    config: Config, workers: RecoveringWorkers, boot_path: str, console: Console, resumed: Resumed | None
) -> int:
    num_parameters = await workers.setup(await policy_model(config, boot_path, console))
    if resumed is not None:
        await workers.resume(resumed.checkpoint)
    return num_parameters


async def _encode(
    config: Config, agents: AgentWorkerGroup, rows: tuple[list[Row], list[Row]], console: Console
) -> tuple[list[EncodedRow], list[EncodedRow]]:
    train, val = rows
    return (
        await encode_rows(config, agents, "train", train, console),
        await encode_rows(config, agents, "held-out", val, console),
    )
