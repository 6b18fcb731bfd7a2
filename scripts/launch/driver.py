"""Builds the parts of a run that live in the driver, over replicas and workers of any kind: real or simulated ones."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from configs.mixture import sources_of
from configs.schema import Config
from rollout.agents.loop import is_replayable
from rollout.buffer import make_buffer
from rollout.curriculum.adaptive import make_order
from rollout.evaluation.evaluator import Ask, Evaluator, OnLost
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.event import Emit, nobody
from rollout.events.kinds import Report
from rollout.failures import FailureBudget
from rollout.fleet.concurrency import make_concurrency
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.fleet.health import FleetMonitor, HealthMonitor
from rollout.fleet.operator import FleetOperator
from rollout.mixture import PromptMixture, SourceTerms, Turns
from rollout.prompts import PromptStream
from rollout.replica.lifecycle import FleetMember
from rollout.rollouter import GroupRunner, Rollouter
from rollout.router import ReplicaRouter
from rollout.teacher.teacher import Teacher
from rollout.types import Prompt, SamplingParams


def make_fleet(
    config: Config, replicas: Sequence[FleetMember], report: Report, events: DriverEvents = NO_EVENTS
) -> tuple[ReplicaFleet, FleetControl]:
    """Return the fleet of a training run, whose replicas wait for their first weights, and the control of it."""
    rollout = config.rollout
    limit, concurrency = make_concurrency(rollout, largest_group(config))
    fleet = ReplicaFleet(
        replicas,
        limit,
        rollout.min_replicas,
        report,
        max_replacements=rollout.max_replacements,
        answer_timeout_s=rollout.answer_timeout_s,
        events=events,
        concurrency=concurrency,
    )
    return fleet, FleetControl(fleet, config.weight_sync.pause_timeout_s)


def make_monitor(config: Config, fleet: ReplicaFleet, *, judges_speed: bool = True) -> FleetMonitor:
    """Return the loop that watches the replicas. `judges_speed`: it also finds those that are too slow."""
    rollout = config.rollout
    health = HealthMonitor(rollout.replica_timeout_s, rollout.slow_factor if judges_speed else None)
    return FleetMonitor(fleet, health, rollout.progress_interval_s)


def make_monitor_and_operator(
    config: Config,
    *,
    fleet: ReplicaFleet,
    control: FleetControl,
    catch_up: Callable[[Collection[str]], Awaitable[object]],
    start: Callable[[str], Awaitable[FleetMember]],
    judges_speed: bool = True,
) -> tuple[FleetMonitor, FleetOperator]:
    """Return the loops that keep the fleet whole. `start`, `catch_up`: see FleetOperator."""
    operator = FleetOperator(
        fleet=fleet,
        control=control,
        start=start,
        catch_up=catch_up,
        drain_timeout_s=config.rollout.group_timeout_s,
    )
    return make_monitor(config, fleet, judges_speed=judges_speed), operator


def make_rollouter(
    config: Config,
    *,
    rows: Sequence[Prompt],
    runner: GroupRunner,
    fleet: ReplicaFleet,
    global_steps: int,
    updating: asyncio.Lock,
    teacher: Teacher | None = None,
    emit: Emit = nobody,
) -> Rollouter:
    """Return the producing loop. `global_steps`: optimizer steps taken before. `updating` is held while replicas change
    their version."""
    buffer = make_buffer(config, global_steps)
    buffer.emit = emit
    return Rollouter(
        stream=make_stream(config, rows),
        buffer=buffer,
        emit=emit,
        fleet=fleet,
        runner=runner,
        updating=updating,
        sampling=training_sampling(config),
        group_size=config.algorithm.group_size,
        group_timeout_s=config.rollout.group_timeout_s,
        teacher=teacher,
        replayable=is_replayable(config),
        sources={source.name: terms_of(source.config) for source in sources_of(config) if source.name},
    )


def make_stream(config: Config, rows: Sequence[Prompt]) -> PromptStream | PromptMixture:
    """Return the stream of the prompts, with data.sources that of all sources."""
    if not config.data.sources:
        return PromptStream(rows, config.seed, order=make_order(config, rows))
    sources = sources_of(config)
    turns, streams = Turns({source.name: source.weight for source in sources}), dict[str, PromptStream]()
    for source in sources:
        own = [prompt for prompt in rows if prompt.source == source.name]
        order = make_order(source.config, own, float(turns.share(source.name)))
        streams[source.name] = PromptStream(own, config.seed, order=order)
    return PromptMixture(streams)


def terms_of(config: Config) -> SourceTerms:
    """Return how the groups of a source are sampled. `config`: its own."""
    return SourceTerms(
        sampling=training_sampling(config), group_size=config.algorithm.group_size, replayable=is_replayable(config)
    )


def largest_group(config: Config) -> int:
    """Return the largest group size of all sources."""
    return max(source.config.algorithm.group_size for source in sources_of(config))


def training_sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        seed=config.seed if rollout.seeded_sampling else None,
    )


def evaluation_sampling(config: Config) -> SamplingParams:
    evaluation = config.evaluation
    return SamplingParams(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        max_tokens=config.rollout.max_response_tokens,
        stop=tuple(config.rollout.stop),
        seed=config.seed if config.rollout.seeded_sampling and evaluation.temperature > 0 else None,
    )


def make_evaluator(
    config: Config,
    *,
    rows: Sequence[Prompt],
    router: ReplicaRouter,
    ask: Ask,
    failures: FailureBudget,
    on_lost: OnLost,
) -> Evaluator:
    evaluation = config.evaluation
    return Evaluator(
        prompts=rows,
        router=router,
        ask=ask,
        sampling=evaluation_sampling(config),
        sources={source.name: evaluation_sampling(source.config) for source in sources_of(config) if source.name},
        num_samples=evaluation.samples,
        timeout_s=evaluation.timeout_s,
        failures=failures,
        on_lost=on_lost,
    )
