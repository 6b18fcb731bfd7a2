"""Trains again on recorded steps: the train workers of a run, without replicas and rollouts."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, Unpack, cast

from configs.checkpoint import CHECKPOINTS
from configs.runtime.deadline import within
from configs.schema import Config
from scripts.launch.cluster import set_up_in
from scripts.launch.conversations import encode_conversations, load_all
from scripts.observe.recorded_groups import RecordedStep
from scripts.replay.similarity import Rows, Similarity, StepRows
from trainer.batch import StepResult
from trainer.checkpoint.store import MODEL_FOLDER, TRAIN_FOLDER, Checkpoint, CheckpointStore
from trainer.step import AssembledStep, StepAssembler
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.tracking.proof import Origin
from trainer.worker.worker_group import TrainWorkerGroup

if TYPE_CHECKING:
    from scripts.replay.worker import ReplayWorker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def make_replay_worker(**arguments: Any) -> "ReplayWorker":
    """Make the worker of an actor, in its process."""
    from scripts.replay.worker import ReplayWorker

    return ReplayWorker(**arguments)


class ReplayWorkerGroup(TrainWorkerGroup):
    """The train workers on the driver's side. A replay that loses one of them fails."""

    def __init__(self, **arguments: Any):
        super().__init__(make_worker=make_replay_worker, **arguments)

    async def begin(self, weights: Sequence[Rows] | None = None) -> None:
        """Remember the weights of each rank as those of the replay's start; None: those that there are now."""
        each = [None] * len(self.actors) if weights is None else weights
        await self._on_each(_on(lambda worker, mine: worker.begin(mine)), each)

    async def began(self) -> list[Rows]:
        """Return the weights of the replay's start, by rank."""
        return await self._on_all(_on(lambda worker: worker.began()))

    async def step_rows(self) -> list[StepRows]:
        """Return the rows of every rank after a step."""
        return await self._on_all(_on(lambda worker: worker.step_rows()))

    async def compare(self, others: Sequence[StepRows]) -> Similarity:
        """Compare with the rows of another training on as many ranks."""
        return Similarity.total(await self._on_each(_on(lambda worker, other: worker.compare(other)), others))

    async def policy_difference(self, mine: Path, others: Path) -> tuple[float, float]:
        """Compare the policies of two saved states, as `ReplayWorker.policy_difference` does."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "comparing with a checkpoint"):
            return (await self._on_all(_on(lambda worker: worker.policy_difference(mine, others))))[0]


def _on(function: "Callable[[ReplayWorker, Unpack[Ts]], T]") -> Callable[[Any, Unpack[Ts]], T]:
    return cast("Callable[[Any, Unpack[Ts]], T]", function)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A step that was taken again."""

    assembled: AssembledStep
    result: StepResult


@dataclass(kw_only=True, eq=False)
class ReplayTrainer:
    """The training of a run by its records.

    Example:
        trainer = ReplayTrainer(config=config, device="cpu", model=model, folder=folder)
        origin = await trainer.start(None)
        step = await trainer.take(recorded, 0)
        trainer.close()
    """

    config: Config
    device: str
    model: str
    """The policy before the first step of the run, which is also its reference and the start of its critic."""
    folder: Path
    """The folder of the logs."""
    _workers: ReplayWorkerGroup = field(init=False)
    _assembler: StepAssembler = field(init=False)

    async def start(self, checkpoint: Path | None) -> Origin:
        """Load the model and the checkpoint. Return their origin."""
        config = self.config
        self._workers = ReplayWorkerGroup(
            config=config, device=self.device, on_start=set_up_in(self.folder, config.ray)
        )
        await self._workers.setup(self.model, checkpoint)
        await self._workers.begin()
        demonstrations = None
        if config.algorithm.ce_coef:
            learned = await encode_conversations(config, self.model, load_all(config))
            demonstrations = DemonstrationStream(learned.train, config.seed)
        self._assembler = StepAssembler(config=config, score=self._workers.score, demonstrations=demonstrations)
        return await self._workers.origin()

    async def take(self, recorded: RecordedStep, global_steps: int) -> ReplayedStep:
        """Take the step that `global_steps` others precede. The old logprobs of its tokens come from the records,
        because another training has other versions."""
        assembled = await self._assembler.assemble(recorded.groups, global_steps, recorded=recorded.old_logprobs)
        return ReplayedStep(assembled=assembled, result=await self._workers.train_step(assembled.batch, global_steps))

    async def similarity(self, other: "ReplayTrainer") -> Similarity:
        """Compare the last step with the same one of another training on as many ranks."""
        return await self._workers.compare(await other._workers.step_rows())

    async def go_on_with(self, config: Config) -> None:
        """Continue under another config as a resumed run does: from a checkpoint, in new processes."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            began = await self._workers.began()
            await self._save(Path(folder) / TRAIN_FOLDER)
            self.close()
            self.config = config
            await self.start(Path(folder) / TRAIN_FOLDER)
            await self._workers.begin(began if len(began) == config.trainer.num_ranks else None)

    async def policy_difference(self, checkpoint: Checkpoint) -> tuple[float, float]:
        """Compare the policy with that of a checkpoint, as `ReplayWorker.policy_difference` does."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            await self._save(Path(folder) / TRAIN_FOLDER)
            return await self._workers.policy_difference(Path(folder) / TRAIN_FOLDER, checkpoint.train_folder)

    async def save_checkpoint(self, run_dir: Path, global_steps: int) -> Checkpoint:
        """Save a checkpoint as a run does, for `scripts.evaluate`."""
        store = CheckpointStore(run_dir / CHECKPOINTS)
        aside = store.begin(global_steps)
        await self._save(aside / TRAIN_FOLDER)
        files = {f"{MODEL_FOLDER}/{name}": data for name, data in (await self._workers.model_files()).items()}
        marker = await asyncio.to_thread(store.seal, aside, global_steps, files)
        return store.publish(aside, global_steps, marker)

    def close(self) -> None:
        self._workers.kill()

    async def _save(self, folder: Path) -> None:
        await self._workers.stage_checkpoint(folder)
        await self._workers.finish_checkpoint()
