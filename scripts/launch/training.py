"""The training itself, over parts that are started: from the beginning, or from a checkpoint."""

import asyncio
from collections.abc import Sequence
from typing import Any

from configs.schema import Config
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.evaluation.evaluator import Evaluator, OnLost
from rollout.evaluation.pinned import PinnedEvaluator
from rollout.failures import FailureBudget
from rollout.prompts import EncodedRow, as_prompt
from rollout.router import ReplicaRouter
from rollout.snapshot import OtherPromptsError, capture, encode, restore
from rollout.types import SamplingParams
from scripts.launch.parts import Parts
from scripts.launch.resume import ROLLOUTS, Resumed
from scripts.launch.rollouts import make_rollouts
from scripts.launch.supervision import until_first_ends
from scripts.launch.workers import make_checkpointer
from trainer.loop import TrainLoop
from trainer.tracking.console import Console
from trainer.tracking.recorder import RunRecorder


async def train(
    config: Config, parts: Parts, console: Console, recorder: RunRecorder, resumed: Resumed | None = None
) -> dict[str, Any]:
    """Evaluates, trains with rollouts, trainer and updates all running at once, evaluates again."""
    run = _Training(config, parts, console, recorder, resumed)
    await until_first_ends(run.train(), beside=[parts.monitor.run(), parts.operator.run()])
    return recorder.write_summary(await run.summary())


class _Training:
    def __init__(self, config: Config, parts: Parts, console: Console, recorder: RunRecorder, resumed: Resumed | None):
        self._config, self._parts, self._console, self._recorder = config, parts, console, recorder
        self._first_step = 0 if resumed is None else resumed.global_steps
        self._rollouts = make_rollouts(
            config,
            parts.train_rows,
            parts.agents,
            parts.fleet,
            self._first_step,
            parts.manager.publishing,
        )
        self._evaluator = make_evaluator(
            config,
            parts.val_rows,
            parts.fleet.router,
            parts.agents,
            self._rollouts.failed_rewards,
            parts.fleet.lose,
        )
        if resumed is not None:
            self._restore(resumed)

    async def train(self) -> None:
        config, parts, recorder, console = self._config, self._parts, self._recorder, self._console
        checkpointer = make_checkpointer(config, parts.store, parts.workers, {ROLLOUTS: self._snapshot}, console)
        loop = TrainLoop(
            config=config,
            buffer=self._rollouts.buffer,
            workers=parts.workers,
            manager=parts.manager,
            held_out=PinnedEvaluator(
                self._evaluator, parts.fleet, parts.manager, config.evaluation.replicas, console.message
            ),
            fleet=parts.control,
            recorder=recorder,
            checkpointer=checkpointer,
        )
        await parts.manager.update_weights(self._first_step)
        if self._first_step == 0:
            console.stage("evaluating before the first step")
            recorder.record_evaluation(0, await self._evaluator.evaluate())
        is_evaluated = self._first_step == 0 or recorder.is_evaluated(self._first_step)
        console.stage("training")
        async with checkpointer:
            training = loop.run(self._first_step, is_evaluated=is_evaluated)
            await until_first_ends(training, beside=[self._rollouts.rollouter.run()])
        console.stage("evaluating after the last step")
        recorder.record_evaluation(config.trainer.total_steps, await self._evaluator.evaluate())

    async def summary(self) -> dict[str, Any]:
        """What only this side knows. The engines' counters are of this process, those of the rollouts of the whole
        run."""
        totals = await self._parts.control.totals()
        rollouter, num_evaluated = self._rollouts.rollouter, self._evaluator.num_requests
        return {
            "resumed_from": self._first_step,
            "trajectories_started": rollouter.counters["trajectories_started"],
            "evaluation_requests": num_evaluated,
            "engine_requests": int(totals["engine_requests"]) - num_evaluated,
            "aborted": int(totals["aborted"]),
            "restarted": int(totals["restarted_requests"]) + rollouter.counters["restarted"],
            "moved": rollouter.counters["moved"],
            "failed_groups": len(self._rollouts.failed_groups.failed),
            "continued": int(totals["continued"]),
            "max_staleness": self._config.rollout.max_staleness,
        }

    async def _snapshot(self) -> bytes:
        """For a checkpoint: with what the replicas have sampled up to now, as far as they answer."""
        await self._parts.fleet.collect_progress()
        return await asyncio.to_thread(encode, capture(self._rollouts))

    def _restore(self, resumed: Resumed) -> None:
        try:
            given_back = restore(resumed.rollouts, self._rollouts)
        except OtherPromptsError as error:
            raise OtherPromptsError(f"{resumed.checkpoint.path}: {error} (data.*, seed={self._config.seed})") from error
        # Only now that it can go on is anything removed of what the run did after the checkpoint.
        self._recorder.restore(resumed.recorder, resumed.global_steps)
        self._parts.store.remove_after(resumed.global_steps)
        under_way, ready = len(self._rollouts.rollouter.under_way), len(self._rollouts.buffer.ready)
        given_up = f", {given_back} do not fit and start again" if given_back else ""
        what = f"{ready} groups are ready, {under_way} go on{given_up}"
        self._console.message(f"resumed {resumed.checkpoint.path} at step {self._first_step}: {what}")


def make_evaluator(
    config: Config,
    rows: Sequence[EncodedRow],
    router: ReplicaRouter,
    agents: AgentWorkerGroup,
    failures: FailureBudget,
    on_lost: OnLost,
) -> Evaluator:
    evaluation = config.evaluation
    return Evaluator(
        prompts=[as_prompt(row, ordinal) for ordinal, row in enumerate(rows)],
        router=router,
        runner=agents,
        sampling=SamplingParams(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            max_tokens=config.rollout.max_response_tokens,
            seed=config.seed if config.rollout.seeded_sampling and evaluation.temperature > 0 else None,
        ),
        num_samples=evaluation.samples,
        timeout_s=evaluation.timeout_s,
        failures=failures,
        on_lost=on_lost,
    )
