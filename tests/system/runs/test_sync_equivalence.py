"""`max_staleness=0` is the synchronous run: the same batches, the same losses."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema import Config
from rollout.progress import Attempt
from rollout.prompts import PromptStream
from rollout.types import TrajectoryGroup
from scripts.bench.trainings import another_run
from scripts.launch.data import load_sources
from scripts.launch.driver import training_sampling
from scripts.launch.run import Training
from scripts.launch.start import StartedRun, Starter, make_workers, owner
from tests.support.compose import resolve
from tests.support.rollouts import group_of
from tests.support.sequences import only
from trainer.advantages.credit import assign_credit
from trainer.batch import assemble
from trainer.tokens import sampled_tokens
from trainer.tracking.console import PlainConsole
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import Tracker
from weight_sync.transports.cleanup import release_all

STEPS = 4
OVERRIDES = f"""
model=tiny device=cpu trainer.total_steps={STEPS} trainer.prompts_per_step=4 trainer.eval_every=0 checkpoint.every=0
algorithm.group_size=4 model.warmup_steps=0 data.num_train=50 data.num_val=8
rollout.max_staleness=0 rollout.seeded_sampling=true rollout.max_num_seqs=16
rollout.reward=tests.support.rewards:length_parity
""".split()


Steps = list[tuple[Sequence[TrajectoryGroup], dict[str, float]]]
"""The groups that each step was trained on, and its metrics."""


class Recorder(RunRecorder):
    def __init__(self, run_dir: Path, console: PlainConsole):
        super().__init__(run_dir, Tracker([]), console)
        self.steps: Steps = []

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        super().record_step(global_steps, metrics, groups, advantages, tokens, evidence)
        self.steps.append((groups, metrics))


async def with_new_workers(config: Config, parts: StartedRun, run_dir: Path, console: PlainConsole) -> StartedRun:
    """The same replicas, and workers that start from the first weights again."""
    workers = make_workers(config, "cpu", run_dir, store=parts.store, report=console.message)
    await workers.setup(str(run_dir / "untrained_model"))
    return await another_run(config, parts, workers)


async def synchronous_run(config: Config, parts: StartedRun) -> Steps:
    """Generate a batch, train on it, update; nothing overlaps."""
    steps, stream = [], PromptStream(parts.rows.train, config.seed)
    replica = parts.replicas[0].name
    await parts.manager.update_weights(0)
    for step in range(STEPS):
        prompts = [stream.next() for _ in range(config.trainer.prompts_per_step)]
        groups: list[TrajectoryGroup] = await asyncio.gather(
            *(
                group_of(
                    parts.agents.run_group(
                        prompt, replica, training_sampling(config), config.algorithm.group_size, Attempt()
                    )
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
        metrics = (await parts.workers.train_step(batch, step)).metrics
        await parts.manager.update_weights(step + 1)
        steps.append((groups, {key: metric.value for key, metric in metrics.items()}))
    return steps


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_no_staleness_is_the_synchronous_run(tmp_path: Path) -> None:
    config = resolve(*OVERRIDES)
    with (tmp_path / "console.log").open("w") as output:
        console = PlainConsole(STEPS, output)

        async def scenario() -> tuple[Steps, Steps, dict[str, Any]]:
            async with asyncio.timeout(600):
                rows = load_sources(config)
                parts = await Starter(config=config, device="cpu", run_dir=tmp_path, rows=rows, console=console).start()
                recorder = Recorder(tmp_path, console)
                training = Training(config=config, started=parts, console=console, recorder=recorder)
                summary = await training.run()
                again = await with_new_workers(config, parts, tmp_path, console)
                return recorder.steps, await synchronous_run(config, again), summary

        try:
            asynchronous, synchronous, summary = asyncio.run(scenario())
        finally:
            release_all(config.weight_sync, owner(tmp_path))

    assert summary["trajectories_started"] == summary["engine_requests"] == STEPS * 4 * 4
    assert len(asynchronous) == STEPS
    for step, (ours, theirs) in enumerate(zip(asynchronous, synchronous, strict=True)):
        for our_group, their_group in zip(ours[0], theirs[0], strict=True):
            assert our_group.prompt == their_group.prompt
            for one, other in zip(our_group.trajectories, their_group.trajectories, strict=True):
                assert only(one).spans == only(other).spans
                assert {span.global_steps for span in only(one).spans} == {step}
                np.testing.assert_array_equal(only(one).response_ids, only(other).response_ids)
                np.testing.assert_allclose(only(one).rollout_logprobs, only(other).rollout_logprobs, atol=1e-5)
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert ours[1][key] == pytest.approx(theirs[1][key], rel=1e-4, abs=1e-6)
        assert ours[1]["actor/grad_norm"] > 0 and ours[1]["actor/rollout_logprob_diff_max"] < 1e-4
        assert ours[1]["staleness/max"] == 0
