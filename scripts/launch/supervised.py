"""A supervised run from its first process to its summary: train workers, and nothing besides."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.checkpoint import CHECKPOINTS
from configs.schema import Config
from configs.validate import ConfigError
from rollout.events.driver import NO_EVENTS, DriverEvents
from scripts.launch import budget
from scripts.launch.cluster import cluster, needed_resources
from scripts.launch.conversations import Learned, conversations_here, encode_conversations, load_all
from scripts.launch.machine import this_machine
from scripts.launch.model_shape import model_shape
from scripts.launch.models import boot_model
from scripts.launch.placement import reserve
from scripts.launch.start import make_workers, owner
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.store import Checkpoint, CheckpointError, CheckpointStore
from trainer.learning_rate import num_warmup_steps
from trainer.supervised.demonstrations import DemonstrationStream
from trainer.supervised.loop import SupervisedLoop
from trainer.supervised.recorder import SNAPSHOT, OtherConversationsError, SupervisedRecorder
from trainer.tracking.console import Console
from trainer.tracking.events.kinds import RunStarted
from trainer.tracking.set_aside import SetAside
from weight_sync.transports.cleanup import release_all


def supervised(config: Config) -> Config:
    """The config of a run that samples nothing: without replicas, agent workers, critic and reference. The loss is the
    cross-entropy of the model's own probabilities, at temperature 1."""
    algorithm = replace(
        config.algorithm, advantage="grpo", ce_coef=1.0, kl_loss_coef=0.0, kl_reward_coef=0.0, entropy_coef=0.0
    )
    rollout = replace(config.rollout, num_replicas=0, num_agent_workers=0, temperature=1.0)
    return replace(config, algorithm=algorithm, rollout=rollout)


def supervised_plan(config: Config, device: str, run_dir: Path) -> str:
    """What the run would start and learn, in words. Raises ConfigError for conversations that cannot be learned."""
    trainer, model = config.trainer, config.model
    learned = conversations_here(config)
    budget.refuse_without_memory(config, device)
    memory = budget.memory_parts(config, model_shape(config), device, this_machine(config))
    claims = ", ".join(f"{count} {name}" for name, count in needed_resources(config, device).items() if count)
    parts = {
        "model": model.path or f"made here, {model.num_layers} layers of width {model.hidden_size}, random weights",
        "claims": claims,
        "trainer": f"{trainer.num_ranks} x FSDP {trainer.dtype.value} on {device}, {trainer.layout.value} rows",
        "training": f"{trainer.total_steps} steps of {trainer.prompts_per_step} conversations",
        "optimizer": f"AdamW, lr {trainer.lr:g} after {num_warmup_steps(trainer)} steps, then "
        f"{trainer.lr_schedule.value}, {trainer.optimizer_steps_per_batch} step(s) per batch",
        **_shown(config, learned),
        **memory,
        "run folder": str(run_dir),
    }
    return "".join(f"{name.replace('_', ' '):>13}: {text}\n" for name, text in parts.items())


def _shown(config: Config, learned: Learned | str) -> dict[str, str]:
    """What is learned; or why the conversations cannot be encoded here."""
    if isinstance(learned, str):
        return {"conversations": learned}
    taken = config.trainer.total_steps * config.trainer.prompts_per_step
    epochs = f"{taken / len(learned.train):.3g} ({taken:,} of {len(learned.train):,})" if learned.train else "none"
    return {"conversations": learned.sentence(config), "epochs": epochs}


def read_supervised(checkpoint: Checkpoint) -> bytes:
    """What the recorder restores. Raises CheckpointError."""
    try:
        return checkpoint.snapshot(SNAPSHOT)
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
    """Returns the summary. An error anywhere is raised here, after every process has ended.

    `config`: of `supervised`. `resumed`: the checkpoint, and what takes those of later steps.
    """
    rows = load_all(config)  # malformed data is an error before anything starts
    budget.refuse_without_memory(config, device)
    console.stage("starting Ray")
    async with cluster(config, device):
        store = CheckpointStore(run_dir / CHECKPOINTS)
        placement = await reserve(config, device)
        told = {"report": console.message, "emit": events.emit}
        workers = make_workers(config, device, run_dir, store=store, placement=placement.trainer, **told)
        try:
            path = await boot_model(config, run_dir)
            learned = await _encoded(config, path, rows, console)
            first_step = await _set_up(config, workers, path, console, resumed)
            stream = DemonstrationStream(learned.train, config.seed)
            _begin(recorder, stream, resumed, store)
            checkpointer = Checkpointer(
                store=store,
                workers=workers,
                snapshots={},
                config=config.checkpoint,
                total_steps=config.trainer.total_steps,
                update_interval=1,
                **told,
            )
            loop = SupervisedLoop(
                config=config,
                train=stream,
                validation=learned.validation,
                workers=workers,
                recorder=recorder,
                checkpointer=checkpointer,
                emit=events.emit,
            )
            events.emit(_started(config, first_step))
            console.stage("training")
            async with checkpointer:
                await loop.run(first_step)
        finally:
            release_all(config.weight_sync, owner(run_dir))
        return recorder.write_summary({"conversations": len(stream), "too_long": learned.num_too_long})


async def _encoded(config: Config, path: str, rows: Any, console: Console) -> Learned:
    with console.during("encoding the conversations"):
        learned = await encode_conversations(config, path, rows, keep_template=True)
    console.message(learned.sentence(config))
    return learned


async def _set_up(
    config: Config, workers: Any, path: str, console: Console, resumed: tuple[Checkpoint, SetAside] | None
) -> int:
    """Load the model, and what is resumed. Returns the first step to take."""
    with console.during(f"loading the model in {config.trainer.num_ranks} train worker(s)"):
        num_parameters = await workers.setup(path)
        if resumed is not None:
            await workers.resume(resumed[0])
    console.message(f"model: {num_parameters / 1e6:.2f}M parameters")
    return 0 if resumed is None else resumed[0].global_steps


def _begin(
    recorder: SupervisedRecorder,
    stream: DemonstrationStream,
    resumed: tuple[Checkpoint, SetAside] | None,
    store: CheckpointStore,
) -> None:
    try:
        recorder.begin(stream.checksum())
    except OtherConversationsError as error:
        assert resumed is not None
        raise ConfigError(f"resume={resumed[0].path}: {error} (sft.*, data.*, seed)") from error
    if resumed is not None:
        store.set_aside_after(resumed[0].global_steps, resumed[1].move)


def _started(config: Config, first_step: int) -> RunStarted:
    return RunStarted(
        global_steps=first_step,
        total_steps=config.trainer.total_steps,
        prompts_per_step=config.trainer.prompts_per_step,
        group_size=1,
        max_staleness=0,
        num_replicas=0,
        num_ranks=config.trainer.num_ranks,
        host=socket.gethostname(),
    )
