"""Agent workers in Ray actors, which take turns."""

import asyncio
import contextlib
import faulthandler
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from configs.mixture import sources_of
from configs.runtime.deadline import within
from configs.schema import Config
from rollout.actors.carried import as_raised, carried_errors, carries_errors
from rollout.actors.collector import collect_rarely
from rollout.actors.place import Place, own_place
from rollout.actors.supervisor import ENV, Rotation, Silence, Supervisor, UnwellError, placed
from rollout.agents.encoding import encode
from rollout.agents.loop import AgentLoop, GenerateGroup, close_all
from rollout.agents.worker import AgentWorker
from rollout.chat.generation_config import GENERATION_CONFIG
from rollout.errors import AgentWorkerLostError
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.events.event import Emit
from rollout.events.log import EventBatch, EventLog, Notices
from rollout.progress import Attempt, GroupMessage, Move, ReplicaLost
from rollout.prompts import Row
from rollout.replica.client import ReplicaClient
from rollout.rewards.scoring import load_scorer
from rollout.types import EvaluatedPrompt, Prompt, SamplingParams, TrajectoryGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")
LoadLoop = Callable[[Config, Any], AgentLoop]
"""Makes the agent loop of a config, with a tokenizer of transformers, in the worker's process."""
CPUS_PER_WORKER = 0.1
STDERR = 2
CLOSE_S = 10.0
"""The time that an agent loop has to close at the end of a run. One that takes longer is left behind."""
EVENTS_EVERY_S = 1.0
LOGGED_AFTER = 0.8
"""Part of rollout.agent_worker_timeout_s after which a worker that hangs writes into its log: before it is killed."""
MOST_NAMED = 8


def load_tokenizer(path: str, *, local_only: bool = False) -> Any:
    """Load a tokenizer, and see to it that the generation config, which names end tokens, is on this machine too.

    With `local_only` nothing is downloaded, and OSError is raised where the tokenizer is not on this machine.
    """
    from transformers import AutoTokenizer  # imports torch, which the driver does without
    from transformers.utils.hub import cached_file

    with contextlib.suppress(OSError):  # not every model has one
        cached_file(path, GENERATION_CONFIG, local_files_only=local_only)
    return AutoTokenizer.from_pretrained(path, local_files_only=local_only)


class AgentWorkerActor:
    """An agent worker in a process of its own, or one for each source of data.sources, with its own agent loop and
    rewards. Each call brings the replica that it generates on."""

    _clock_ahead_s = math.inf
    """The time of this machine's clock after the driver's, at most."""

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        load_loop: LoadLoop,
        noticed: Sequence[str],
        on_start: Callable[[], None],
    ):
        on_start()
        self._log_when_silent_s = config.rollout.agent_worker_timeout_s * LOGGED_AFTER
        self._watchdog: asyncio.Task[None] | None = None
        self._events = EventLog(is_on=config.trainer.events)
        tokenizer = load_tokenizer(tokenizer_path)
        self._replicas: dict[str, GenerateGroup] = {}
        self._workers = {
            source.name: AgentWorker(
                config=source.config,
                tokenizer=tokenizer,
                loop=load_loop(source.config, tokenizer),
                scorer=load_scorer(source.config.rollout),
                replicas=self._replicas,
                events=self._events,
            )
            for source in sources_of(config)
        }
        for name in noticed:
            logging.getLogger(name).addHandler(Notices(self._events))
        self._moves: dict[int, asyncio.Queue[Move]] = {}
        collect_rarely()

    async def place(self) -> Place:
        return own_place()

    async def heartbeat(self) -> bool:
        """Answer, as long as the event loop runs. If that stops, the process writes its stacks into its log."""
        self._watchdog = self._watchdog or asyncio.create_task(self._put_off_the_log())
        return True

    async def _put_off_the_log(self) -> None:
        while True:  # faulthandler writes without the GIL, which a hanging reward may hold
            faulthandler.dump_traceback_later(self._log_when_silent_s, file=STDERR)
            await asyncio.sleep(self._log_when_silent_s / Silence.PARTS)

    @carries_errors
    async def call(self, function: Callable[[AgentWorker], T], source: str) -> T:
        return function(self._workers[source])

    async def run_group(
        self,
        prompt: Prompt,
        replica: ReplicaClient,
        sampling: SamplingParams,
        group_size: int,
        attempt: Attempt,
        sent_at: float,
    ) -> AsyncGenerator[GroupMessage, None]:
        """Run a group as `AgentWorker.run_group` does. Ray cannot send values into its generators, so the answer to
        ReplicaLost arrives by `move`. `sent_at`: the driver's time."""
        # The way of the call is in it, too: the shortest one says most.
        self._clock_ahead_s = min(self._clock_ahead_s, time.time() - sent_at)
        worker = self._workers[prompt.source]
        worker.clock_ahead_s = self._clock_ahead_s
        moves: asyncio.Queue[Move] = asyncio.Queue()
        self._moves[prompt.ordinal] = moves
        self._replicas[replica.name] = replica
        messages = worker.run_group(prompt, replica.name, sampling, group_size, attempt)
        try:
            with carried_errors():
                async with aclosing(messages):
                    move = None
                    while True:
                        yield (message := await messages.asend(move))
                        if isinstance(message, TrajectoryGroup):
                            return
                        move = await moves.get() if isinstance(message, ReplicaLost) else None
        finally:
            if self._moves[prompt.ordinal] is moves:  # otherwise another call has begun while this one was cancelled
                del self._moves[prompt.ordinal]

    async def move(self, ordinal: int, replica: ReplicaClient, attempt: Attempt) -> None:
        self._replicas[replica.name] = replica
        if ordinal in self._moves:  # otherwise its call has ended meanwhile, of which it tells itself
            self._moves[ordinal].put_nowait(Move(replica.name, attempt))

    @carries_errors
    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        replica: ReplicaClient,
        sampling: SamplingParams,
        num_samples: int,
        attempt: int,
    ) -> list[EvaluatedPrompt]:
        """Evaluate prompts of one source."""
        self._replicas[replica.name] = replica
        worker = self._workers[prompts[0].source]
        return await worker.evaluate(prompts, replica.name, sampling, num_samples, attempt)

    async def events(self) -> EventBatch:
        return self._events.take()

    @carries_errors
    async def close(self) -> None:
        await close_all([worker.close for worker in self._workers.values()])


class _Worker:
    """The driver's handle of an agent worker. It is watched while it has calls under way that must not block it."""

    def __init__(self, name: str, actor: Any, timeout_s: float, emit: Emit):
        """Make the handle of an `AgentWorkerActor`. `timeout_s` is rollout.agent_worker_timeout_s."""
        self.name, self.actor, self._emit = name, actor, emit
        self._place: Place | None = None
        silence = Silence(timeout_s, "rollout.agent_worker_timeout_s")
        self._supervisor = Supervisor[bool](
            ask=lambda: actor.heartbeat.remote(),
            judge=silence.observe,
            interval_s=silence.interval_s,
            on_lost=self._end,
            started=self.started,
        )
        self._calls: list[Sequence[int]] = []
        self._watch: asyncio.Task[None] | None = None
        self._why_lost: str | None = None

    async def started(self) -> None:
        """Return when it has loaded everything, and tell once where it runs."""
        place = await self.actor.place.remote()
        if self._place is None:
            self._place = place
            self._emit(place.started(self.name))

    @contextmanager
    def running(self, ordinals: Sequence[int]) -> Iterator[None]:
        """Watch the worker while the block runs these prompts on it. A loop or a reward that blocks its event loop
        stops everything there, so it is killed, and every answer raises AgentWorkerLostError."""
        self._calls.append(ordinals)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._supervisor.run())
        try:
            yield
        finally:
            self._calls.remove(ordinals)
            if not self._calls and self._watch is not None:  # nobody asks a worker that has nothing to do
                self._watch.cancel()
                self._watch = None  # it is done only later, and the next call must not take it for its own

    async def answer(self, call: Any) -> Any:
        """Return the result of a call to the actor. Raise its exception, or AgentWorkerLostError."""
        return await as_raised(call, self.name, ends_with_us=True, died=self.lost)

    def lost(self, error: RayActorError) -> AgentWorkerLostError:
        return AgentWorkerLostError(self._why_lost or f"{self.name} died: {error}")

    async def _end(self, error: Exception) -> None:
        """Kill a worker that hangs. Of one that died every call tells."""
        if not isinstance(error, UnwellError):
            return logger.warning("%s cannot be asked whether it hangs: %r", self.name, error)
        ordinals = sorted({ordinal for ordinals in self._calls for ordinal in ordinals})
        named = ", ".join(map(str, ordinals[:MOST_NAMED])) + (", ..." if len(ordinals) > MOST_NAMED else "")
        self._why_lost = (
            f"{self.name} {error}: an agent loop or a reward of prompt {named} blocks it, and its log ends with the "
            "place in the code"
        )
        ray.kill(self.actor)  # its calls fail at once, even where its process is stopped or out of reach


class AgentWorkerGroup:
    """The driver's side of all agent workers: a `GroupRunner`, whose `evaluate` is an `Ask`.

    Example:
        group = AgentWorkerGroup(
            config=config, tokenizer_path=path, replicas=clients, on_start=on_start, load_loop=load_loop
        )
        prompts = await group.encode(rows, template, chat_template, max_tokens)
        async for message in group.run_group(prompts[0], "replica-3", sampling, 8, Attempt()):
            print(message)
    """

    def __init__(
        self,
        *,
        config: Config,
        tokenizer_path: str,
        replicas: Iterable[ReplicaClient],
        on_start: Callable[[str], Callable[[], None]],
        load_loop: LoadLoop,
        noticed: Sequence[str] = (),
        events: DriverEvents = NO_EVENTS,
    ):
        """Start rollout.num_agent_workers workers.

        Args:
            on_start: returns what the process of the worker with that name runs first.
            noticed: loggers whose warnings are for the person who watches the run, too.
            events: takes the events of the workers.
        """
        self._events = events
        self._telling: dict[_Worker, asyncio.Task[None]] = {}
        options: dict[str, Any] = {"num_cpus": CPUS_PER_WORKER, "max_concurrency": 8192}
        # By default Ray fills one machine, which then runs the rewards, tools and sandboxes of all.
        options["scheduling_strategy"] = "SPREAD"
        options["runtime_env"] = {"env_vars": ENV}
        self._create = partial(
            ray.remote(**options)(AgentWorkerActor).remote,
            config=config,
            tokenizer_path=tokenizer_path,
            load_loop=load_loop,
            noticed=tuple(noticed),
        )
        self._on_start = on_start
        self._start_timeout_s = config.rollout.start_timeout_s
        self._worker_timeout_s = config.rollout.agent_worker_timeout_s
        self._replicas = {replica.name: replica for replica in replicas}
        workers = [self._start(f"agent-worker-{index}") for index in range(config.rollout.num_agent_workers)]
        self._rotation = Rotation(workers, self._replace)
        self._alone: set[_Worker] = set()
        """The workers of one prompt."""

    def connect(self, replica: ReplicaClient) -> None:
        self._replicas[replica.name] = replica

    async def encode(
        self, rows: Sequence[Row], template: str, chat_template: bool, max_tokens: int, source: str = ""
    ) -> list[Prompt]:
        def encode_there(worker: AgentWorker) -> list[Prompt]:
            tools = getattr(worker.loop, "prompt_tools", None) or ()
            return encode(worker.tokenizer, rows, template, chat_template, max_tokens, tools)

        return await self.call(encode_there, "encoding prompts", source)

    async def call(self, function: Callable[[AgentWorker], T], what: str, source: str = "") -> T:
        """Call the function in the process of a worker, with that of a source of data.sources. It may block, because
        nothing else runs there yet."""
        worker = await self._rotation.next()
        async with within(self._start_timeout_s, "rollout.start_timeout_s", f"{what} in {worker.name}"):
            return await worker.answer(worker.actor.call.remote(function, source))

    async def close(self) -> None:
        """Close the agent loops. The run has ended, so errors are only logged."""

        async def close(worker: _Worker) -> None:
            async with within(CLOSE_S, "CLOSE_S", f"closing the agent loop in {worker.name}"):
                await worker.answer(worker.actor.close.remote())

        for outcome in await asyncio.gather(*map(close, self._rotation.serving), return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.warning("an agent loop was not closed: %s", outcome)

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int, attempt: Attempt
    ) -> AsyncGenerator[GroupMessage, Move | None]:
        """Run the group in the next worker, or in one of its own, as `GroupRunner.run_group` says.

        One generator of Ray's carries all messages. It keeps their order, and its errors come as any call's do.
        """
        async with self._borrowed(prompt.ordinal, attempt.alone) as worker:
            remote = worker.actor.run_group.options(num_returns="streaming")
            stream = remote.remote(prompt, self._replicas[replica], sampling, group_size, attempt, time.time())
            message = None
            try:
                with worker.running([prompt.ordinal]):
                    async for answer in stream:
                        message = await as_raised(answer, worker.name, died=worker.lost)
                        if isinstance(message, TrajectoryGroup):
                            break
                        if (move := (yield message)) is not None:
                            client = self._replicas[move.replica]
                            await worker.answer(worker.actor.move.remote(prompt.ordinal, client, move.attempt))
            finally:
                if not isinstance(message, TrajectoryGroup):
                    ray.cancel(stream)  # to drop it does not end what it runs
        assert isinstance(message, TrajectoryGroup)
        yield message  # after the worker was given back: a teacher may score the group for long

    @asynccontextmanager
    async def _borrowed(self, ordinal: int, alone: bool) -> AsyncIterator[_Worker]:
        """Lend a worker. One that is lost meanwhile is replaced; one of a single prompt ends with it."""
        if not alone:
            worker = await self._rotation.next()
            try:
                yield worker
            except AgentWorkerLostError:
                self._rotation.lose(worker)
                raise
            return
        worker = self._start(f"agent-worker-of-prompt-{ordinal}")
        self._alone.add(worker)
        try:
            yield worker
        finally:
            self._alone.discard(worker)
            ray.kill(worker.actor)

    async def evaluate(
        self, prompts: Sequence[Prompt], replica: str, sampling: SamplingParams, num_samples: int, attempt: int = 0
    ) -> list[EvaluatedPrompt]:
        """Run an evaluation of prompts of one source. Raises AgentWorkerLostError. The next call must have another
        `attempt`."""
        async with self._borrowed(prompts[0].ordinal, alone=False) as worker:
            with worker.running([prompt.ordinal for prompt in prompts]):
                call = worker.actor.evaluate.remote(prompts, self._replicas[replica], sampling, num_samples, attempt)
                return await worker.answer(call)

    async def tell_events(self) -> None:
        """Ask the workers for their events, until cancelled. One that is slow to answer holds up no other."""
        while True:
            await asyncio.sleep(EVENTS_EVERY_S)
            await self.collect_events()

    async def collect_events(self) -> None:
        """Take the events of the workers that answer within EVENTS_EVERY_S."""
        for worker in {*self._rotation.serving, *self._alone}:
            if worker not in self._telling and self._events.is_on:
                task = self._telling[worker] = asyncio.create_task(self._take_events(worker))
                task.add_done_callback(lambda _, worker=worker: self._telling.pop(worker))
        if self._telling:
            await asyncio.wait(list(self._telling.values()), timeout=EVENTS_EVERY_S)

    async def _take_events(self, worker: _Worker) -> None:
        try:
            await worker.started()  # the first question shall measure its clock, and not how long it loads
            sent_at = self._events.clock()
            self._events.take(worker.name, await worker.answer(worker.actor.events.remote()), sent_at)
        except (AgentWorkerLostError, RayActorError) as error:  # its calls tell of that
            logger.info("%s tells no events: %s", worker.name, error)

    def _start(self, name: str) -> _Worker:
        self._events.begins_anew(name)
        return _Worker(name, self._create(on_start=self._on_start(name)), self._worker_timeout_s, self._events.emit)

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
