"""Parts of the benchmark on real processes: Ray, vLLM, agent workers, a train worker; tiny model, forced lengths."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from configs.checkpoint import CheckpointConfig
from configs.runtime.tasks import run_with_background
from configs.schema import Config, DataConfig, Layout, ModelConfig, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.buffer import TrajectoryBuffer
from rollout.engines.base import EngineSpec
from rollout.prompts import PromptStream
from rollout.replica.replica_group import ReplicaActor
from rollout.request_ids import RequestId
from rollout.rollouter import Rollouter
from rollout.staleness import SlotLedger, StalenessWindow
from rollout.types import GenerationRequest, Prompt, SamplingParams
from scripts.bench.another_run import another_run
from scripts.bench.asynchrony.outcome import DEFAULT_STALENESS, HEADER, Outcome, median_outcome
from scripts.bench.common import (
    ForcedLengths,
    LengthOf,
    LogNormalLengths,
    UniformLengths,
    coin_reward,
    interleaved,
    median_ratio,
    show_table,
)
from scripts.launch.cluster import cluster, resolve_device
from scripts.launch.data import load_rows
from scripts.launch.run import train
from scripts.launch.start import StartedRun, owner, start
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.samples import StepSamples
from trainer.tracking.sinks import Tracker
from trainer.worker.recovery import WeightUpdater
from weight_sync.protocol import UpdateReport
from weight_sync.transports.cleanup import release_all

logger = logging.getLogger(__name__)

MAX_RESPONSE_TOKENS = 384
LENGTHS: Mapping[str, LengthOf] = {
    "equal": LogNormalLengths(mean=48, sigma=0.0, cap=MAX_RESPONSE_TOKENS),
    "longtail": LogNormalLengths(mean=48, sigma=1.0, cap=MAX_RESPONSE_TOKENS),
    "short": LogNormalLengths(mean=4, sigma=0.0, cap=MAX_RESPONSE_TOKENS),
    "uniform": UniformLengths(low=64, high=200),
}


async def bench_vllm(parts_to_run: set[str], repeats: int, quick: bool) -> dict[str, float]:
    """Show a table of each part, "vllm", "trainer" and "framework". Returns the figures of the last line."""
    run_dir = (Path("runs") / f"bench_async-{time.strftime('%Y-%m-%d_%H-%M-%S')}").resolve()
    results: dict[str, float] = {}
    if {"framework", "vllm"} & parts_to_run:
        config = vllm_config(num_steps=5 if quick else 16)
        async with started(config, run_dir) as parts:
            if "framework" in parts_to_run:
                throughputs = await compare_with_bare_engine(config, parts, 16 if quick else 64, repeats)
                results |= _show_throughputs(throughputs, repeats)
            if "vllm" in parts_to_run:
                results |= _show_trainings(await compare_staleness(config, parts, run_dir, repeats))
    if "trainer" in parts_to_run:
        config, run_dir = trainer_bound_config(num_steps=5 if quick else 20), run_dir / "trainer"
        async with started(config, run_dir) as parts:
            results |= _show_updates(await compare_updates(config, parts, run_dir, repeats))
    return results


def vllm_config(num_steps: int) -> Config:
    """Random weights, so that nothing depends on what was learned. One step fills every seat of the replica once."""
    reward = f"{coin_reward.__module__}:{coin_reward.__name__}"
    return Config(
        model=ModelConfig(warmup_steps=0),
        data=DataConfig(num_train=512, num_val=1),
        rollout=RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, reward=reward),
        checkpoint=CheckpointConfig(every=0),
        trainer=TrainerConfig(total_steps=num_steps, prompts_per_step=8, eval_every=0, layout=Layout.packed),
    )


def trainer_bound_config(num_steps: int) -> Config:
    """40M parameters and short responses: training a step takes longer than rolling it out, and an update of 160 MB is
    a good part of it."""
    config = vllm_config(num_steps)
    return replace(
        config,
        model=replace(config.model, hidden_size=512, num_layers=12),
        algorithm=replace(config.algorithm, group_size=4),
        trainer=replace(config.trainer, prompts_per_step=1, layout=Layout.tree),
    )


@asynccontextmanager
async def started(config: Config, run_dir: Path) -> AsyncIterator[StartedRun]:
    """Start the parts of a run whose replica can also generate without the framework, and end them on exit."""
    device = resolve_device(config)
    run_dir.mkdir(parents=True)
    with (run_dir / "console.log").open("w") as log:
        async with cluster(config, device):
            console = PlainConsole(config.trainer.total_steps, log)
            try:
                rows = load_rows(config)
                yield await start(
                    config,
                    device,
                    run_dir,
                    rows=rows,
                    console=console,
                    actor_class=BareReplicaActor,
                    agent_loop=ForcedLengths(LENGTHS),
                )
            finally:
                release_all(config.weight_sync, owner(run_dir))


# -- asynchronous against synchronous ----------------------------------------------------------------------------------


async def compare_staleness(config: Config, parts: StartedRun, run_dir: Path, repeats: int) -> dict[str, list[Outcome]]:
    """Run whole trainings, interleaved: "equal/0", "equal/2", "longtail/0", "longtail/2" (lengths, max_staleness)."""
    arms = {
        f"{lengths}/{max_staleness}": partial(_train_once, config, parts, run_dir, lengths, max_staleness)
        for lengths in ("equal", "longtail")
        for max_staleness in (0, DEFAULT_STALENESS)
    }
    warm_up = replace(config, trainer=replace(config.trainer, total_steps=3))
    await _train_once(warm_up, parts, run_dir, "equal", DEFAULT_STALENESS, -1)
    return await interleaved(arms, repeats)


async def compare_updates(config: Config, parts: StartedRun, run_dir: Path, repeats: int) -> dict[str, list[Outcome]]:
    """Run whole trainings in which the replica waits for the trainer, interleaved: "goes on" once the weights are
    published, and "waits" until they are live."""
    arms = {
        name: partial(_train_once, config, parts, run_dir, "short", DEFAULT_STALENESS, waits=waits)
        for name, waits in (("waits", True), ("goes on", False))
    }
    await interleaved(arms, 1)  # warms up
    return await interleaved(arms, repeats)


class WaitingUpdater:
    """An updater that says that the weights are published when they are live on every replica."""

    def __init__(self, updater: WeightUpdater):
        self._updater = updater
        self.publishing, self.updating = updater.publishing, updater.updating

    async def update_weights(self, global_steps: int, published: asyncio.Event | None = None) -> UpdateReport:
        report = await self._updater.update_weights(global_steps)
        if published is not None:
            published.set()
        return report

    async def catch_up(self, names: Collection[str], begins: Callable[[], None] = lambda: None) -> UpdateReport:
        return await self._updater.catch_up(names, begins)


async def _train_once(
    config: Config,
    parts: StartedRun,
    run_dir: Path,
    lengths: str,
    max_staleness: int,
    repetition: int,
    *,
    waits: bool = False,
) -> Outcome:
    """`waits`: for the weights to be live, before the next step begins."""
    config = replace(config, rollout=replace(config.rollout, max_staleness=max_staleness))
    arm_dir = run_dir / f"{lengths}-{max_staleness}-{repetition}{'-waits' if waits else ''}"
    sink = StepMetrics()
    parts.workers.global_steps = 0
    started = await another_run(config, parts, parts.workers)
    if waits:
        started = replace(started, manager=WaitingUpdater(started.manager))
    with (run_dir / "console.log").open("a") as log:
        console = PlainConsole(config.trainer.total_steps, log)
        recorder = RunRecorder(arm_dir, Tracker([sink]), console)
        rows = replace(parts.rows, train=_labelled(parts.rows.train, lengths))
        labelled = replace(started, rows=rows)
        await train(config, labelled, console=console, recorder=recorder)
    outcome = sink.outcome(recorder.counts.trajectories)
    logger.info("%s: %.1f samples/s", arm_dir.name, outcome.samples_per_s)
    return outcome


@dataclass(slots=True)
class StepMetrics:
    """A sink that keeps the metrics of every step."""

    name = "bench"
    steps: list[Mapping[str, float]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, float], samples: StepSamples | None = None) -> None:
        if "timing_s/step" in metrics:
            self.steps.append(metrics)

    def close(self, exit_code: int) -> None: ...

    def outcome(self, num_trajectories: int) -> Outcome:
        seconds = sum(metrics["timing_s/step"] for metrics in self.steps)
        # The replicas' first interval includes the evaluation before the training.
        later = self.steps[1:]
        later_s = sum(metrics["timing_s/step"] for metrics in later)
        return Outcome(
            seconds=seconds,
            samples_per_s=num_trajectories / seconds,
            trainer_idle=1 - sum(metrics["perf/trainer_busy_s"] for metrics in self.steps) / seconds,
            replica_idle=sum(metrics["perf/replica_idle"] * metrics["timing_s/step"] for metrics in later) / later_s,
        )


def _show_trainings(outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    rows, results = [], {}
    for name in ("equal", "longtail"):
        baseline = [outcome.samples_per_s for outcome in outcomes[f"{name}/0"]]
        for max_staleness in (0, DEFAULT_STALENESS):
            arm = outcomes[f"{name}/{max_staleness}"]
            ratio = median_ratio([outcome.samples_per_s for outcome in arm], baseline)
            rows.append(median_outcome(arm).row(f"{name}, {max_staleness}", ratio))
        results[f"vllm_async_over_sync_{name}"] = ratio
    last = median_outcome(arm)
    results |= {"vllm_trainer_idle": last.trainer_idle, "vllm_replica_idle": last.replica_idle}
    title = f"vLLM: trainings of 8 prompts x 8 responses of 48 tokens on average a step, {len(baseline)} repetitions"
    show_table(title, HEADER, rows)
    return results


def _show_updates(outcomes: dict[str, list[Outcome]]) -> dict[str, float]:
    rates = {name: [outcome.samples_per_s for outcome in arm] for name, arm in outcomes.items()}
    ratio = median_ratio(rates["goes on"], rates["waits"])
    rows = [[name, f"{median(values):.1f}"] for name, values in rates.items()]
    title = f"vLLM: 40M parameters, 4 short responses a step, bound by the trainer; {len(rates['waits'])} repetitions"
    show_table(title, ["while an update goes live, the trainer", "samples/s"], [*rows, ["ratio", f"{ratio:.2f}"]])
    return {"trainer_going_on_over_waiting": ratio}


# -- framework against bare engine -------------------------------------------------------------------------------------


class BareReplicaActor(ReplicaActor):
    """A replica whose engine can also be used without the framework around it."""

    async def start(self, spec: EngineSpec, config: WeightSyncConfig) -> int:
        from rollout.engines.vllm.client import AsyncLLM  # loads vLLM, as in the base class
        from rollout.engines.vllm.engine import VllmEngine

        num_workers = await super().start(spec, config)
        engine = self._replica._engine
        assert isinstance(engine, VllmEngine)
        # The same engine without our gate in front: its state under the class of vLLM. Kept, because an AsyncLLM shuts
        # its engine down when it is garbage collected.
        self._bare = AsyncLLM.__new__(AsyncLLM)
        self._bare.__dict__ = engine._llm.__dict__  # pyright: ignore[reportAttributeAccessIssue]
        return num_workers

    async def generate_bare(self, requests: list[GenerationRequest]) -> tuple[int, float]:
        """Give all requests to AsyncLLM at once. Returns response tokens, and the seconds inside this process."""
        from rollout.engines.vllm.engine import _sampling_params

        async def generate(request: GenerationRequest) -> int:
            prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
            name, num_tokens = str(request.request_id), 0
            async for output in self._bare.generate(prompt, _sampling_params(request.sampling), name):
                num_tokens = len(output.outputs[0].token_ids)
            return num_tokens

        started = time.perf_counter()
        counts = await asyncio.gather(*(generate(request) for request in requests))
        return sum(counts), time.perf_counter() - started


async def compare_with_bare_engine(
    config: Config, parts: StartedRun, num_groups: int, repeats: int
) -> dict[str, list[float]]:
    """Measure response tokens per second of the same requests, interleaved: "bare" and "framework"."""
    await parts.manager.update_weights(0)
    arms = {
        "bare": partial(_bare_throughput, config, parts, num_groups),
        "framework": partial(_framework_throughput, config, parts, num_groups),
    }
    await interleaved(arms, 1)  # fills the prefix cache for both
    return await interleaved(arms, repeats)


async def _bare_throughput(config: Config, parts: StartedRun, num_groups: int, repetition: int) -> float:
    stream = PromptStream(parts.rows.train, config.seed)
    length_of = LENGTHS["uniform"]
    requests = [
        GenerationRequest(
            request_id=RequestId(ordinal=prompt.ordinal, episode=index),
            prompt_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=length_of(prompt.ordinal, index), ignore_eos=True),
        )
        for prompt in (stream.next() for _ in range(num_groups))
        for index in range(config.algorithm.group_size)
    ]
    tokens, seconds = await parts.replicas[0].actor.generate_bare.remote(requests)
    assert tokens == sum(request.sampling.max_tokens for request in requests)
    logger.info("bare: %.0f tokens/s", tokens / seconds)
    return tokens / seconds


async def _framework_throughput(config: Config, parts: StartedRun, num_groups: int, repetition: int) -> float:
    """Measure from the first claim to the last group in the buffer: one batch of all groups, which is not trained."""
    window = StalenessWindow(groups_per_step=num_groups, max_staleness=0)
    buffer = TrajectoryBuffer(SlotLedger(window, config.rollout.stale_policy, num_groups), batch_timeout_s=600)
    rollouter = Rollouter(
        stream=PromptStream(_labelled(parts.rows.train, "uniform"), config.seed),
        buffer=buffer,
        fleet=parts.fleet,
        runner=parts.agents,
        updating=parts.manager.updating,
        sampling=SamplingParams(),
        group_size=config.algorithm.group_size,
        group_timeout_s=600,
    )
    tokens = 0

    async def take_all() -> None:
        nonlocal tokens
        batch = await buffer.next_batch(0)
        tokens = sum(group.num_tokens for group in batch.groups)

    started_at = time.perf_counter()
    await run_with_background(take_all(), background=[rollouter.run()])
    seconds = time.perf_counter() - started_at
    logger.info("framework: %.0f tokens/s", tokens / seconds)
    return tokens / seconds


def _labelled(rows: list[Prompt], lengths: str) -> list[Prompt]:
    """Rows whose responses get the lengths of that name in LENGTHS."""
    return [replace(row, data_source=lengths) for row in rows]


def _show_throughputs(throughputs: dict[str, list[float]], repeats: int) -> dict[str, float]:
    ratio = median_ratio(throughputs["framework"], throughputs["bare"])
    rows = [[name, f"{median(values):,.0f}"] for name, values in throughputs.items()]
    show_table(
        f"framework cost: 8 responses of 64 to 200 tokens per prompt, 64 seats, {repeats} repetitions",
        ["through", "tokens/s"],
        [*rows, ["framework / bare", f"{ratio:.3f}"]],
    )
    return {"framework_over_bare_engine": ratio}
