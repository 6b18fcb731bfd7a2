"""A training run from its first process to its summary."""

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.runtime.tasks import run_with_background
from configs.schema import Config
from rollout.evaluation.pinned import PinnedEvaluator
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.fleet.app import fleet_app
from rollout.fleet.pause_limit import PauseLimit
from rollout.http.access import Access
from rollout.http.gateway import gateway_app
from rollout.http.server import linked_socket, listen, served, url_of
from rollout.http.token import control_token, usage
from rollout.snapshot import OtherPromptsError, capture, encode, restore
from scripts.fleet import SOCKET_FILE
from scripts.launch import budget
from scripts.launch.cluster import cluster
from scripts.launch.conversations import load_all
from scripts.launch.data import load_rows
from scripts.launch.driver import make_evaluator, make_rollouter
from scripts.launch.resume import ROLLOUTS, Resumed
from scripts.launch.start import StartedRun, owner, start
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.loop import TrainLoop
from trainer.tracking.console import Console
from trainer.tracking.events.kinds import EvaluationStarted, RunStarted
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
    """Returns the summary. An error anywhere is raised here, after every process has ended."""
    rows = load_rows(config)  # malformed data is an error before anything starts
    conversations = load_all(config) if config.algorithm.ce_coef else None
    listener = listen(config.serve.host, config.serve.port) if config.serve.enabled else None
    release_all(config.weight_sync, owner(run_dir))  # weights that a killed process of this run left behind
    budget.refuse_without_memory(config, device)
    console.stage("starting Ray")
    async with cluster(config, device), AsyncExitStack() as stack:
        stack.callback(release_all, config.weight_sync, owner(run_dir))
        started = await start(
            config,
            device,
            run_dir,
            rows=rows,
            conversations=conversations,
            console=console,
            resumed=resumed,
            events=events,
        )
        stack.push_async_callback(started.agents.close)
        console.watch(started.views)
        socket = stack.enter_context(linked_socket(run_dir / SOCKET_FILE))
        await stack.enter_async_context(served(fleet_app(started.operator), socket))
        if listener is not None:
            token = stack.enter_context(control_token(config.serve, run_dir))
            access = Access.of(config.serve, token, on_loopback=config.serve.is_loopback)
            await stack.enter_async_context(served(gateway_app(started.control, None), listener, config.serve, access))
            console.message(f"control routes: {url_of(listener)}")
            console.message(usage(token, config.serve, run_dir))
        return await train(config, started, console=console, recorder=recorder, resumed=resumed, events=events)


async def train(
    config: Config,
    started: StartedRun,
    *,
    console: Console,
    recorder: RunRecorder,
    resumed: Resumed | None = None,
    events: DriverEvents = NO_EVENTS,
) -> dict[str, Any]:
    """Trains on what is started, from the first step or from a checkpoint. Returns the summary."""
    training = Training(
        config=config, started=started, console=console, recorder=recorder, resumed=resumed, events=events
    )
    limit = PauseLimit(control=started.control, max_pause_s=config.serve.max_pause_s)
    background = [started.monitor.run(), started.operator.run(), limit.run(), started.agents.tell_events()]
    if started.teacher is not None:
        background += [started.teacher.monitor.run(), started.teacher.operator.run()]
    await run_with_background(training.run(), background=background)
    return recorder.write_summary(await training.summary())


@dataclass(frozen=True, slots=True)
class AllReplicas:
    """Those of the policy and of the teacher, as the train loop sees them: a `Fleet`."""

    started: StartedRun

    async def gauges(self) -> dict[str, float]:
        teacher = self.started.teacher
        of_teacher = {} if teacher is None else teacher.teacher.gauges()
        return await self.started.control.gauges() | of_teacher


@dataclass(kw_only=True)
class Training:
    """The training over a started run: evaluate, train with everything concurrent, evaluate again.

    Example:
        training = Training(config=config, started=started, console=console, recorder=recorder, resumed=None)
        await training.run()  # while the fleet's monitor and operator run
        summary = await training.summary()
    """

    config: Config
    started: StartedRun
    console: Console
    recorder: RunRecorder
    resumed: Resumed | None
    events: DriverEvents = NO_EVENTS

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
        self.evaluator = make_evaluator(
            config,
            rows=started.rows.held_out,
            router=started.fleet.router,
            runner=started.agents,
            failures=self.rollouter.buffer.failures,
            on_lost=started.fleet.lose,
        )
        self.rollouter.buffer.on_discard = self.recorder.record_discarded
        if self.resumed is not None:
            self._restore(self.resumed)

    async def run(self) -> None:
        config, started, recorder, console = self.config, self.started, self.recorder, self.console
        checkpointer = Checkpointer(
            store=started.store,
            workers=started.workers,
            snapshots={ROLLOUTS: self._snapshot},
            config=config.checkpoint,
            total_steps=config.trainer.total_steps,
            update_interval=config.weight_sync.interval,
            report=console.message,
            emit=self.events.emit,
        )
        loop = TrainLoop(
            config=config,
            buffer=self.rollouter.buffer,
            workers=started.workers,
            manager=started.manager,
            held_out=PinnedEvaluator(
                evaluator=self.evaluator,
                fleet=started.fleet,
                updating=started.manager.updating,
                catch_up=started.manager.catch_up,
                num_replicas=config.evaluation.replicas,
                report=console.message,
            ),
            fleet=AllReplicas(started),
            recorder=recorder,
            checkpointer=checkpointer,
            emit=self.events.emit,
            demonstrations=started.rows.demonstrations,
        )
        self._tell_started()
        console.stage("giving the replicas the weights")
        await started.manager.update_weights(self.first_step)
        if self.first_step == 0:
            console.stage("evaluating before the first step")
            self.events.emit(EvaluationStarted(global_steps=0))
            recorder.record_evaluation(0, await self.evaluator.evaluate())
        is_evaluated = self.first_step == 0 or recorder.is_evaluated(self.first_step)
        console.stage("training")
        async with checkpointer:
            steps = loop.run(self.first_step, is_evaluated=is_evaluated)
            await run_with_background(steps, background=[self.rollouter.run()])
        for group in self.rollouter.left_over():
            recorder.record_discarded(group)
        console.stage("evaluating after the last step")
        self.events.emit(EvaluationStarted(global_steps=config.trainer.total_steps))
        recorder.record_evaluation(config.trainer.total_steps, await self.evaluator.evaluate())
        await asyncio.gather(started.fleet.collect_progress(), started.agents.collect_events())

    def _tell_started(self) -> None:
        config = self.config
        begun = RunStarted(
            global_steps=self.first_step,
            total_steps=config.trainer.total_steps,
            prompts_per_step=config.trainer.prompts_per_step,
            group_size=config.algorithm.group_size,
            max_staleness=config.rollout.max_staleness,
            num_replicas=config.rollout.num_replicas,
            num_ranks=config.trainer.num_ranks,
            host=socket.gethostname(),
        )
        self.events.emit(begun)

    async def summary(self) -> dict[str, Any]:
        """What only the driver knows. Counters of engines are of this process, those of rollouts of the whole run."""
        totals = await self.started.control.totals()
        rollouter, num_evaluated = self.rollouter, self.evaluator.num_requests
        buffer = rollouter.buffer
        return {
            "resumed_from": self.first_step,
            "trajectories_started": rollouter.counters["trajectories_started"],
            "evaluation_requests": num_evaluated,
            "engine_requests": int(totals["engine_requests"]) - num_evaluated,
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
        """The rollouts for a checkpoint, with the tokens sampled until now by the replicas that answer."""
        await self.started.fleet.collect_progress()
        return await asyncio.to_thread(encode, capture(self.rollouter))

    def _restore(self, resumed: Resumed) -> None:
        try:
            given_back = restore(resumed.rollouts, self.rollouter)
        except OtherPromptsError as error:
            raise OtherPromptsError(f"{resumed.checkpoint.path}: {error} (data.*, seed={self.config.seed})") from error
        # What the run did after the checkpoint is moved away only now that the checkpoint has proved usable.
        self.recorder.restore(resumed.recorder, resumed.global_steps, resumed.aside)
        self.console.resumed(resumed.global_steps, self.recorder.counts.accuracies)
        self.started.store.set_aside_after(resumed.global_steps, resumed.aside.move)
        under_way, ready = len(self.rollouter.under_way), len(self.rollouter.buffer.ready)
        given_up = f", {given_back} do not fit and start again" if given_back else ""
        what = f"{ready} groups are ready, {under_way} go on{given_up}"
        self.console.message(f"resumed {resumed.checkpoint.path} at step {self.first_step}: {what}")
