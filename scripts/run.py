"""One run: starts what it needs in the order that overlaps the most, trains, and ends everything."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs.deadline import within
from configs.schema import Config, ModelKind, Staging
from rollout.agent_loop import AgentLoop
from rollout.agent_worker_group import AgentWorkerGroup
from rollout.buffer import make_buffer
from rollout.engines.base import EngineSpec
from rollout.evaluation import Evaluator, InService, OnLost
from rollout.fleet import ReplicaFleet
from rollout.fleet_monitor import FleetMonitor
from rollout.fleet_operator import FleetOperator
from rollout.http.controlled import FleetControl
from rollout.http.gateway import gateway_app
from rollout.http.server import listen, served, url_of
from rollout.pinned_evaluation import PinnedEvaluator
from rollout.progress import Progress
from rollout.prompts import EncodedRow, PromptStream, Row, as_prompt
from rollout.replica_group import ReplicaActor, ReplicaHandle, create_replicas
from rollout.rewards.budget import FailureBudget, failure_budget, group_budget
from rollout.rollouter import Rollouter
from rollout.router import ReplicaRouter
from rollout.types import SamplingParams
from scripts import models
from scripts.cluster import cluster, output_to
from scripts.data import encode_rows, load_rows
from scripts.elastic import ReplicaStarter, fleet_socket, make_fleet, make_monitor_and_operator
from scripts.supervision import until_first_ends
from scripts.workers import make_checkpointer, make_workers, owner
from trainer.checkpoint_store import CheckpointStore
from trainer.console import Console
from trainer.loop import TrainLoop
from trainer.recorder import RunRecorder
from trainer.recovering_workers import RecoveringUpdater, RecoveringWorkers
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.registry import release_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of, all of it started."""

    replicas: list[ReplicaHandle]
    router: ReplicaRouter
    fleet: ReplicaFleet
    monitor: FleetMonitor
    operator: FleetOperator
    agents: AgentWorkerGroup
    workers: RecoveringWorkers
    store: CheckpointStore
    train_rows: list[EncodedRow]
    val_rows: list[EncodedRow]
    manager: CheckpointManager


async def run(config: Config, device: str, run_dir: Path, console: Console, recorder: RunRecorder) -> dict[str, Any]:
    """Returns the summary. Whatever goes wrong anywhere is raised here, after everything has been ended."""
    rows = load_rows(config)  # a malformed row is an error before anything starts
    listener = listen(config.serve.host, config.serve.port) if config.serve.enabled else None
    console.stage("starting Ray")
    async with cluster(config, device):
        try:
            parts = await start(config, device, run_dir, rows, console)
            async with fleet_socket(parts.operator, run_dir):
                if listener is None:
                    return await train(config, parts, console, recorder)
                control = gateway_app(FleetControl(parts.fleet, parts.router), None, config.serve.token)
                async with served(control, listener):
                    console.message(f"control routes: {url_of(listener)}")
                    return await train(config, parts, console, recorder)
        finally:
            release_all(config.weight_sync, owner(run_dir))


async def start(
    config: Config,
    device: str,
    run_dir: Path,
    rows: tuple[list[Row], list[Row]],
    console: Console,
    actor_class: type[ReplicaActor] = ReplicaActor,
    agent_loop: AgentLoop | None = None,
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
        replicas=replicas,
        on_start=on_start,
        agent_loop=agent_loop,
    )
    store = CheckpointStore(run_dir / "checkpoints")
    workers = make_workers(config, device, run_dir, store, console)
    console.stage(f"starting {config.rollout.num_replicas} replica(s) and {config.trainer.num_ranks} train worker(s)")
    deadline = within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas and train workers")
    async with deadline, asyncio.TaskGroup() as starting:
        for replica in replicas:
            starting.create_task(replica.start(spec, config.weight_sync))
        policy = starting.create_task(_start_workers(config, workers, boot_path, console))
        data = starting.create_task(_encode(config, agents, rows, console))
    console.message(f"policy: {policy.result() / 1e6:.2f}M parameters; {device}; run folder {run_dir}")
    train_rows, val_rows = data.result()
    fleet, router = make_fleet(config, replicas, console.message)
    manager = CheckpointManager(workers, fleet, config.weight_sync)
    starter = ReplicaStarter(config, spec, agents, on_start, actor_class, console.message)
    monitor, operator = make_monitor_and_operator(config, fleet, router, manager, starter)
    return Parts(
        monitor=monitor,
        operator=operator,
        router=router,
        replicas=replicas,
        agents=agents,
        workers=workers,
        store=store,
        train_rows=train_rows,
        val_rows=val_rows,
        fleet=fleet,
        manager=manager,
    )


async def train(config: Config, parts: Parts, console: Console, recorder: RunRecorder) -> dict[str, Any]:
    """Evaluates, trains with rollouts, trainer and updates all running at once, evaluates again."""
    rollout, trainer, algorithm, fleet = config.rollout, config.trainer, config.algorithm, parts.fleet
    failures = failure_budget(config)
    group_failures = group_budget(config)
    buffer = make_buffer(config, failures, group_failures)
    rollouter = Rollouter(
        stream=PromptStream(parts.train_rows, config.seed),
        buffer=buffer,
        router=parts.router,
        runner=parts.agents,
        sampling=training_sampling(config),
        group_size=algorithm.group_size,
        group_timeout_s=rollout.group_timeout_s,
        on_lost=fleet.lose,
        progress=Progress(),
        failures=group_failures,
    )
    manager = RecoveringUpdater(parts.manager, parts.workers)
    evaluator = make_evaluator(config, parts.val_rows, parts.router, parts.agents, failures, fleet.lose)
    beside = PinnedEvaluator(evaluator, fleet, parts.manager, config.evaluation.replicas, console.message)
    checkpointer = make_checkpointer(config, parts.store, parts.workers, {}, console)
    loop = TrainLoop(
        config=config,
        buffer=buffer,
        workers=parts.workers,
        manager=manager,
        held_out=beside,
        fleet=fleet,
        recorder=recorder,
        checkpointer=checkpointer,
    )
    console.stage("evaluating before the first step")
    await manager.update_weights(0)
    recorder.record_evaluation(0, await evaluator.evaluate())
    console.stage("training")
    async with checkpointer:
        await until_first_ends(loop.run(), beside=[rollouter.run(), parts.monitor.run(), parts.operator.run()])
    console.stage("evaluating after the last step")
    recorder.record_evaluation(trainer.total_steps, await evaluator.evaluate())
    totals = await fleet.totals()
    return recorder.write_summary(
        {
            "trajectories_started": rollouter.counters["trajectories_started"],
            "evaluation_requests": evaluator.num_requests,
            "engine_requests": int(totals["engine_requests"]) - evaluator.num_requests,
            "aborted": int(totals["aborted"]),
            "restarted": int(totals["engine_requests"] - totals["trajectories"] - totals["continued"])
            + rollouter.counters["restarted"],
            "moved": rollouter.counters["moved"],
            "failed_groups": len(group_failures.failed),
            "continued": int(totals["continued"]),
            "max_staleness": rollout.max_staleness,
        }
    )


def training_sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_response_tokens,
        seed=config.seed if rollout.seeded_sampling else None,
    )


def make_evaluator(
    config: Config,
    rows: Sequence[EncodedRow],
    replicas: InService,
    agents: AgentWorkerGroup,
    failures: FailureBudget,
    on_lost: OnLost,
) -> Evaluator:
    evaluation = config.evaluation
    return Evaluator(
        prompts=[as_prompt(row, ordinal) for ordinal, row in enumerate(rows)],
        replicas=replicas,
        runner=agents,
        sampling=SamplingParams(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            max_tokens=config.rollout.max_response_tokens,
            seed=config.seed if config.rollout.seeded_sampling and evaluation.temperature > 0 else None,
        ),
        num_samples=evaluation.samples,
        timeout_s=evaluation.timeout_s,
        failures=failures,
        on_lost=on_lost,
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
        enforce_eager=rollout.enforce_eager,
        staging_on_device=config.weight_sync.staging is Staging.device,
    )


async def boot_model(config: Config, run_dir: Path) -> str:
    """What engines start on: the policy itself, or, of the tiny model, one of the same shape."""
    if config.model.kind is ModelKind.hf:
        assert config.model.path is not None
        return config.model.path
    make = ray.remote(num_cpus=1)(models.untrained_tiny_model)
    return await make.remote(config, run_dir / "untrained_model")


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


async def _start_workers(config: Config, workers: RecoveringWorkers, boot_path: str, console: Console) -> int:
    return await workers.setup(await policy_model(config, boot_path, console))


async def _encode(
    config: Config, agents: AgentWorkerGroup, rows: tuple[list[Row], list[Row]], console: Console
) -> tuple[list[EncodedRow], list[EncodedRow]]:
    train, val = rows
    return (
        await encode_rows(config, agents, "train", train, console),
        await encode_rows(config, agents, "held-out", val, console),
    )
