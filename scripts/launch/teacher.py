"""The teacher of a run: its model, its replicas, and what keeps them whole."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup

from configs.checkpoint import EXPORTED_TEACHER
from configs.mixture import longest_source
from configs.runtime.deadline import within
from configs.schema import Config
from configs.validate import ConfigError
from rollout.actors.carried import as_raised, carries_errors
from rollout.agents.worker_group import load_tokenizer
from rollout.engines.base import EngineSpec
from rollout.events.driver import DriverEvents
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import FleetKind, ReplicaFleet
from rollout.fleet.health import FleetMonitor
from rollout.fleet.operator import FleetOperator
from rollout.replica.lifecycle import Replica
from rollout.replica.replica_group import ReplicaHandle
from rollout.router import max_inflight
from rollout.teacher.teacher import Teacher
from rollout.types import FloatArray, IntArray
from scripts.launch.driver import largest_group, make_monitor_and_operator
from scripts.launch.models import exported_once
from scripts.launch.nodes import driver_task
from scripts.launch.replicas import ReplicaStarter
from trainer.tracking.console import Console

TEACHER = FleetKind(name="teacher", section="teacher")
VERSION = 0
"""The version of the teacher's weights, which stay as they are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedTeacher:
    """A teacher whose replicas score, and are watched and replaced while `monitor` and `operator` run."""

    teacher: Teacher
    monitor: FleetMonitor
    operator: FleetOperator


async def start_teacher(
    starter: ReplicaStarter, groups: Sequence[PlacementGroup], console: Console, events: DriverEvents
) -> StartedTeacher:
    """Start the teacher's replicas, one for each reservation, and build what asks them and keeps them whole."""
    config = starter.config
    replicas = starter.create_first(groups)

    async def load(replica: ReplicaHandle) -> None:
        with console.during(f"loading the teacher in {replica.name}"):
            await starter.load(replica)

    await asyncio.gather(*map(load, replicas))
    fleet = ReplicaFleet(
        replicas,
        max_inflight(config.teacher.max_num_seqs, largest_group(config)),
        config.teacher.min_replicas,
        starter.report,
        serving=VERSION,
        max_replacements=config.teacher.max_replacements,
        kind=TEACHER,
        answer_timeout_s=config.rollout.answer_timeout_s,
        events=events,
    )

    async def admit(names: Collection[str]) -> None:
        for name in names:
            await fleet.admit(name, VERSION)

    monitor, operator = make_monitor_and_operator(
        config,
        fleet=fleet,
        control=FleetControl(fleet, config.weight_sync.pause_timeout_s),
        catch_up=admit,
        start=starter.start,
        judges_speed=False,  # one token per request says nothing of speed
    )
    teacher = Teacher(fleet=fleet, timeout_s=config.teacher.timeout_s, score_on=_score_on, emit=events.emit)
    return StartedTeacher(teacher=teacher, monitor=monitor, operator=operator)


async def _score_on(replica: Replica, sequences: Sequence[IntArray]) -> list[FloatArray]:
    assert isinstance(replica.handle, ReplicaHandle)
    return await replica.handle.client.score(sequences)


def teacher_spec(config: Config, device: str, path: str) -> EngineSpec:
    """Return the spec of an engine that only scores. It generates nothing, so nothing is compiled for it."""
    teacher = config.teacher
    return EngineSpec(
        model_path=path,
        device=device,
        dtype=teacher.dtype.value,
        max_model_len=longest_source(config).context_tokens + 1,  # vLLM samples a token
        max_position_embeddings=teacher.max_position_embeddings,
        max_num_seqs=teacher.max_num_seqs,
        kv_cache_bytes=None if teacher.kv_cache_mb is None else teacher.kv_cache_mb * 2**20,
        gpu_memory_utilization=teacher.gpu_memory_utilization,
        tensor_parallel_size=teacher.tensor_parallel_size,
        gpu_share=config.gpu_share,
        enforce_eager=True,
        engine_args={"max_num_batched_tokens": teacher.max_num_batched_tokens, "enable_prefix_caching": False},
    )


async def teacher_model(config: Config, run_dir: Path, student: str, *, goes_on: bool) -> str | None:
    """Return the folder or hub name of the teacher's model; None where there is no teacher.

    Args:
        student: the policy's model.
        goes_on: as in `exported_once`.

    Raises:
        ConfigError: Their tokenizers differ.
    """
    if config.teacher.path is None:
        return None
    folder = run_dir / EXPORTED_TEACHER
    path = await exported_once(config, folder, "teacher.path", config.teacher.path, goes_on=goes_on)
    timeout_s = config.rollout.start_timeout_s
    async with within(timeout_s, "rollout.start_timeout_s", "comparing the tokenizers of teacher and policy"):
        task = driver_task(carries_errors(_compare_tokenizers), config)
        await as_raised(task.remote(config, path, student), "the task that compares tokenizers")
    return path


def _compare_tokenizers(config: Config, teacher_path: str, student_path: str) -> None:
    refuse_another_tokenizer(config, load_tokenizer(teacher_path), load_tokenizer(student_path))


def refuse_another_tokenizer(config: Config, teacher: Any, student: Any) -> None:
    """Raise ConfigError unless every token of the student's tokenizer is one of the teacher's, under the same id."""
    theirs, ours = teacher.get_vocab(), student.get_vocab()
    wrong = sorted((token_id, token) for token, token_id in ours.items() if theirs.get(token) != token_id)
    if not wrong:
        return
    token_id, token = wrong[0]
    there = f"the teacher's token {theirs[token]}" if token in theirs else "none of the teacher's"
    raise ConfigError(
        f"teacher.path={config.teacher.path}: has another tokenizer than the policy's model "
        f"({config.model.path or 'made here'}): {len(wrong)} of the policy's {len(ours)} tokens are not its own under "
        f"the same id; the first, {token!r}, is the policy's token {token_id} and {there}"
    )
