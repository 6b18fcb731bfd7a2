"""Simulate a configuration: the real scheduling on a virtual clock, with the times of a profile."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from configs.schema import StalePolicy
from rollout.buffer import TrajectoryBuffer
from rollout.engines.virtual_clock import run_virtual
from rollout.events.driver import Write
from rollout.types import Prompt, TrainBatch, TrajectoryGroup, staleness
from scripts.simulate.engine import ProfiledEngine
from scripts.simulate.episodes import ByThemselves, Draws, Together, drawn_reward
from scripts.simulate.machine import Machine
from scripts.simulate.profile import Profile
from scripts.simulate.setup import Setup
from scripts.simulate.simulated_run import SimulatedRun
from scripts.simulate.stand_ins import NoCheckpoints, Nothing, SimulatedTrainer
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.checkpointer import is_first_update_after
from trainer.metrics import Last, Max, Metric
from weight_sync.protocol import Manifest, PublishOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    setup: Setup
    seconds: float
    """The seconds of the steps that are counted."""
    samples_per_s: float
    """Trajectories trained per second."""
    tokens_per_s: float
    """Sampled tokens trained per second."""
    trainer_idle: float
    """Share of the time without an optimizer step."""
    replica_idle: float
    """Share of the time in which a replica has no request, the mean over replicas."""
    staleness_p50: float
    """The median staleness of the trained tokens, in versions."""
    staleness_max: int
    wait_s: tuple[float, ...]
    """The seconds that the trainer waited for the batch of each step."""
    step_s: tuple[float, ...]

    @property
    def rate_after_first(self) -> float:
        """Samples per second of all steps but the first, as `fit.measured_rate` of a run."""
        return self.setup.rate_after_first(self.step_s)


def simulate(
    profile: Profile,
    setup: Setup,
    *,
    whole: bool = False,
    seed: int = 0,
    longest: float = 1.0,
    write: Write | None = None,
    recorder: Any = None,
) -> Prediction:
    """Simulate `setup.steps` steps of a run that goes on for ever. The same arguments give the same prediction.

    Args:
        whole: simulate a run of these steps only, with its empty beginning and its end, as short runs are.
        longest: the quantile at which lengths are cut off.
        write: takes the events.
        recorder: takes the steps.
    """
    tail = 0 if whole else (setup.max_staleness + 1) * setup.interval
    # An evaluation delays steps of the next period too: the counted ones begin after one, as they end after one.
    lead = 0 if whole else max(tail, setup.eval_every)
    counted, setup = setup, replace(setup, steps=lead + setup.steps + tail)

    async def run() -> Prediction:
        eval_every = setup.eval_every if profile.evaluation_requests else 0
        machine, draws = Machine(profile, setup.num_ranks), Draws(profile, seed, longest)
        engines = [ProfiledEngine(profile, machine, setup.max_num_seqs) for _ in range(setup.num_replicas)]
        trainer = ProfiledTrainer(profile, machine, setup.num_ranks)
        meter = Meter(trainer, engines, setup)
        simulated = SimulatedRun(
            config=replace(setup, eval_every=eval_every).config(),
            engines=engines,
            workers=trainer,
            loop=ByThemselves(draws) if profile.has_tools else Together(draws),
            scorer=drawn_reward(draws),
            recorder=recorder or Nothing(),
            checkpointer=ProfiledCheckpoints(profile, setup),
            held_out=[
                Prompt(ordinal=index, text="", token_ids=(1, 2), ground_truth="")
                for index in range(profile.evaluation_requests)
            ],
            write=write,
            as_source=meter.of,
        )
        await simulated.train()
        meter.mark()
        return meter.prediction(counted, lead)

    return run_virtual(run())


class ProfiledTrainer(SimulatedTrainer):
    """Trains for as long as the profile says for the tokens of the batch."""

    def __init__(self, profile: Profile, machine: Machine, num_ranks: int):
        super().__init__(profile.train_s)
        self.profile = profile
        self._machine = machine
        self._num_ranks = num_ranks
        self.sampled_tokens = 0
        """The sampled tokens of the batch that comes next."""
        self.busy_s = 0.0

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        profile, clock = self.profile, asyncio.get_running_loop().time
        computed = profile.computed_per_sampled * self.sampled_tokens
        await asyncio.sleep(profile.driver_s)
        began = clock()
        self._machine.training(True)
        try:
            seconds = profile.train_s + profile.train_s_per_token * computed / self._num_ranks
            await self._machine.work(seconds)
        finally:
            self._machine.training(False)
        busy_s = clock() - began
        self.busy_s += busy_s
        self.global_steps = global_steps + 1
        metrics: dict[str, Metric] = {"perf/trainer_busy_s": Max(busy_s), "perf/padded_tokens": Last(computed)}
        return StepResult(metrics | {"actor/skipped_steps": Last(0.0)})

    async def publish(self, order: PublishOrder) -> Manifest:
        await asyncio.sleep(self.profile.publish_s)
        return await super().publish(order)


@dataclass
class ProfiledCheckpoints(NoCheckpoints):
    """Checkpoints whose copy takes its time; they are written in the background."""

    profile: Profile
    setup: Setup

    def is_due(self, global_steps: int) -> bool:
        every, is_last = self.setup.checkpoint_every, global_steps == self.setup.steps
        return every > 0 and (is_last or is_first_update_after(every, global_steps, self.setup.interval))

    async def stage(self, global_steps: int) -> None:
        await asyncio.sleep(self.profile.checkpoint_s)


@dataclass
class Meter:
    """Stands between train loop and buffer, and measures."""

    trainer: ProfiledTrainer
    engines: Sequence[ProfiledEngine]
    setup: Setup
    _marks: list[tuple[float, float, float]] = field(default_factory=list)
    """At the beginning of each step: the time, and the seconds that the trainer and the replicas have worked."""
    _waits: list[float] = field(default_factory=list)
    _tokens: list[Counter[int]] = field(default_factory=list)
    """The number of trained tokens of each step, by staleness."""
    _buffer: TrajectoryBuffer = field(init=False)

    def of(self, buffer: TrajectoryBuffer) -> "Meter":
        self._buffer = buffer
        return self

    @property
    def ready(self) -> Sequence[TrajectoryGroup]:
        return self._buffer.ready

    async def next_batch(self, global_steps: int) -> TrainBatch:
        self.mark()
        batch = await self._buffer.next_batch(global_steps)
        self._waits.append(asyncio.get_running_loop().time() - self._marks[-1][0])
        tokens = Counter[int]()
        for group in batch.groups:
            for trajectory in group.trajectories:
                for sequence in trajectory.sequences:
                    for span in sequence.spans:
                        age = staleness(span.global_steps, global_steps, self.setup.interval)
                        tokens[age] += span.end - span.start
        self.trainer.sampled_tokens = tokens.total()  # masked ones are computed, too
        masks = self.setup.stale_policy == StalePolicy.mask.value
        most = self.setup.max_staleness if masks else max(tokens, default=0)
        self._tokens.append(Counter({age: count for age, count in tokens.items() if age <= most}))
        return batch

    async def advance(self, global_steps: int) -> None:
        await self._buffer.advance(global_steps)

    def gauges(self) -> dict[str, float]:
        return self._buffer.gauges()

    def mark(self) -> None:
        busy_s = sum(engine.usage.busy_s for engine in self.engines)
        self._marks.append((asyncio.get_running_loop().time(), self.trainer.busy_s, busy_s))

    def prediction(self, setup: Setup, lead: int) -> Prediction:
        marks, counted = self._marks[lead : lead + setup.steps + 1], slice(lead, lead + setup.steps)
        seconds, trained_s, busy_s = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
        tokens_by_staleness = sum(self._tokens[counted], Counter[int]())
        return Prediction(
            setup=setup,
            seconds=seconds,
            samples_per_s=setup.steps * setup.samples_per_step / seconds,
            tokens_per_s=tokens_by_staleness.total() / seconds,
            trainer_idle=1 - trained_s / seconds,
            replica_idle=1 - busy_s / (seconds * len(self.engines)),
            staleness_p50=weighted_median(tokens_by_staleness),
            staleness_max=max(tokens_by_staleness),
            wait_s=tuple(self._waits[counted]),
            step_s=tuple(end - start for (start, *_), (end, *_) in pairwise(marks)),
        )


def weighted_median(counts: Counter[int]) -> float:
    half, below = counts.total() / 2, 0
    for value in sorted(counts):
        below += counts[value]
        if below >= half:
            return float(value)
    return 0.0
