"""Agent workers in Ray actors, which take turns."""

import asyncio
import faulthandler
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError

from configs.runtime.carried import as_raised, carries_errors
from configs.runtime.collector import collect_rarely
from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actor_group import ENV, ReplicaClient, cancelled_with_us, placed
from rollout.agents.encoding import encode
from rollout.agents.heartbeat import PARTS, Heartbeat
from rollout.agents.loop import AgentLoop, ShowsTools, is_harness, load_agent_loop
from rollout.agents.open_episodes import OpenByAttempt
from rollout.agents.worker import AgentWorker, OnOpen
from rollout.errors import AgentWorkerLostError, ReplicaLostError
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.log import EventBatch, EventLog, Notices
from rollout.progress import Attempt
from rollout.prompts import Row
from rollout.replica.processes import end_descendants_with_this
from rollout.rewards.scoring import load_scorer
from rollout.types import EvaluatedPrompt, Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)
W = TypeVar("W")
STDERR = 2
CLOSE_S = 10.0
"""At the end of a run: what an agent loop needs longer for is left behind."""
EVENTS_EVERY_S = 1.0
NOTICED = ("rollout.search", "rollout.environments")
"""Loggers whose warnings are for the person who watches the run, too."""
LOGGED_AFTER = 0.8
"""Part of rollout.agent_worker_timeout_s after which a worker that hangs writes into its log: before it is killed."""


def load_tokenizer(path: str, *, local_only: bool = False) -> Any:
    """`local_only`: downloads nothing, and raises OSError where the tokenizer is not on this machine."""
    from transformers import AutoTokenizer  # imports torch, which the driver does without

    return AutoTokenizer.from_pretrained(path, local_files_only=local_only)


def _load_loop(config: Config, tokenizer: Any) -> AgentLoop:
    if not is_harness(config):
        return load_agent_loop(config.rollout.agent_loop, tokenizer, config.rollout.agent_args)
    from rollout.sessions.harness_loop import load_harness_loop  # with a web server, which other loops do without

    if config.rollout.agent_command is not None:
        end_descendants_with_this()  # commands do not outlive a worker that is killed
    return load_harness_loop(config, tokenizer)


class AgentWorkerActor:
    """An agent worker in a process of its own. Each call brings the replica that it generates on."""

    def __init__(
        self, *, config: Config, tokenizer_path: str, agent_loop: AgentLoop | None, on_start: Callable[[], None]
    ):
        on_start()
        self._config = config
        self._log_when_silent_s = config.rollout.agent_worker_timeout_s * LOGGED_AFTER
        self._watchdog: asyncio.Task[None] | None = None
        tokenizer = load_tokenizer(tokenizer_path)
        self._worker = AgentWorker(
            config=config,
            tokenizer=tokenizer,
            loop=agent_loop or _load_loop(config, tokenizer),
            scorer=load_scorer(config.rollout),
            replicas={},
            events=(events := EventLog(is_on=config.trainer.events)),
        )
        self._events = events
        for name in NOTICED:
            logging.getLogger(name).addHandler(Notices(events))
        self._open = OpenByAttempt()
        collect_rarely()

    async def heartbeat(self) -> None:
        """Answer, as long as the event loop runs. If that stops, the process writes its stacks into its log."""
        self._watchdog = self._watchdog or asyncio.create_task(self._put_off_the_log())

    async def _put_off_the_log(self) -> None:
        while True:  # faulthandler writes without the GIL, which a hanging reward may hold
            faulthandler.dump_traceback_later(self._log_when_silent_s, file=STDERR)
            await asyncio.sleep(self._log_when_silent_s / PARTS)

    @carries_errors
    async def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[Prompt]:
        loop = self._worker.loop
        tools = loop.prompt_tools if isinstance(loop, ShowsTools) else ()
        return encode(self._worker.tokenizer, rows, template, chat_template, max_tokens, tools)

    @carries_errors
    async def check_chat_template(self) -> str | None:
        if is_harness(self._config):
            from rollout.sessions.append_only import append_only

            report = append_only(self._worker.tokenizer)
            return None if report.is_append_only else str(report)
        return None

    @carries_errors
    async def run_group(
        self, prompt: Prompt, replica: ReplicaClient, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> TrajectoryGroup:
        self._worker.replicas[replica.name] = replica
        opened = self._open.of(prompt.ordinal, attempt.number)
        return await self._worker.run_group(prompt, replica.name, sampling, group_size, attempt, on_open=opened.tell)

    async def open_episodes(self, ordinal: int, attempt: int, known: int) -> int:
        """Wait until fewer than `known` episodes of the attempt are open, or a while. Returns how many are."""
        return await self._open.of(ordinal, attempt).below(known)

    async def drop(self, ordinal: int) -> None:
        self._worker.drop(ordinal)

    async def events(self) -> EventBatch:
        return self._events.take()

    @carries_errors
    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        replica: ReplicaClient,
        sampling: SamplingParams,
        num_samples: int,
        attempt: int,
    ) -> list[EvaluatedPrompt]:
        self._worker.replicas[replica.name] = replica
        return await self._worker.evaluate(prompts, replica.name, sampling, num_samples, attempt=attempt)

    @carries_errors
    async def close(self) -> None:
        await self._worker.close()


class _Worker:
    """The driver's handle of an agent worker."""

    def __init__(self, name: str, actor: Any, timeout_s: float):
        """`actor`: Ray's handle of an `AgentWorkerActor`. `timeout_s`: rollout.agent_worker_timeout_s."""
        self.name, self.actor = name, actor
        self._heartbeat = Heartbeat(name, self.started, lambda: actor.heartbeat.remote(), timeout_s)

    async def started(self) -> None:
        await self.actor.__ray_ready__.remote()

    async def run(self, call: Any, prompts: Sequence[Prompt]) -> Any:
        """Return what the call, which runs the prompts, returns. Raises as `result` does, and AgentWorkerLostError when
        the process hangs."""
        return await self._heartbeat.guard(self.result(call), [prompt.ordinal for prompt in prompts])

    async def result(self, call: Any) -> Any:
        """Return what the call to the actor returns, which may block the actor. Raises what was raised there, and
        AgentWorkerLostError when the process died."""
        return await as_raised(self._answer(call), self.name)

    async def _answer(self, call: Any) -> Any:
        """An actor of the agent loop's own that dies makes the call raise a CarriedError."""
        try:
            return await cancelled_with_us(call)
        except RayActorError as error:
            raise AgentWorkerLostError(f"{self.name} died: {error}") from error


@asynccontextmanager
async def _followed(
    worker: _Worker, ordinal: int, attempt: Attempt, num_open: int, on_open: OnOpen
) -> AsyncIterator[None]:
    """Tells `on_open` of the episodes that end, while the block runs the attempt. `num_open`: as many as are known."""

    async def follow(known: int) -> None:
        while known > 0:
            known = await worker.result(worker.actor.open_episodes.remote(ordinal, attempt.number, known))
            on_open(known)

    following = asyncio.create_task(follow(num_open))
    try:
        yield
    finally:
        following.cancel()
        [outcome] = await asyncio.gather(following, return_exceptions=True)
        # Its room is given back when the attempt is over. Of a lost worker the attempt tells.
        if isinstance(outcome, Exception) and not isinstance(outcome, AgentWorkerLostError):
            logger.warning("nothing was heard of the episodes of prompt %d: %r", ordinal, outcome)


class AgentWorkerGroup:
    """The driver's side of all agent workers: a `GroupRunner` and an `EvaluationRunner`.

    Example:
        group = AgentWorkerGroup(config=config, tokenizer_path=path, replicas=clients, on_start=on_start)
        rows = await group.encode(rows, template, chat_template, max_tokens)
        trajectories = await group.run_group(prompt, "replica-3", sampling, 8, Attempt(), on_open=room.keep)
    """

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        replicas: Iterable[ReplicaClient],
        on_start: Callable[[str], Callable[[], None]],
        agent_loop: AgentLoop | None = None,
        events: DriverEvents = NO_EVENTS,
    ):
        """`on_start(name)`: what a worker's process runs first. `agent_loop`: in place of rollout.agent_loop's.
        `events`: takes those of the workers."""
        self._events = events
        self._telling: dict[_Worker, asyncio.Task[None]] = {}
        options: dict[str, Any] = {"num_cpus": 0.1, "max_concurrency": 8192, "runtime_env": {"env_vars": ENV}}
        self._class = ray.remote(**options)(AgentWorkerActor)
        self._arguments = {"config": config, "tokenizer_path": tokenizer_path, "agent_loop": agent_loop}
        self._on_start = on_start
        self._start_timeout_s = config.rollout.start_timeout_s
        self._worker_timeout_s = config.rollout.agent_worker_timeout_s
        self._replicas = {replica.name: replica for replica in replicas}
        workers = [self._start(f"agent-worker-{index}") for index in range(config.rollout.num_agent_workers)]
        self._rotation = Rotation(workers, self._replace)
        self._alone: set[_Worker] = set()
        """Those of one prompt."""
        self._waiting: dict[int, _Worker] = {}
        """By ordinal: where the episodes of a group wait that has lost its replica."""

    def connect(self, replica: ReplicaClient) -> None:
        self._replicas[replica.name] = replica

    async def encode(self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int) -> list[Prompt]:
        worker = await self._rotation.next()
        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"encoding prompts in {worker.name}"):
            return await worker.result(worker.actor.encode.remote(rows, template, chat_template, max_tokens))

    async def check_chat_template(self) -> str | None:
        """What is wrong with the model's chat template for the sessions of a harness."""
        worker = await self._rotation.next()
        async with within(
            self._start_timeout_s, "rollout.start_timeout_s", f"looking at the template in {worker.name}"
        ):
            return await worker.result(worker.actor.check_chat_template.remote())

    async def close(self) -> None:
        """Let the agent loops end what they hold. The run has ended, so that what goes wrong is logged only."""

        async def close(worker: _Worker) -> None:
            async with within(CLOSE_S, "CLOSE_S", f"closing the agent loop in {worker.name}"):
                await worker.result(worker.actor.close.remote())

        for outcome in await asyncio.gather(*map(close, self._rotation.serving), return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.warning("an agent loop was not closed: %s", outcome)

    async def run_group(
        self,
        prompt: Prompt,
        replica: str,
        sampling: SamplingParams,
        group_size: int,
        attempt: Attempt,
        *,
        on_open: OnOpen,
    ) -> TrajectoryGroup:
        def call(actor: Any) -> Any:
            return actor.run_group.remote(prompt, self._replicas[replica], sampling, group_size, attempt)

        waits_in = self._waiting.pop(prompt.ordinal, None)
        if not attempt.alone:
            worker = waits_in if waits_in is not None and self._rotation.has(waits_in) else await self._rotation.next()
            try:
                async with _followed(worker, prompt.ordinal, attempt, group_size, on_open):
                    return await self._run_on(worker, call, [prompt])
            except ReplicaLostError:
                self._waiting[prompt.ordinal] = worker
                raise
        if waits_in is not None:
            waits_in.actor.drop.remote(prompt.ordinal)
        worker = self._start(f"agent-worker-of-prompt-{prompt.ordinal}")
        self._alone.add(worker)
        try:
            async with _followed(worker, prompt.ordinal, attempt, group_size, on_open):
                return await worker.run(call(worker.actor), [prompt])
        finally:
            self._alone.discard(worker)
            ray.kill(worker.actor)

    async def tell_events(self) -> None:
        """Ask the workers for their events, until cancelled. One that is slow to answer holds up no other."""
        while True:
            await asyncio.sleep(EVENTS_EVERY_S)
            await self.collect_events()

    async def collect_events(self) -> None:
        """What the workers have, as far as it comes within EVENTS_EVERY_S."""
        for worker in {*self._rotation.serving, *self._alone}:
            if worker not in self._telling and self._events.is_on:
                task = self._telling[worker] = asyncio.create_task(self._take_events(worker))
                task.add_done_callback(lambda _, worker=worker: self._telling.pop(worker))
        if self._telling:
            await asyncio.wait(list(self._telling.values()), timeout=EVENTS_EVERY_S)

    async def _take_events(self, worker: _Worker) -> None:
        try:
            await worker.started()  # the first question shall measure its clock, and not how long it loads
            asked = self._events.clock()
            self._events.take(worker.name, await worker.result(worker.actor.events.remote()), asked)
        except (AgentWorkerLostError, RayActorError) as error:  # its calls tell of that
            logger.info("%s tells no events: %s", worker.name, error)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, *, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Raises AgentWorkerLostError. The next call must have another `attempt`."""
        arguments = (prompts, self._replicas[replica], sampling, num_samples, attempt)
        worker = await self._rotation.next()
        return await self._run_on(worker, lambda actor: actor.evaluate.remote(*arguments), prompts)

    async def _run_on(self, worker: _Worker, call: Callable[[Any], Any], prompts: Sequence[Prompt]) -> Any:
        try:
            return await worker.run(call(worker.actor), prompts)
        except AgentWorkerLostError:
            self._rotation.lose(worker)
            raise

    def _start(self, name: str) -> _Worker:
        self._events.begins_anew(name)
        actor = self._class.remote(**self._arguments, on_start=self._on_start(name))
        return _Worker(name, actor, self._worker_timeout_s)

    async def _replace(self, lost: _Worker) -> _Worker:
        """Start another in place of a lost one. Ray's own restart would send it calls before it has started."""
        ray.kill(lost.actor)  # it may have been out of reach only

        async def start_again() -> _Worker:
            return self._start(lost.name)

        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"starting {lost.name} again"):
            return await placed(
                start_again,
                lambda worker: worker.started(),
                lambda worker: ray.kill(worker.actor),
                lambda text: logger.info("%s %s", lost.name, text),
            )


class NoWorkerLeftError(RuntimeError):
    """The last worker was lost, and none could be started in its place. The cause says why."""


class Rotation(Generic[W]):
    """Workers that take turns. A lost one is replaced, by `replace(lost)`, while the others continue."""

    def __init__(self, workers: Iterable[W], replace: Callable[[W], Awaitable[W]]):
        self._serving = deque(workers)
        self._replace = replace
        self._replacing: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None

    async def next(self) -> W:
        """Waits until a worker serves. Raises NoWorkerLeftError."""
        while not self._serving:
            if not self._replacing:
                raise NoWorkerLeftError(f"no agent worker is left: {self._error}") from self._error
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        self._serving.rotate(-1)
        return self._serving[-1]

    @property
    def serving(self) -> list[W]:
        return list(self._serving)

    def has(self, worker: W) -> bool:
        return worker in self._serving

    def lose(self, worker: W) -> None:
        """Replace the worker. Idempotent, since every call that it had in flight reports its loss."""
        if worker in self._serving:
            self._serving.remove(worker)
            task = asyncio.create_task(self._bring_another(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _bring_another(self, lost: W) -> None:
        try:
            self._serving.append(await self._replace(lost))
        except Exception as error:
            logger.warning("an agent worker is not replaced", exc_info=error)
            self._error = error
