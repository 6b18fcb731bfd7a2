"""Whole jobs on simulated engines that are killed at a moment of the virtual clock, and go on in their folders.

Everything that decides is real: rollouter, buffer, agent worker, replicas, weight updates, train loop, checkpoints on
the disk, records and their chain. The weights of the trainer are a digest of all that they were trained on.
"""

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from omegaconf import OmegaConf

from configs.checkpoint import CHECKPOINTS
from configs.data import CurriculumConfig
from configs.rewards import RewardTerm
from configs.schema import Config
from rollout.rewards.places import Called
from rollout.rewards.scoring import RewardScorer
from rollout.types import TrajectoryGroup
from scripts.bench import faulty_job
from scripts.bench.common import coin_reward
from scripts.bench.faulty_job import Job, SavedTrainer, job_config
from scripts.command.resume import Resumed, read
from scripts.observe.run import Run
from scripts.simulate.stand_ins import NoTokenizer, write_state
from tests.support.fakes import run_virtual
from tests.support.recordings import Screen
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import CheckpointStore
from trainer.metrics import Last, Max, Metric
from trainer.step import StepAssembler
from trainer.tokens import TrainedTokens, join
from trainer.tracking.proof import Origin
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker

STEPS = 6
BEGINNING = "0" * 16
TRAIN_S, TOKEN_S, WRITE_S = 1.0, 0.05, 0.3


class DigestTrainer(SavedTrainer):
    """A trainer whose weights are a digest of everything that they were trained on, in order."""

    def __init__(self, train_s: float = TRAIN_S):
        super().__init__(train_s)
        self._seconds = train_s
        self.weights = BEGINNING

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        assert batch is not None and global_steps == self.global_steps, "no step is left out"
        await asyncio.sleep(self._seconds)
        self.weights = digest(self.weights, batch)
        self.global_steps += 1
        metrics: dict[str, Metric] = {"perf/trainer_busy_s": Max(self._seconds), "actor/skipped_steps": Last(0.0)}
        return StepResult(metrics, self._trained(batch), self.weights)

    def _trained(self, batch: StepBatch) -> TrainedTokens:
        """Make logprobs that depend on the weights, as a real trainer's do."""
        (micro_batches,) = batch.micro_batches
        advantages = join([micro_batch.tokens.advantages for micro_batch in micro_batches], np.float32)
        logprobs = np.full(len(advantages), -int(self.weights[:4], 16) / 65536, np.float32)
        none = np.zeros(len(advantages), np.bool_)
        tokens = TrainedTokens(logprobs=logprobs, advantages=advantages, is_clipped=none, is_rejected=none)
        return batch.gather_trained([tokens])

    async def stage_checkpoint(self, folder: Path) -> None:
        write_state(folder, {"weights": self.weights.encode()})

    async def finish_checkpoint(self) -> None:
        await asyncio.sleep(WRITE_S)


def digest(weights: str, batch: StepBatch) -> str:
    """Return the digest of these weights and all that the batch trains."""
    state = hashlib.blake2b(weights.encode(), digest_size=8)
    for micro_batch in (micro_batch for mine in batch.micro_batches for micro_batch in mine):
        arrays = micro_batch.tokens._arrays()
        for name in sorted(arrays):
            state.update(arrays[name].tobytes())
        state.update(micro_batch.input_ids.tobytes() + micro_batch.sources.tobytes())
    return state.hexdigest()


class InlineCheckpointer(Checkpointer):
    """Writes on the event loop: a thread would not wait for the virtual clock. Every write takes a while before it, so
    that kills come between them."""

    async def _in_thread(self, function: Callable[..., Any], *args: object) -> Any:
        await asyncio.sleep(WRITE_S)
        return function(*args)


class NumbersAsText(NoTokenizer):
    """A response's text lists its tokens, which are the versions that sampled them: rewards depend on both."""

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


REWARD = RewardScorer(((RewardTerm("coin", 1.0), Called(coin_reward, timeout_s=60.0)),))


@dataclass(frozen=True)
class KilledJob:
    """A job in a folder. Each `run` is a process of it."""

    run_dir: Path
    max_staleness: int
    every: int = 2
    """The steps between checkpoints."""
    order: str = "uniform"
    """The order of its prompts."""

    @property
    def config(self) -> Config:
        config = job_config(STEPS)
        return replace(
            config,
            data=replace(config.data, curriculum=CurriculumConfig(order=self.order)),
            algorithm=replace(config.algorithm, group_size=2),
            rollout=replace(config.rollout, num_replicas=2, max_staleness=self.max_staleness),
            trainer=replace(config.trainer, prompts_per_step=3),
            checkpoint=replace(config.checkpoint, every=self.every),
        )

    def run(self, kill_at: float = math.inf) -> float:
        """Run until the end, or until the process is killed at that second. Return the seconds that it took."""
        with (
            mock.patch.object(faulty_job, "SavedTrainer", DigestTrainer),
            mock.patch.object(faulty_job, "Checkpointer", InlineCheckpointer),
            mock.patch.object(faulty_job, "NoTokenizer", NumbersAsText),
            mock.patch.object(faulty_job, "NO_REWARD", REWARD),
        ):
            return run_virtual(self._run(kill_at))

    async def _run(self, kill_at: float) -> float:
        clock = asyncio.get_running_loop().time
        self.run_dir.mkdir(exist_ok=True)
        OmegaConf.save(OmegaConf.structured(self.config), self.run_dir / "config.yaml")
        console: Any = Screen()
        tracker = Tracker([JsonlSink(self.run_dir / METRICS_FILE)])
        recorder = RunRecorder(self.run_dir, tracker, console, record_tokens=True)
        store = CheckpointStore(self.run_dir / CHECKPOINTS)
        resumed = self._resume(store, recorder)
        job = Job(self.config, token_s=TOKEN_S, train_s=TRAIN_S, recorder=recorder, resumed=resumed)
        job.rollouter.buffer.on_discard = recorder.record_discarded
        if resumed is not None:
            job.workers.weights = (resumed.checkpoint.train_folder / "weights").read_text()
        recorder.record_beginning(job.first_step, origin(job.workers.weights))
        try:
            async with asyncio.timeout(None if math.isinf(kill_at) else kill_at):
                await job.run(store)
        except TimeoutError:
            pass  # nobody is asked: what is on the disk now is what is left
        return clock()

    def _resume(self, store: CheckpointStore, recorder: RunRecorder) -> Resumed | None:
        checkpoint = store.newest_good(lambda text: None)
        aside = SetAside(self.run_dir, 0 if checkpoint is None else checkpoint.global_steps)
        if checkpoint is None:
            recorder.restore(recorder.state(), -1, aside)
            return None
        resumed = read(checkpoint, aside)
        recorder.restore(resumed.recorder, resumed.global_steps, aside)
        store.set_aside_after(resumed.global_steps, aside.move)
        return resumed

    def trained(self) -> list[list[int]]:
        """Return the ordinals of each step."""
        run = Run.open(self.run_dir)
        return [sorted({record.ordinal for record in run.trajectories(step).records}) for step in run.steps()]

    def rows(self) -> dict[int, int | None]:
        """Return the row of each ordinal that was trained."""
        run = Run.open(self.run_dir)
        return {record.ordinal: record.row for step in run.steps() for record in run.trajectories(step).records}


def origin(weights: str) -> Origin:
    return Origin(policy="simulated", weights=weights, num_ranks=1, num_threads=1, device="none", software={})


async def never_killed(config: Config, steps: list[list[TrajectoryGroup]]) -> list[str]:
    """Train on these groups in one go. Return the digest after each step."""
    trainer = DigestTrainer()
    assembler = StepAssembler(config=config, score=trainer.score)
    weights: list[str] = []
    for step, groups in enumerate(steps):
        assembled = await assembler.assemble(groups, step)
        weights.append((await trainer.train_step(assembled.batch, step)).weights)
    return weights


def moments(seed: int, count: int, seconds: float) -> list[float]:
    """Return random moments of a job that takes so long."""
    chance = random.Random(seed)
    return [chance.uniform(0.0, seconds) for _ in range(count)]
