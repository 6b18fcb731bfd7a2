"""The teacher of a run: its model, its replicas, and what keeps them whole."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from configs.checkpoint import is_checkpoint
from configs.runtime.carried import as_raised, carries_errors
from configs.runtime.deadline import within
from configs.schema import Config
from configs.validate import ConfigError
from rollout.agents.worker_group import load_tokenizer
from rollout.engines.base import EngineSpec
from rollout.events.driver import DriverEvents
from rollout.events.kinds import Report
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import FleetKind, ReplicaFleet
from rollout.fleet.health import HealthMonitor
from rollout.fleet.monitor import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.replica.replica_group import ReplicaHandle, create_replica
from rollout.router import ReplicaRouter, max_inflight
from rollout.teacher.teacher import ScoreSequences, Teacher
from scripts.launch.models import exported, made
from scripts.launch.placement import Placement
from scripts.launch.replicas import start_replica
from trainer.tracking.console import Console

KIND = FleetKind(name="teacher", section="teacher")
VERSION = 0
"""Of its weights, which stay as they are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedTeacher:
    """Its replicas score, and are watched and replaced while `monitor` and `operator` run."""

    teacher: Teacher
    monitor: FleetMonitor
    operator: FleetOperator


async def start_teacher(
    config: Config,
    device: str,
    path: str | None,
    console: Console,
    *,
    placement: Placement,
    on_start: Callable[[str], Callable[[], None]],
    report: Report,
    events: DriverEvents,
) -> StartedTeacher | None:
    """`path`: of the teacher's model; None: there is none."""
    if path is None:
        return None
    spec = teacher_spec(config, device, path)
    create = partial(create_replica, spec=spec, on_start=on_start, tells_events=events.is_on)
    replicas = [create(f"{KIND.name}-{index}", group=group) for index, group in enumerate(placement.teachers)]

    async def load(replica: ReplicaHandle) -> None:
        with console.during(f"loading the teacher in {replica.name}"):
            await replica.start(spec, config.weight_sync)
            await replica.tag_loaded(VERSION)

    await asyncio.gather(*map(load, replicas))
    fleet = _fleet(config, replicas, report, events)
    clients: dict[str, ScoreSequences] = {replica.name: replica.client.score for replica in replicas}
    teacher = Teacher(fleet=fleet, timeout_s=config.teacher.timeout_s, replicas=clients, emit=events.emit)

    async def create_later(name: str) -> ReplicaHandle:
        return create(name, group=await placement.reserve_teacher())

    async def connect(replica: ReplicaHandle) -> None:
        await replica.tag_loaded(VERSION)
        teacher.replicas[replica.name] = replica.client.score

    later = {"create": create_later, "connect": connect}
    start = partial(start_replica, **later, config=config, spec=spec, report=report)
    return _watched(config, teacher, start)


def _fleet(config: Config, replicas: Sequence[ReplicaHandle], report: Report, events: DriverEvents) -> ReplicaFleet:
    limit = max_inflight(config.teacher.max_num_seqs, config.algorithm.group_size)
    return ReplicaFleet(
        replicas,
        ReplicaRouter([replica.name for replica in replicas], limit),
        config.teacher.min_replicas,
        report,
        serving=VERSION,
        max_replacements=config.teacher.max_replacements,
        kind=KIND,
        answer_timeout_s=config.rollout.answer_timeout_s,
        events=events,
    )


def _watched(config: Config, teacher: Teacher, start: Callable[[str], Awaitable[ReplicaHandle]]) -> StartedTeacher:
    fleet, rollout = teacher.fleet, config.rollout

    async def admit(names: Collection[str]) -> None:
        for name in names:
            await fleet.admit(name, VERSION)

    health = HealthMonitor(rollout.replica_timeout_s, slow_factor=None)  # one token per request says nothing of speed
    operator = FleetOperator(
        fleet=fleet,
        control=FleetControl(fleet, config.weight_sync.pause_timeout_s),
        health=health,
        start=start,
        catch_up=admit,
        drain_timeout_s=rollout.group_timeout_s,
    )
    monitor = FleetMonitor(fleet, health, rollout.progress_interval_s)
    return StartedTeacher(teacher=teacher, monitor=monitor, operator=operator)


def teacher_spec(config: Config, device: str, path: str) -> EngineSpec:
    """Of an engine that scores. It generates nothing, so that nothing is compiled for it."""
    teacher = config.teacher
    return EngineSpec(
        model_path=path,
        device=device,
        dtype=teacher.dtype.value,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens + 1,  # vLLM samples a token
        max_position_embeddings=teacher.max_position_embeddings,
        max_num_seqs=teacher.max_num_seqs,
        kv_cache_bytes=None if teacher.kv_cache_mb is None else teacher.kv_cache_mb * 2**20,
        gpu_memory_utilization=teacher.gpu_memory_utilization,
        tensor_parallel_size=teacher.tensor_parallel_size,
        gpu_share=config.gpu_share,
        enforce_eager=True,
        engine_args={"max_num_batched_tokens": teacher.max_num_batched_tokens, "enable_prefix_caching": False},
    )


async def teacher_model(config: Config, run_dir: Path, student: str) -> str | None:
    """The folder or hub name of the teacher; None: there is none. `student`: that of the policy. Raises ConfigError
    where their tokenizers differ."""
    path = config.teacher.path
    if path is None:
        return None
    if is_checkpoint(Path(path).expanduser()):
        path = await made(_exported_teacher, config, run_dir / "exported_teacher")
    timeout_s = config.rollout.start_timeout_s
    async with within(timeout_s, "rollout.start_timeout_s", "comparing the tokenizers of teacher and policy"):
        task: Any = ray.remote(num_cpus=1)(carries_errors(_compare_tokenizers))
        await as_raised(task.remote(config, path, student), "the task that compares tokenizers")
    return path


def _exported_teacher(config: Config, folder: Path) -> str:
    return exported("teacher.path", config.teacher.path, folder)


def _compare_tokenizers(config: Config, teacher_path: str, student_path: str) -> None:
    refuse_another_tokenizer(config, load_tokenizer(teacher_path), load_tokenizer(student_path))


def refuse_another_tokenizer(config: Config, teacher: Any, student: Any) -> None:
    """Raises ConfigError unless every token of the student's tokenizer is one of the teacher's, under the same id."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    others = sorted((token_id, token) for token, token_id in ours.items() if theirs.get(token) != token_id)
    if not others:
        return
    token_id, token = others[0]
    there = f"the teacher's token {theirs[token]}" if token in theirs else "none of the teacher's"
    raise ConfigError(
        f"teacher.path={config.teacher.path}: has another tokenizer than the policy's model "
        f"({config.model.path or 'made here'}): {len(others)} of the policy's {len(ours)} tokens are not its own under "
        f"the same id; the first, {token!r}, is the policy's token {token_id} and {there}"
    )
