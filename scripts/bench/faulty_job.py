"""A whole training job on simulated engines, whose parts can be broken while it runs.

Rollouter, buffer, router, fleet, monitor, replacement, weight updates, train loop, checkpoints and records are the real
ones. Simulated are the engines (a token per step of a clock), the trainer (a sleep) and the text.

    python -m scripts.bench.faulty_job RUN_DIR STEPS    # resumes from RUN_DIR's newest checkpoint, as resume=auto does
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from configs.checkpoint import CHECKPOINTS, CheckpointConfig
from configs.schema import AlgorithmConfig, Config, RolloutConfig, TrainerConfig, WeightSyncConfig
from rollout.actors.tasks import run_with_background
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.worker import AgentWorker
from rollout.engines.base import EngineDiedError
from rollout.engines.simulated import SimulatedEngine
from rollout.errors import ReplicaLostError
from rollout.progress import ProgressReport
from rollout.replica.replica import RolloutReplica
from rollout.replica.sampled_log import SampledLog
from rollout.sampled_tokens import new_record
from rollout.snapshot import capture, encode, restore
from rollout.types import Completion, GenerationRequest, Prompt
from scripts.bench.common import ForcedLengths, UniformLengths
from scripts.command.resume import ROLLOUTS, Resumed, read
from scripts.launch.driver import make_fleet, make_monitor_and_operator, make_rollouter
from scripts.simulate.stand_ins import NO_REWARD, NoCheckpoints, NoTokenizer, SimulatedTrainer, write_state
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import CheckpointStore
from trainer.loop import TrainLoop
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.set_aside import SetAside
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.protocol import CommitReport, WeightTag

LENGTHS = UniformLengths(low=5, high=60)


def job_config(num_steps: int, update_interval: int = 1) -> Config:
    """Return a job of eight prompts per step on four replicas, whose deadlines are so short that faults are noticed in
    seconds."""
    return Config(
        algorithm=AlgorithmConfig(group_size=4),
        rollout=RolloutConfig(
            num_replicas=4,
            max_num_seqs=16,
            max_replacements=10_000,
            replica_timeout_s=5.0,
            progress_interval_s=0.5,
            group_timeout_s=300.0,
            max_group_retries=3,
            max_failed_groups=0.0,
        ),
        trainer=TrainerConfig(total_steps=num_steps, prompts_per_step=8, eval_every=0, batch_timeout_s=10_000.0),
        weight_sync=WeightSyncConfig(
            interval=update_interval, stage_timeout_s=5.0, pause_timeout_s=5.0, swap_timeout_s=5.0
        ),
        checkpoint=CheckpointConfig(every=2, timeout_s=60.0),
    )


class FaultyReplica(RolloutReplica):
    """A replica that can be broken while it generates."""

    def __init__(self, name: str, config: Config, token_s: float, sampled: SampledLog | None):
        self._slowness = 1.0
        self._hangs = False
        self._answers = asyncio.Event()
        self._answers.set()
        self.simulated = SimulatedEngine(
            step_s=token_s, max_num_seqs=config.rollout.max_num_seqs, swap_s=token_s, sleep=self._sleep
        )
        super().__init__(name, self.simulated, config.weight_sync, sampled)

    def break_by(self, fault: str) -> None:
        """Break the replica by a fault.

        Args:
            fault: "dies": the engine is gone. "hangs": the replica answers, but samples nothing. "silent": the whole
                process stands still. "slow": it samples twenty times slower.
        """
        if fault == "dies":
            self.simulated.kill()
        elif fault == "slow":
            self._slowness = 20.0
        else:
            self._hangs = True
            if fault == "silent":
                self._answers.clear()

    async def _sleep(self, seconds: float) -> None:
        while self._hangs:
            await asyncio.sleep(3600.0)
        await asyncio.sleep(seconds * self._slowness)

    async def generate_group(self, requests: list[GenerationRequest]) -> list[Completion]:
        await self._answers.wait()
        try:
            return await super().generate_group(requests)
        except EngineDiedError as error:
            raise ReplicaLostError(f"{self.name} died while it generated") from error

    async def progress(self, known: Any) -> ProgressReport:
        await self._answers.wait()
        return await super().progress(known)

    async def commit(self, tag: WeightTag) -> CommitReport:
        await self._answers.wait()
        return await super().commit(tag)


@dataclass(slots=True)
class FaultyLoop:
    """A single-turn agent loop that raises or hangs on request."""

    faults: list[str] = field(default_factory=list)
    """The faults of the next groups that run for the first time: "raises" or "hangs"."""

    async def run(self, tasks: Sequence[EpisodeTask], generate: GenerateGroup) -> list[Episode]:
        episodes = await ForcedLengths({"": LENGTHS}).run(tasks, generate)
        if self.faults and tasks[0].request_id.attempt == 0:
            if self.faults.pop() == "raises":
                raise RuntimeError("the tool of the agent loop raised")
            await asyncio.sleep(1e9)
        return episodes


class SavedTrainer(SimulatedTrainer):
    """A trainer whose state is the number of its steps."""

    async def stage_checkpoint(self, folder: Path) -> None:
        write_state(folder, {"weights": bytes(200_000)})

    async def finish_checkpoint(self) -> None:
        await asyncio.sleep(0.01)

    async def model_files(self) -> dict[str, bytes]:
        return {}

    def forget_before(self, global_steps: int) -> None: ...


class Job:
    """A job whose parts are public, so that faults can be injected and counted.

    Example:
        job = Job(job_config(30), token_s=0.05, train_s=2.0, recorder=recorder, resumed=None)
        running = asyncio.create_task(job.run())  # the steps that are left
        job.replicas[0].break_by("dies")
    """

    def __init__(
        self,
        config: Config,
        *,
        token_s: float,
        train_s: float,
        recorder: Any,
        resumed: Resumed | None,
        recorded_in: Path | None = None,
    ):
        """`recorded_in` is the run folder that takes the record of what replicas sample."""
        self._config, self._token_s, self._recorder, self._recorded_in = config, token_s, recorder, recorded_in
        self.first_step = 0 if resumed is None else resumed.global_steps
        self.replicas: list[FaultyReplica] = [self._make(f"replica-{i}") for i in range(config.rollout.num_replicas)]
        self.loop = FaultyLoop()
        self.messages: list[str] = []
        self.workers: Any = SavedTrainer(train_s)
        self.workers.global_steps = self.first_step
        self.fleet, self.control = make_fleet(config, self.replicas, lambda event: self.messages.append(event.text))
        self.manager = CheckpointManager(self.workers, self.fleet, config.weight_sync)
        self._agents = AgentWorker(
            config=config,
            tokenizer=NoTokenizer(),
            loop=self.loop,
            scorer=NO_REWARD,
            replicas={replica.name: replica.generate_group for replica in self.replicas},
        )
        self.monitor, self.operator = make_monitor_and_operator(
            config, fleet=self.fleet, control=self.control, catch_up=self.manager.catch_up, start=self._start
        )
        rows = [Prompt(ordinal=i, text=str(i), token_ids=(1, i), ground_truth=str(i)) for i in range(97)]
        self.rollouter = make_rollouter(
            config,
            rows=rows,
            runner=self._agents,
            fleet=self.fleet,
            global_steps=self.first_step,
            updating=self.manager.updating,
        )
        if resumed is not None:
            restore(resumed.rollouts, self.rollouter)

    async def run(self, store: CheckpointStore | None = None) -> None:
        """Take the steps that are left. With a `store`, checkpoints are saved."""
        config = self._config
        checkpointer: Any = NoCheckpoints()
        saving: Any = nullcontext()
        if store is not None:
            checkpointer = saving = Checkpointer(
                store=store,
                workers=self.workers,
                snapshots={ROLLOUTS: self._snapshot},
                config=config.checkpoint,
                total_steps=config.trainer.total_steps,
                update_interval=config.weight_sync.interval,
                report=self.messages.append,
            )
        loop = TrainLoop(
            config=config,
            buffer=self.rollouter.buffer,
            workers=self.workers,
            manager=self.manager,
            evaluate=None,
            fleet_gauges=self.control.gauges,
            recorder=self._recorder,
            checkpointer=checkpointer,
        )
        async with saving:
            await run_with_background(
                self._train(loop), background=[self.monitor.run(), self.operator.run(), self.rollouter.run()]
            )

    async def _train(self, loop: TrainLoop) -> None:
        await self.manager.update_weights(self.first_step)
        await loop.run(self.first_step)

    def _make(self, name: str) -> FaultyReplica:
        sampled = None if self._recorded_in is None else SampledLog(new_record(self._recorded_in, name))
        return FaultyReplica(name, self._config, self._token_s, sampled)

    async def _start(self, name: str) -> FaultyReplica:
        await asyncio.sleep(50 * self._token_s)
        replica = self._make(name)
        self._agents.replicas[name] = replica.generate_group
        self.replicas.append(replica)
        return replica

    async def _snapshot(self) -> bytes:
        return encode(capture(self.rollouter))


def main() -> None:
    """Run in real time. Every step prints a line."""
    run_dir = Path(sys.argv[1])
    run_dir.mkdir(parents=True, exist_ok=True)
    config = job_config(num_steps=int(sys.argv[2]))
    OmegaConf.save(OmegaConf.structured(config), run_dir / "config.yaml")  # for the audit
    console = PlainConsole(config.trainer.total_steps, sys.stdout)
    recorder = RunRecorder(run_dir, Tracker([JsonlSink(run_dir / METRICS_FILE)]), console, record_tokens=True)
    store = CheckpointStore(run_dir / CHECKPOINTS)
    checkpoint = store.newest_good(console.message)
    aside = SetAside(run_dir, 0 if checkpoint is None else checkpoint.global_steps)
    resumed = None if checkpoint is None else read(checkpoint, aside)
    state = recorder.state() if resumed is None else resumed.recorder
    recorder.restore(state, -1 if resumed is None else resumed.global_steps, aside)

    async def run() -> None:
        job = Job(config, token_s=0.002, train_s=0.02, recorder=recorder, resumed=resumed, recorded_in=run_dir)
        await job.run(store)

    asyncio.run(run())


if __name__ == "__main__":
    main()
