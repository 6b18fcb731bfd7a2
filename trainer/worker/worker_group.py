"""Train workers in Ray actors, one per FSDP rank."""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from configs.runtime.deadline import within
from configs.runtime.environment import QUIET_NCCL
from configs.schema import Config
from rollout.actors.carried import as_raised, carries_errors, check
from rollout.actors.place import Place, own_place
from rollout.events.event import Emit, nobody
from rollout.types import FloatArray
from trainer.batch import StepBatch, StepResult
from trainer.checkpoint.store import METADATA, CheckpointError
from trainer.metrics import merge_metrics
from trainer.old_logprobs import MixedBatch, OldLogprobs
from trainer.tracking.events.kinds import RankPublished
from trainer.tracking.proof import Origin
from trainer.worker.recovery import TrainWorkerUnreachableError
from weight_sync.protocol import Manifest, PublishOrder, combine, merge

if TYPE_CHECKING:
    from trainer.worker.worker import MakeSender, StateCopy, TrainWorker

logger = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M")
ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def no_sender(rank: int, num_ranks: int, device: Any) -> Any:
    """Make no sender: the weights of these workers are published to nobody."""


def make_train_worker(*, config: Config, device: str, make_sender: "MakeSender") -> "TrainWorker":
    """Make the worker of an actor, in its process."""
    from trainer.worker.worker import TrainWorker

    return TrainWorker(config=config, device=device, make_sender=make_sender)


class TrainWorkerActor:
    """TrainWorker as a Ray actor. It imports torch inside its process only: the driver does without.

    `call` runs one at a time and always in one thread: CUDA's device belongs to a thread. The others run beside it.
    """

    def __init__(
        self,
        on_start: Callable[[], None],
        make_worker: "Callable[..., TrainWorker]",
        **arguments: Any,
    ):
        on_start()
        started = time.perf_counter()
        self._worker = make_worker(**arguments)
        self._import_s = time.perf_counter() - started
        self._held: deque[StateCopy] = deque(maxlen=2)

    def import_s(self) -> float:
        """Return the seconds that imports took in this process."""
        return self._import_s

    @carries_errors
    def begin(self, release: Callable[[], None]) -> tuple[Place, int]:
        """Remove what dead workers have published on this machine. Return this machine, and a port that is free there,
        for the process group."""
        release()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return own_place(), probe.getsockname()[1]

    def call(self, function: "Callable[..., T]", *args: Any) -> T:
        return carries_errors(_ends_without_device(function))(self._worker, *args)

    def copy_state(self) -> "tuple[StateCopy, str]":
        """Return a copy of this rank's state, and the node where Ray keeps it, also when this process has ended."""
        return self.call(lambda worker: worker.copied_state()), ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")
    def hold(self, copy: "StateCopy") -> None:
        """Keep the copy of another rank, whose machine may die, on this one: the newest, and the one before it while
        not all ranks have a newer one."""
        self._held.append(copy)

    @ray.method(concurrency_group="control")
    def call_beside(self, function: "Callable[[TrainWorker], T]") -> T:
        return carries_errors(function)(self._worker)

    @ray.method(concurrency_group="control")
    def is_alive(self) -> bool:
        return True


class DriversMachine:
    """Reads and writes the driver's disk for train workers on other machines (`DriversDisk`), in a process beside the
    driver: the driver's own does not wait for a disk."""

    @carries_errors
    def call(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


# Functions for `DriversMachine.call`. They are here because its process does without torch.


def read_part(path: Path, offset: int, size: int) -> bytes:
    """Read at most `size` bytes; fewer at the end of the file."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def write_part(path: Path, offset: int, data: bytes) -> None:
    """Write into a file that exists. OSError where a save was given up and its folder removed."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


class TrainWorkerGroup:
    """The train workers on the driver's side. `RecoveringWorkers` wraps it, and restarts it when a worker is lost.

    Calls raise TimeoutError, which names the key, past their deadlines, and TrainWorkerUnreachableError.

    Example:
        group = TrainWorkerGroup(config=config, device="cuda", make_sender=make_sender, on_start=on_start)
        await group.setup("Qwen/Qwen3-0.6B")
        result = await group.train_step(batch, global_steps=0)
        manifest = await group.publish(order)
    """

    def __init__(
        self,
        *,
        config: Config,
        device: str,
        make_sender: "MakeSender" = no_sender,
        on_start: Callable[[str], Callable[[], None]],
        release: Callable[[], None] = lambda: None,
        placement: PlacementGroup | None = None,
        emit: Emit = nobody,
        make_worker: "Callable[..., TrainWorker]" = make_train_worker,
    ):
        """Start a worker for each rank.

        Args:
            release: removes what dead workers have published. It is called in the process of each rank, before
                anything is published.
            placement: has a bundle for each rank, also for those that start again; None leaves the ranks to Ray.
            make_worker: takes the arguments of `make_train_worker`. It is called in the worker's process.
        """
        self._trainer = config.trainer
        self._emit = emit
        self._checkpoint_timeout_s = config.checkpoint.timeout_s
        self._release = release
        has_spares = config.trainer.spare_processes
        share = 0.5 if has_spares else 1.0  # of what is reserved for a rank: Ray shows both processes the same GPU
        options: dict[str, Any] = {
            "num_cpus": share,
            "num_gpus": share * config.gpu_share if device == "cuda" else 0,
            "runtime_env": {"env_vars": ENV if device == "cpu" else QUIET_NCCL},
            "concurrency_groups": {"control": 2},
        }
        remote_class: Any = ray.remote(**options)(TrainWorkerActor)

        def make_actor(rank: int) -> Any:
            strategy = "DEFAULT" if placement is None else PlacementGroupSchedulingStrategy(placement, rank)
            placed = remote_class.options(scheduling_strategy=strategy)
            arguments = {"config": config, "device": device, "make_sender": make_sender}
            return placed.remote(on_start(f"trainer-{rank}"), make_worker, **arguments)

        self._make_actor = make_actor
        self._has_spares = has_spares
        self.actors: list[Any] = [make_actor(rank) for rank in range(config.trainer.num_ranks)]
        self.spares: list[Any] = []
        """The processes that take over in the next start, by rank, with trainer.spare_processes."""
        self._model_path = ""
        self._drivers_machine: Any = None
        self.start_s: dict[str, float] = {}
        """The seconds of each part of the last start."""

    async def setup(self, model_path: str, checkpoint: Path | None = None) -> int:
        """Load the model on every rank, and then the checkpoint. Return the model's parameter count.

        Raises:
            ConfigError: the model cannot be trained with this config.
        """
        self._model_path = model_path
        started = time.perf_counter()
        async with within(self._trainer.start_timeout_s, "trainer.start_timeout_s", "starting the train workers"):
            imports_s = max(await _all([actor.import_s.remote() for actor in self.actors]))
            processes_s = time.perf_counter() - started
            places, ports = zip(*await _all([actor.begin.remote(self._release) for actor in self.actors]), strict=True)
            world_size, ranks = len(places), [str(place) for place in places]
            for rank, place in enumerate(places):
                self._emit(place.started(f"trainer-{rank}"))
            master = f"{places[0].address}:{ports[0]}"
            parameters = await self._on_each(
                lambda worker, rank: worker.setup(model_path, rank, world_size, master, ranks), range(world_size)
            )
            imports_s = min(imports_s, processes_s)  # those of a process that was ready cost nothing now
            model_s = time.perf_counter() - started - processes_s
            self.start_s = {"processes": processes_s - imports_s, "imports": imports_s, "model": model_s}
            if checkpoint is not None:
                await self.load_checkpoint(checkpoint)
        return parameters[0]

    def keep_spares(self) -> None:
        """Start the spare processes, with trainer.spare_processes and where there are none. Called when the ranks have
        trained: imports beside a start, or beside steps that are trained again, would slow them down."""
        if not self._has_spares or self.spares:
            return
        model_path = self._model_path
        self.spares = [self._make_actor(rank) for rank in range(len(self.actors))]
        for spare in self.spares:
            spare.call.remote(lambda worker: worker.import_model(model_path))  # nobody waits: `setup` imports, too

    async def start_again(self) -> None:
        """Start again from the first policy, in the spare processes or in new ones."""
        spares, self.spares = self.spares, []
        for actor in self.actors:
            ray.kill(actor)
        lives = await asyncio.gather(*(self._lives(spare) for spare in spares))
        ready = {rank: spare for rank, spare in enumerate(spares) if lives[rank]}
        self.actors = [ready.get(rank) or self._make_actor(rank) for rank in range(len(self.actors))]
        await self.setup(self._model_path)

    async def _lives(self, spare: Any) -> bool:
        """Return false for a process that has ended; one that is still importing counts as living."""
        try:
            async with asyncio.timeout(self._trainer.answer_timeout_s):
                await spare.is_alive.remote()
        except RayActorError:
            return False
        except TimeoutError:
            pass
        return True

    async def copy_state(self) -> list[Any]:
        """Copy the state of every rank into the memory of its machine and, where ranks are on several, of another one.
        Return references to the copies by rank, which are as good as the copies while they are held.

        Raises CheckpointError where there is no room.
        """
        try:
            async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "copying the state in memory"):
                copies = [actor.copy_state.options(num_returns=2).remote() for actor in self.actors]
                nodes = await _all([node for _, node in copies])
                others = [_next_elsewhere(nodes, rank) for rank in range(len(nodes))]
                held = [
                    self.actors[other].hold.remote(copy)
                    for (copy, _), other in zip(copies, others, strict=True)
                    if other is not None
                ]
                await _all(held)
        except RayError as error:
            if isinstance(error, RayActorError):
                raise
            raise CheckpointError(f"the state cannot be copied in memory: {_reason(error)}") from error
        return [copy for copy, _ in copies]

    async def load_copies(self, copies: Sequence[Any]) -> None:
        """Load what `copy_state` returned into the ranks that `start_again` made."""
        started = time.perf_counter()
        async with within(self._trainer.start_timeout_s, "trainer.start_timeout_s", "loading the copies in memory"):
            await self._on_each(lambda worker, copy: worker.load_copy(copy), copies)
        self.start_s["state"] = time.perf_counter() - started

    async def load_checkpoint(self, checkpoint: Path) -> None:
        """Load the checkpoint into the ranks that `setup` made."""
        async with within(self._trainer.start_timeout_s, "trainer.start_timeout_s", f"loading {checkpoint}"):
            started = time.perf_counter()
            metadata = await asyncio.to_thread((checkpoint / METADATA).read_bytes)
            disks = await self._disks(checkpoint, metadata)
            await self._on_each(lambda worker, disk: worker.load_checkpoint(checkpoint, disk), disks)
            self.start_s["state"] = time.perf_counter() - started

    async def _disks(self, folder: Path, metadata: bytes | None = None) -> list[Any]:
        """Return by rank what it reaches the folder through: None where its machine has it, else the driver's machine.
        `metadata` as in `_sees`."""
        seen = await self._on_all(lambda worker: _sees(folder, metadata))
        if not all(seen) and self._drivers_machine is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            # It holds nothing: where its process dies, one save fails, and the next has another process.
            machine: Any = ray.remote(num_cpus=0, max_restarts=-1)(DriversMachine)
            self._drivers_machine = machine.options(scheduling_strategy=here).remote()
        return [None if sees else self._drivers_machine for sees in seen]

    async def find_lost(self) -> str | None:
        """Return a sentence about a train worker that has died or does not answer, or None."""
        timeout_s, key = self._trainer.answer_timeout_s, "trainer.answer_timeout_s"
        questions = (
            check(f"train worker {rank}", actor.is_alive.remote(), timeout_s, key)
            for rank, actor in enumerate(self.actors)
        )
        return next(filter(None, await asyncio.gather(*questions)), None)

    async def stage_checkpoint(self, folder: Path) -> None:
        """Copy the state of all ranks into host memory and begin to write it. CheckpointError if they cannot now."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "staging the checkpoint"):
            try:
                disks = await self._disks(folder)
                # All first: those that begin would wait for one that refuses, in a group of their own.
                await self._on_all(lambda worker: worker.refuse_while_writing())
                await self._on_each(lambda worker, disk: worker.stage_checkpoint(folder, disk), disks)
            except RuntimeError as error:
                raise CheckpointError(f"the train workers cannot stage: {_reason(error)}") from error

    async def finish_checkpoint(self) -> None:
        """Wait until all ranks have written what was staged, concurrently with training. Raises CheckpointError."""
        try:
            async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "writing the checkpoint"):
                await _all([a.call_beside.remote(lambda worker: worker.finish_checkpoint()) for a in self.actors])
        except Exception as error:
            raise CheckpointError(f"the train workers could not write: {_reason(error)}") from error

    async def model_files(self) -> dict[str, bytes]:
        """Return config and tokenizer of the policy, by file name."""
        async with within(self._checkpoint_timeout_s, "checkpoint.timeout_s", "reading the model's config"):
            [files] = await _all([self.actors[0].call.remote(lambda worker: worker.model_files())])
            return files

    async def score(self, batch: StepBatch) -> dict[str, FloatArray]:
        """Return `TrainWorker.score` by name, [T] over the step's loss tokens."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "scoring the batch"):
            scores = await self._on_data_parallel(lambda worker, mine: worker.score(mine), batch.micro_batches)
        return {name: batch.gather([rank_scores[name] for rank_scores in scores]) for name in scores[0]}

    async def old_logprobs(self, batch: MixedBatch) -> OldLogprobs:
        """Return log pi_old of the step's stale tokens."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "scoring the batch"):
            versions = batch.versions
            rows = await self._on_each(lambda worker, mine: worker.old_logprobs(mine, versions), batch.rows)
            return batch.gather(rows)

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        """Return log pi, [T] over the step's loss tokens."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "computing logprobs"):
            logprobs = await self._on_data_parallel(lambda worker, mine: worker.logprobs(mine), batch.micro_batches)
            return batch.gather(logprobs)

    async def next_token_logprobs(self, batch: StepBatch) -> FloatArray:
        """Return log pi of every token in the places of the step's loss tokens: [T, V]."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "computing logprobs"):
            per_rank = self._of_ranks(batch.micro_batches)
            # Of all: those that share rows have computed a part each.
            answers = await self._on_each(lambda worker, mine: worker.next_token_logprobs(mine), per_rank)
        parts = [part for answer in answers for part in answer if len(part[0])]
        places, rows = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
        logprobs = np.empty((batch.num_tokens, rows.shape[1]), np.float32)
        logprobs[places] = rows
        return logprobs

    async def train_step(self, batch: StepBatch | None, global_steps: int) -> StepResult:
        """Train on the batch on all ranks. Without a batch, only count the step. Return the combined result."""
        micro_batches = [None] * self._trainer.data_parallel if batch is None else batch.micro_batches
        plan = None if batch is None else batch.optimizer_steps
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", f"training step {global_steps}"):
            results = await self._on_data_parallel(
                lambda worker, mine: worker.train_step(mine, global_steps, plan), micro_batches
            )
        tokens = [result.tokens for result in results if result.tokens is not None]
        return StepResult(
            merge_metrics([result.metrics for result in results]),
            batch.gather_trained(tokens) if batch is not None and tokens else None,
            results[0].weights,
        )

    async def origin(self) -> Origin:
        """Return the origin of the weights, and the device and the software that compute."""
        async with within(self._trainer.step_timeout_s, "trainer.step_timeout_s", "reading the weights"):
            return (await self._on_all(lambda worker: worker.origin()))[0]

    async def publish(self, order: PublishOrder) -> Manifest:
        """Let every rank offer its rows."""
        started = time.perf_counter()

        async def offered(rank: int, actor: Any) -> Manifest:
            [part] = await _all([actor.call.remote(lambda worker: worker.publish(order))], rank)
            seconds = time.perf_counter() - started
            self._emit(RankPublished(global_steps=order.global_steps, rank=rank, seconds=seconds))
            return part

        return merge(await asyncio.gather(*(offered(rank, actor) for rank, actor in enumerate(self.actors))))

    async def send(self, manifest: Manifest) -> int:
        """Send the weights and return their checksum. If it fails on one rank or is cancelled, all sides stop."""
        if manifest.checksum is not None:
            return manifest.checksum
        try:
            return combine(await self._on_all(lambda worker: worker.send(manifest)))
        except BaseException:
            for actor in self.actors:
                actor.call_beside.remote(lambda worker: worker.stop_sending(manifest))
            raise

    def _of_ranks(self, micro_batches: Sequence[M]) -> list[M]:
        """Give the ranks that share rows (trainer.sequence_parallel), which are neighbours, the same micro-batches."""
        return [mine for mine in micro_batches for _ in range(self._trainer.sequence_parallel)]

    async def _on_data_parallel(self, function: "Callable[[TrainWorker, M], T]", micro_batches: Sequence[M]) -> list[T]:
        """Call the function with the micro-batches of each rank. Of ranks that share rows, all answer the same: return
        the first one's."""
        return (await self._on_each(function, self._of_ranks(micro_batches)))[:: self._trainer.sequence_parallel]

    async def _on_all(self, function: "Callable[[TrainWorker], T]") -> list[T]:
        return await _all([actor.call.remote(function) for actor in self.actors])

    async def _on_each(self, function: "Callable[[TrainWorker, M], T]", per_rank: Sequence[M]) -> list[T]:
        """Call the function in each worker's process, with what is its own."""
        return await _all([a.call.remote(function, mine) for a, mine in zip(self.actors, per_rank, strict=True)])

    def kill(self) -> None:
        for actor in [*self.actors, *self.spares]:
            ray.kill(actor)


async def _all(calls: Sequence[Any], first: int = 0) -> list[Any]:
    """Return the answers by rank. Raise what was raised there. `first`: the rank of the first call."""
    return await asyncio.gather(*(_answer(call, f"train worker {rank}") for rank, call in enumerate(calls, first)))


async def _answer(call: Any, worker: str) -> Any:
    """Return the answer of a call. Raise what was raised there, and TrainWorkerUnreachableError where the connection
    broke."""
    try:
        return await as_raised(call, worker)
    except ActorUnavailableError as error:
        raise TrainWorkerUnreachableError(f"{worker} was out of reach during a call") from error


def _ends_without_device(function: Callable[..., T]) -> Callable[..., T]:
    """End this process where the function loses its GPU or the other ranks to an error of CUDA or of NCCL: nothing that
    runs here works from then on, and a worker whose process has ended is started again."""

    def call(*args: Any) -> T:
        try:
            return function(*args)
        except RuntimeError as error:
            import torch

            if not isinstance(error, torch.AcceleratorError | torch.distributed.DistBackendError):
                raise
            logger.exception("this process ends, for another to take its place")
            os._exit(1)

    return call


def _sees(folder: Path, metadata: bytes | None) -> bool:
    """Return whether a folder of the driver's machine is on this one too.

    Args:
        metadata: what its METADATA holds. None: it is still empty, and has a name that no other folder has.
    """
    file = folder / METADATA
    return folder.parent.is_dir() if metadata is None else file.is_file() and file.read_bytes() == metadata


def _next_elsewhere(nodes: Sequence[str], rank: int) -> int | None:
    """Return the next rank on another node, or None if all are on one."""
    others = (place % len(nodes) for place in range(rank + 1, rank + len(nodes)))
    return next((other for other in others if nodes[other] != nodes[rank]), None)


def _reason(error: Exception) -> str:
    """Return the error's first line: Ray's own, of a worker that died, have many."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
