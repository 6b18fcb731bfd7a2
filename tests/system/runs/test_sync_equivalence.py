"""`max_staleness=0` is the synchronous run: the same batches, the same losses."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from configs.load import load, register
from configs.schema import Config
from rollout.progress import Attempt
from rollout.prompts import PromptStream
from rollout.types import TrajectoryGroup
from scripts.launch.data import load_rows
from scripts.launch.driver import training_sampling
from scripts.launch.run import train
from scripts.launch.start import StartedRun, make_workers, owner, start
from trainer.advantages.credit import assign_credit
from trainer.batch import assemble
from trainer.tokens import sampled_tokens
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import RunCounts
from trainer.worker.recovery import RecoveringUpdater
from weight_sync.checkpoint_manager import CheckpointManager
from weight_sync.transports.cleanup import release_all

STEPS = 4
OVERRIDES = [
    "model=tiny",
    "device=cpu",
    f"trainer.total_steps={STEPS}",
    "trainer.prompts_per_step=4",
    "trainer.eval_every=0",
    "checkpoint.every=0",
    "algorithm.group_size=4",
    "model.warmup_steps=0",
    "data.num_train=50",
    "data.num_val=8",
    "rollout.max_staleness=0",
    "rollout.seeded_sampling=true",
    "rollout.max_num_seqs=16",
    "rollout.reward=tests.support.rewards:length_parity",
]


@dataclass
class Recorded:
    """What a run trained on, and what came out."""

    groups: list[Sequence[TrajectoryGroup]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    counts: RunCounts = field(default_factory=RunCounts)

    def record_step(
        self, global_steps: int, metrics: dict[str, float], groups: Sequence[TrajectoryGroup], advantages: Any
    ) -> None:
        assert global_steps == len(self.groups) + 1
        self.groups.append(groups)
        self.metrics.append(metrics)

    def record_evaluation(self, global_steps: int, evaluation: Any) -> None:
        assert evaluation.versions == (global_steps,)

    def record_skipped_step(self, global_steps: int, reason: str, groups: Any, advantages: Any) -> tuple[int, str]:
        raise RuntimeError(f"step {global_steps}: {reason}")

    def write_summary(self, more: dict[str, Any]) -> dict[str, Any]:
        return more


async def with_new_workers(config: Config, parts: StartedRun, run_dir: Path, console: PlainConsole) -> StartedRun:
    """The same replicas, and workers that start from the first weights again."""
    workers = make_workers(config, "cpu", run_dir, store=parts.store, report=console.message)
    await workers.setup(str(run_dir / "untrained_model"))
    manager = CheckpointManager(workers, parts.fleet, config.weight_sync)
    return replace(parts, workers=workers, manager=RecoveringUpdater(manager, workers))


async def synchronous_run(config: Config, parts: StartedRun) -> Recorded:
    """Generate a batch, train on it, update; nothing overlaps."""
    recorded, stream = Recorded(), PromptStream(parts.train_rows, config.seed)
    replica = parts.replicas[0].name
    await parts.manager.update_weights(0)
    for step in range(STEPS):
        prompts = [stream.next() for _ in range(config.trainer.prompts_per_step)]
        groups: list[TrajectoryGroup] = await asyncio.gather(
            *(
                parts.agents.run_group(
                    prompt, replica, training_sampling(config), config.algorithm.group_size, Attempt()
                )
                for prompt in prompts
            )
        )
        credit = assign_credit(groups, sampled_tokens(groups, step), {}, config, step)
        batch = assemble(
            groups,
            credit.tokens,
            layout=config.trainer.layout,
            num_ranks=1,
            tokens_per_micro_batch=config.trainer.tokens_per_micro_batch,
            keep_idle=False,
        )
        metrics = await parts.workers.train_step(batch, step)
        await parts.manager.update_weights(step + 1)
        values = {key: metric.value for key, metric in metrics.items()}
        recorded.record_step(step + 1, values, groups, credit.advantages)
    return recorded


@pytest.mark.usefixtures("ray_cluster")
def test_no_staleness_is_the_synchronous_run(tmp_path: Path) -> None:
    register()
    with initialize_config_module("configs", version_base="1.3"):
        config = load(compose("train", overrides=OVERRIDES))
    with (tmp_path / "console.log").open("w") as output:
        console = PlainConsole(STEPS, output)

        async def scenario() -> tuple[Recorded, Recorded, dict[str, Any]]:
            async with asyncio.timeout(250):
                parts = await start(config, "cpu", tmp_path, rows=load_rows(config), console=console)
                asynchronous = Recorded()
                recorder: Any = asynchronous
                summary = await train(config, parts, console=console, recorder=recorder)
                return (
                    asynchronous,
                    await synchronous_run(config, await with_new_workers(config, parts, tmp_path, console)),
                    summary,
                )

        try:
            asynchronous, synchronous, summary = asyncio.run(scenario())
        finally:
            release_all(config.weight_sync, owner(tmp_path))

    assert summary["trajectories_started"] == summary["engine_requests"] == STEPS * 4 * 4
    for step in range(STEPS):
        for ours, theirs in zip(asynchronous.groups[step], synchronous.groups[step], strict=True):
            assert ours.prompt == theirs.prompt
            for one, other in zip(ours.trajectories, theirs.trajectories, strict=True):
                assert one.spans == other.spans
                assert {span.global_steps for span in one.spans} == {step}
                np.testing.assert_array_equal(one.response_ids, other.response_ids)
                np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-5)
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert asynchronous.metrics[step][key] == pytest.approx(synchronous.metrics[step][key], rel=1e-4, abs=1e-6)
        assert asynchronous.metrics[step]["actor/grad_norm"] > 0
        assert asynchronous.metrics[step]["actor/rollout_logprob_diff_max"] < 1e-4
        assert asynchronous.metrics[step]["staleness/max"] == 0
