"""A training run from its first process to its summary.

`run` starts everything and closes it. `Training` puts the components together in the order in which they need each
other, and runs the loop with all that goes on beside it.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.checkpoint import FLEET_SOCKET
from configs.schema import Config
from rollout.actors.tasks import run_with_background
from rollout.curriculum.order import OtherPromptsError
from rollout.evaluation.pinned import PinnedEvaluator
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.fleet.app import fleet_app
from rollout.fleet.autoscaler import Autoscaler, Autoscaling
from rollout.http.access import Access
from rollout.http.gateway import gateway_app
from rollout.http.server import linked_socket, listen, listener_url, served
from rollout.http.token import control_token, usage
from rollout.snapshot import capture, encode, restore
from scripts.command.command import ending_early
from scripts.command.resume import ROLLOUTS, Resumed
from scripts.launch.cluster import cluster
from scripts.launch.conversations import load_all
from scripts.launch.data import load_sources
from scripts.launch.driver import make_evaluator, make_rollouter
from scripts.launch.head import Head
from scripts.launch.leaving_nodes import watch_leaving_nodes
from scripts.launch.nodes import release_elsewhere
from scripts.launch.replica_check import ReplicaCheck
from scripts.launch.start import StartedRun, Starter, owner, run_started
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.loop import TrainLoop
from trainer.tracking.console import Console
from trainer.tracking.events.kinds import EvaluationStarted
from trainer.tracking.recorder import RunRecorder
from weight_sync.transports.cleanup import release_all


async def run(  # noqa: PLR0913
    config: Config,
    device: str,
    run_dir: Path,
    *,
    console: Console,
    recorder: RunRecorder,
    resumed: Resumed | None = None,
    events: DriverEvents = NO_EVENTS,
) -> dict[str, Any]:
    """Run from the first process to the summary, and return it. An error is raised after every process has ended."""
    rows = load_sources(config)  # malformed data is an error before anything starts
    conversations = load_all(config) if config.algorithm.ce_coef else None
    listener = listen(config.serve.host, config.serve.port) if config.serve.enabled else None
    release_all(config.weight_sync, owner(run_dir))  # weights that a killed process of this run left behind
    console.stage("starting Ray")
    async with cluster(config, device) as head, AsyncExitStack() as stack:
        stack.callback(release_all, config.weight_sync, owner(run_dir))
        stack.push_async_callback(_release_elsewhere, head, config, run_dir, console)
        started = await Starter(
            config=config,
            device=device,
            run_dir=run_dir,
            rows=rows,
            conversations=conversations,
            console=console,
            resumed=resumed,
            events=events,
        ).start()
        stack.push_async_callback(started.agents.close)
        console.watch(started.views)
        fleet_socket = stack.enter_context(linked_socket(run_dir / FLEET_SOCKET))
        await stack.enter_async_context(served(fleet_app(started.operator), fleet_socket))
        if listener is not None:
            token = stack.enter_context(control_token(config.serve, run_dir))
            access = Access.of(config.serve, token, on_loopback=config.serve.is_loopback)
            app = gateway_app(started.control, None, lambda: recorder.latest_metrics)
            await stack.enter_async_context(served(app, listener, config.serve, access))
            console.message(f"control routes: {listener_url(listener)}")
            console.message(usage(token, config.serve, run_dir))
        training = Training(
            config=config,
            started=started,
            console=console,
            recorder=recorder,
            resumed=resumed,
            events=events,
            head=head,
        )
        return await training.run()


async def _release_elsewhere(head: Head, config: Config, run_dir: Path, console: Console) -> None:
    if not head.is_lost:
        await release_elsewhere(config, owner(run_dir), console.message)


@dataclass(kw_only=True)
class Training:
    """The training over a started run: evaluate, train with everything concurrent, evaluate again.

    Example:
        training = Training(config=config, started=started, console=console, recorder=recorder)
        summary = await training.run()
    """

    config: Config
    started: StartedRun
    console: Console
    recorder: RunRecorder
    resumed: Resumed | None = None
    events: DriverEvents = NO_EVENTS
    head: Head = field(default_factory=Head)

    def __post_init__(self) -> None:
        config, started = self.config, self.started
        self.first_step = 0 if self.resumed is None else self.resumed.global_steps
        self.rollouter = make_rollouter(
            config,
            rows=started.rows.train,
            runner=started.agents,
            fleet=started.fleet,
            global_steps=self.first_step,
            updating=started.manager.updating,
            teacher=None if started.teacher is None else started.teacher.teacher,
            emit=self.events.emit,
        )
        self.evaluator = None
        if started.rows.held_out is not None:
            self.evaluator = make_evaluator(
                config,
                rows=started.rows.held_out,
                router=started.fleet.router,
                ask=started.agents.evaluate,
                failures=self.rollouter.buffer.failures,
                on_lost=started.fleet.lose,
            )
        self.replica_check = ReplicaCheck(
            config=config,
            fleet=started.fleet,
            workers=started.workers,
            publishing=started.manager.publishing,
            published=started.published,
            prompt=started.rows.train[0],
            report=self.console.message,
        )
        self.rollouter.buffer.on_discard = self.recorder.record_discarded
        if self.resumed is not None:
            self._restore(self.resumed)

    async def run(self) -> dict[str, Any]:
        """Train from the first step or from the checkpoint, while the fleet is watched. Return the summary."""
        started = self.started
        background = [
            started.monitor.run(),
            started.operator.run(),
            started.control.end_long_pauses(self.config.serve.max_pause_s),
            started.agents.tell_events(),
        ]
        if (most := self.config.rollout.autoscale.max_replicas) is not None:
            scaler = Autoscaler(self.config.rollout.autoscale.min_replicas, most)
            buffer = self.rollouter.buffer
            background.append(Autoscaling(operator=started.operator, buffer=buffer, scaler=scaler).run())
        if started.teacher is not None:
            background += [started.teacher.monitor.run(), started.teacher.operator.run()]
        if self.config.ray.address is not None:
            operators = [started.operator] if started.teacher is None else [started.operator, started.teacher.operator]
            background += map(watch_leaving_nodes, operators)
        await run_with_background(self._train(), background=background)
        return self.recorder.write_summary(await self._summary())

    async def _train(self) -> None:
        """Give the replicas the weights, evaluate, take all steps and evaluate again."""
        config, started, recorder, console = self.config, self.started, self.recorder, self.console
        checkpointer = self._make_checkpointer()
        self.head.save = checkpointer.save_next if config.checkpoint.every else None
        loop = self._make_loop(checkpointer)
        recorder.record_beginning(self.first_step, await started.workers.origin())
        self.events.emit(run_started(config, self.first_step))
        console.stage("giving the replicas the weights")
        await started.manager.update_weights(self.first_step)
        console.stage("comparing the replicas with the trainer")
        await self.replica_check.compare(self.first_step)
        if self.first_step == 0:
            await self._evaluate(0, "before the first step")
        console.stage("training")
        with ending_early(loop, console.message):
            async with checkpointer:
                await run_with_background(loop.run(self.first_step), background=[self.rollouter.run()])
        for group in self.rollouter.left_over():
            recorder.record_discarded(group)
        await self._evaluate(config.trainer.total_steps, "after the last step")
        # What replicas and agents sampled and told since their last report is in the files before the summary is.
        await asyncio.gather(started.fleet.collect_progress(), started.agents.collect_events())

    def _make_checkpointer(self) -> Checkpointer:
        return Checkpointer(
            store=self.started.store,
            workers=self.started.workers,
            snapshots={ROLLOUTS: self._snapshot},
            config=self.config.checkpoint,
            total_steps=self.config.trainer.total_steps,
            update_interval=self.config.weight_sync.interval,
            report=self.console.message,
            emit=self.events.emit,
        )

    def _make_loop(self, checkpointer: Checkpointer) -> TrainLoop:
        config, started = self.config, self.started
        evaluator = self.evaluator and PinnedEvaluator(
            evaluator=self.evaluator,
            fleet=started.fleet,
            updating=started.manager.updating,
            catch_up=started.manager.catch_up,
            num_replicas=config.evaluation.replicas,
            report=self.console.message,
        )
        return TrainLoop(
            config=config,
            buffer=self.rollouter.buffer,
            workers=started.workers,
            manager=started.manager,
            evaluate=evaluator and evaluator.evaluate,
            fleet_gauges=self._fleet_gauges,
            recorder=self.recorder,
            checkpointer=checkpointer,
            emit=self.events.emit,
            demonstrations=started.rows.demonstrations,
            replica_check=self.replica_check,
        )

    async def _fleet_gauges(self) -> dict[str, float]:
        """Return the metrics of the replicas of the policy and of the teacher, and of the order of the prompts."""
        gauges = await self.started.control.gauges() | self.rollouter.stream.gauges()
        return gauges if self.started.teacher is None else gauges | self.started.teacher.teacher.gauges()

    async def _evaluate(self, global_steps: int, when: str) -> None:
        """Evaluate what is held out, while nothing trains, so no replica has to be pinned."""
        if self.evaluator is None:
            return
        self.console.stage(f"evaluating {when}")
        self.events.emit(EvaluationStarted(global_steps=global_steps))
        self.recorder.record_evaluation(global_steps, await self.evaluator.evaluate())

    async def _summary(self) -> dict[str, Any]:
        """Return the part of summary.json that only the driver knows.

        Counters of engines are those of this process of the run, counters of rollouts those of the whole run.
        """
        totals = await self.started.control.totals()
        rollouter, num_evaluated = self.rollouter, 0 if self.evaluator is None else self.evaluator.num_requests
        buffer = rollouter.buffer
        return {
            "resumed_from": self.first_step,
            "trajectories_started": rollouter.counters["trajectories_started"],
            "evaluation_requests": num_evaluated,
            "engine_requests": int(totals["engine_requests"]) - num_evaluated - self.replica_check.num_requests,
            "aborted": int(totals["aborted"]),
            "restarted": int(totals["restarted_requests"]) + rollouter.counters["restarted"],
            "moved": rollouter.counters["moved"],
            "failed_groups": len(buffer.failures.failed_groups),
            "filtered_groups": buffer.num_filtered,
            "aborted_groups": buffer.num_aborted,
            "stale_groups": buffer.ledger.num_dropped,
            "continued": int(totals["continued"]),
            "max_staleness": self.config.rollout.max_staleness,
        }

    async def _snapshot(self) -> bytes:
        """Return the rollouts for a checkpoint, with the tokens sampled until now by the replicas that answer."""
        await self.started.fleet.collect_progress()
        return await asyncio.to_thread(encode, capture(self.rollouter))

    def _restore(self, resumed: Resumed) -> None:
        try:
            num_restarted = restore(resumed.rollouts, self.rollouter, self.config.algorithm)
        except OtherPromptsError as error:
            raise OtherPromptsError(f"{resumed.checkpoint.path}: {error} (data.*, seed={self.config.seed})") from error
        # What the run did after the checkpoint is moved away only now that the checkpoint has proved usable.
        self.recorder.restore(resumed.recorder, resumed.global_steps, resumed.aside)
        self.console.resumed(resumed.global_steps, self.recorder.counts.accuracies)
        self.started.store.set_aside_after(resumed.global_steps, resumed.aside.move)
        under_way, ready = len(self.rollouter.under_way), len(self.rollouter.buffer.ready)
        restarted = f", {num_restarted} do not fit and start again" if num_restarted else ""
        groups = f"{ready} groups are ready, {under_way} go on{restarted}"
        self.console.message(f"resumed {resumed.checkpoint.path} at step {self.first_step}: {groups}")
