"""A supervised run from its first process to its summary: the train loop over conversations, without replicas."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.algorithm import Proximal
from configs.checkpoint import CHECKPOINTS
from configs.schema import Config
from configs.validate import ConfigError
from rollout.actors.place import own_place
from rollout.events.driver import DRIVER, NO_EVENTS, DriverEvents
from scripts.command.command import ending_early
from scripts.launch.cluster import cluster
from scripts.launch.conversations import encode_conversations, load_all
from scripts.launch.models import boot_model
from scripts.launch.nodes import check_nodes
from scripts.launch.placement import reserve
from scripts.launch.start import make_workers, owner, run_started
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore
from trainer.loop import TrainLoop
from trainer.supervised.demonstrations import DemonstrationSource, DemonstrationStream, Validator
from trainer.supervised.recorder import SUPERVISED, OtherConversationsError, SupervisedRecorder
from trainer.tracking.console import Console
from trainer.tracking.set_aside import SetAside
from trainer.worker.recovery import RecoveringWorkers
from weight_sync.transports.cleanup import release_all


def supervised(config: Config) -> Config:
    """Return the config of a run that samples nothing: without replicas, agent workers, critic, reference and versions
    that have sampled.

    The loss is the cross-entropy of the model's own probabilities, at temperature 1. A step is a version.
    """
    algorithm = replace(
        config.algorithm,
        advantage="grpo",
        proximal=Proximal.rollout,
        ce_coef=1.0,
        kl_loss_coef=0.0,
        kl_reward_coef=0.0,
        entropy_coef=0.0,
    )
    rollout = replace(config.rollout, num_replicas=0, num_agent_workers=0, temperature=1.0)
    weight_sync = replace(config.weight_sync, interval=1)
    return replace(config, algorithm=algorithm, rollout=rollout, weight_sync=weight_sync)


def read_supervised(checkpoint: Checkpoint) -> bytes:
    """Return the restored state of the recorder. Raise CheckpointError for a checkpoint of another kind of run."""
    try:
        return checkpoint.snapshot(SUPERVISED)
    except OSError as error:
        reason = "it is of no supervised run; model.path goes on from its weights"
        raise CheckpointError(f"{checkpoint.path} cannot be resumed: {reason}") from error


async def run_supervised(  # noqa: PLR0913
    config: Config,
    device: str,
    run_dir: Path,
    *,
    console: Console,
    recorder: SupervisedRecorder,
    resumed: tuple[Checkpoint, SetAside] | None = None,
    events: DriverEvents = NO_EVENTS,
) -> dict[str, Any]:
    """Run from the first process to the summary, and return it. An error is raised after every process has ended.

    Args:
        config: as `supervised` returns it.
        resumed: the checkpoint to go on from, and what takes the checkpoints of later steps.
    """
    rows = load_all(config)  # malformed data is an error before anything starts
    console.stage("starting Ray")
    async with cluster(config, device) as head:
        store = CheckpointStore(run_dir / CHECKPOINTS)
        events.emit(own_place().started(DRIVER))
        placement = await reserve(config, device, console.message)
        await check_nodes(config, device, run_dir, console.message)
        workers = make_workers(
            config,
            device,
            run_dir,
            store=store,
            placement=placement.trainer,
            report=console.message,
            emit=events.emit,
        )
        try:
            goes_on = resumed is not None and resumed[0].is_of(run_dir)
            path = await boot_model(config, run_dir, goes_on=goes_on)
            with console.during("encoding the conversations"):
                learned = await encode_conversations(config, path, rows, keep_template=True)
            console.message(learned.sentence(config))
            await _load_model(config, workers, path, console, resumed)
            stream = DemonstrationStream(learned.train, config.seed)
            _refuse_other_conversations(recorder, stream, resumed)
            if resumed is not None:  # not before: only now the checkpoint has proved usable
                store.set_aside_after(resumed[0].global_steps, resumed[1].move)
            checkpointer = Checkpointer(
                store=store,
                workers=workers,
                snapshots={},
                config=config.checkpoint,
                total_steps=config.trainer.total_steps,
                update_interval=config.weight_sync.interval,
                report=console.message,
                emit=events.emit,
            )
            size = config.trainer.prompts_per_step
            loop = TrainLoop(
                config=config,
                buffer=DemonstrationSource(stream, size, workers.global_steps, recorder.num_taken(size)),
                workers=workers,
                manager=None,
                evaluate=Validator(workers, learned.validation, config).evaluate if learned.validation else None,
                fleet_gauges=None,
                recorder=recorder,
                checkpointer=checkpointer,
                emit=events.emit,
                snapshot=SUPERVISED,
            )
            recorder.record_beginning(workers.global_steps, await workers.origin())
            started = run_started(config, workers.global_steps)
            events.emit(replace(started, group_size=1, max_staleness=0))
            console.stage("training")
            head.save = checkpointer.save_next if config.checkpoint.every else None
            with ending_early(loop, console.message):
                async with checkpointer:
                    await train(loop, workers.global_steps)
        finally:
            release_all(config.weight_sync, owner(run_dir))
        return recorder.write_summary({"conversations": len(stream), "too_long": learned.num_too_long})


async def train(loop: TrainLoop, first_step: int) -> None:
    """Take all steps, with a validation before the first and after the last, unless it is recorded already."""
    total_steps = loop.config.trainer.total_steps
    if first_step == 0:
        await _validate(loop, 0)
    await loop.run(first_step)
    if not loop.has_ended_early:
        await _validate(loop, total_steps)


async def _validate(loop: TrainLoop, global_steps: int) -> None:
    if loop.evaluate is not None and not loop.recorder.is_evaluated(global_steps):
        loop.recorder.record_evaluation(global_steps, await loop.evaluate())


async def _load_model(
    config: Config,
    workers: RecoveringWorkers,
    path: str,
    console: Console,
    resumed: tuple[Checkpoint, SetAside] | None,
) -> None:
    with console.during(f"loading the model in {config.trainer.num_ranks} train worker(s)"):
        num_parameters = await workers.setup(path)
        if resumed is not None:
            await workers.resume(resumed[0])
    console.message(f"model: {num_parameters / 1e6:.2f}M parameters")


def _refuse_other_conversations(
    recorder: SupervisedRecorder, stream: DemonstrationStream, resumed: tuple[Checkpoint, SetAside] | None
) -> None:
    try:
        recorder.begin(stream.checksum())
    except OtherConversationsError as error:
        assert resumed is not None
        raise ConfigError(f"resume={resumed[0].path}: {error} (sft.*, data.*, seed)") from error
