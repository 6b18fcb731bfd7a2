"""Keep actors alive: start them, find out that one is lost, start another in its place.

Three kinds of actors are kept alive, and each uses the parts that it needs:

- An agent worker is watched by a `Supervisor` while it has calls under way. `Rotation` hands the workers out in turn,
  and starts another one, with `placed`, in the place of a lost one: any worker can do the work of any other.
- A replica, of the policy or of the teacher, is started by `placed` and watched by a `Supervisor` as long as it lives
  (rollout/fleet/health.py). Its replacement has to hold the current weights before it may serve, counts against
  max_replacements, and may be asked for by an operator, too: a queue (`ReplicaFleet.wanted`) and `FleetOperator` do
  that. It shares nothing with `Rotation` but `placed`.
- Train workers compute in lockstep, so that the deadline of a step finds one that hangs. `check` of
  rollout/actors/carried.py then asks each of them once which one died, and all start again from a checkpoint
  (trainer/worker/recovery.py). Nobody has to watch them in between.

Errors that are raised inside an actor are carried to its callers by rollout/actors/carried.py.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from configs.runtime.environment import PYTHON_PATH

logger = logging.getLogger(__name__)
A = TypeVar("A")
T = TypeVar("T")
AGAIN_S = 30.0
"""The time after which a replacement that failed is tried again."""
PLACEMENTS = 3
"""The number of times that an actor which joins a running run is placed: Ray may choose a dead node until it knows that
it is dead."""

ENV = {
    "PYTHONPATH": PYTHON_PATH,  # vLLM's worker processes import weight_sync.receiver.vllm_receiver
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_API_KEY": "",  # vLLM's app would refuse the gateway; rollout.http.guard stands in front of it
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


async def placed(
    create: Callable[[], Awaitable[A]],
    first_answer: Callable[[A], Awaitable[object]],
    end: Callable[[A], None],
    report: Callable[[str], None],
) -> A:
    """Return an actor that has given its first answer. One that dies before that is ended and created anew, maybe on
    another node. Raises what the last one died of, or what its constructor or `first_answer` raised.

    Args:
        report: gets a sentence about each that is placed again.
    """
    # Imported here, because the fleet's monitor imports this module and works without Ray.
    from ray.exceptions import RayActorError

    placement = 0
    while True:
        placement += 1
        actor = await create()
        try:
            await first_answer(actor)
            return actor
        except BaseException as error:
            end(actor)
            died = isinstance(error, RayActorError) and not error.actor_init_failed
            if not died or placement == PLACEMENTS:
                raise
            report(f"is placed again: {error}")


# -- finding out that an actor is lost ---------------------------------------------------------------------------------


class UnwellError(RuntimeError):
    """The actor's process lives, and it is lost all the same: its judge says why."""


class DiedError(RuntimeError):
    """The actor has died. The message is the reason that it gave, or the error of the call that waited for it."""


class Silence:
    """A judge for actors that only have to answer. It counts the questions that stay open, and not the time: where the
    driver itself stood still, only one more is open.

    Example, with PARTS = 4: the fourth `observe(None)` in a row returns "answered nothing for <key>=120 seconds".
    """

    PARTS = 4

    def __init__(self, timeout_s: float, key: str):
        self.interval_s = timeout_s / self.PARTS
        self._reason = f"answered nothing for {key}={timeout_s:g} seconds"
        self._num_open = 0

    def observe(self, answer: object | None) -> str | None:
        self._num_open = self._num_open + 1 if answer is None else 0
        return self._reason if self._num_open >= self.PARTS else None


class Supervisor(Generic[T]):
    """Ask one actor again and again, let a judge look at its answers, and tell of its loss once.

    Example, an agent worker, which loses the calls that it had when it is silent:
        silence = Silence(config.rollout.agent_worker_timeout_s, "rollout.agent_worker_timeout_s")
        Supervisor(
            ask=worker.heartbeat, judge=silence.observe, interval_s=silence.interval_s, on_lost=worker.end,
            started=worker.started,
        )
    Example, a replica, whose death is known before it fails to answer, and whose judge compares speeds:
        Supervisor(
            ask=lambda: fleet.take_progress(replica),
            judge=lambda report: health.observe(replica, now(), report, fleet.replicas.values()),
            interval_s=config.rollout.progress_interval_s,
            on_lost=lambda error: fleet.lose(replica.name, error),
            died=replica.handle.wait_dead,
        )
    """

    def __init__(
        self,
        *,
        ask: Callable[[], Awaitable[T]],
        judge: Callable[[T | None], str | None],
        interval_s: float,
        on_lost: Callable[[Exception], Awaitable[object]],
        started: Callable[[], Awaitable[object]] | None = None,
        died: Callable[[], Awaitable[object]] | None = None,
    ):
        """Make a supervisor that does nothing before `run`.

        Args:
            ask: the question. If it raises, the actor is lost. At most one is open, since another one would only queue
                behind it at the actor.
            judge: gets an answer, or None for each `interval_s` in which the question stayed open. Returns why the
                actor is lost, or None while it is well.
            on_lost: gets an UnwellError of the judge, a DiedError, or what `ask` raised.
            started: awaited before the first question, without a deadline: an actor may load for long.
            died: returns the reason, or raises, when the actor has died.
        """
        self._ask, self._judge, self._interval_s, self._on_lost = ask, judge, interval_s, on_lost
        self._started, self._died = started, died

    async def run(self) -> None:
        """Watch the actor, and return once it is lost and `on_lost` has been told. May be cancelled and run again."""
        try:
            if self._started is not None:
                await self._started()
                self._started = None
            error = await self._until_lost()
        except Exception as failure:
            error = failure
        await self._on_lost(error)

    async def _until_lost(self) -> Exception:
        death: asyncio.Future[object] = (
            asyncio.get_running_loop().create_future() if self._died is None else asyncio.ensure_future(self._died())
        )
        asking: asyncio.Future[T] | None = None
        clock = asyncio.get_running_loop().time
        try:
            while True:
                asking = asking or asyncio.ensure_future(self._ask())
                began = clock()
                await asyncio.wait({death, asking}, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    return DiedError(str(death.exception() or death.result()))
                answer = asking.result() if asking.done() else None
                if (reason := self._judge(answer)) is not None:
                    return UnwellError(reason)
                if asking.done():
                    asking = None
                    await asyncio.wait({death}, timeout=max(0.0, began + self._interval_s - clock()))
        finally:
            for task in filter(None, (death, asking)):
                task.cancel()


# -- actors that take turns --------------------------------------------------------------------------------------------


class NoWorkerLeftError(RuntimeError):
    """The last worker was lost, and none could be started in its place. The cause says why."""


class Rotation(Generic[A]):
    """Workers that take turns. A lost one is replaced, by `replace(lost)`, while the others continue."""

    def __init__(self, workers: Iterable[A], replace: Callable[[A], Awaitable[A]]):
        self._serving = deque(workers)
        self._replace = replace
        self._replacing: set[asyncio.Task[None]] = set()
        self._num_starting = 0
        self._error: Exception | None = None

    async def next(self) -> A:
        """Wait until a worker serves, and return it. Raises NoWorkerLeftError."""
        while not self._serving:
            if not self._replacing:
                raise NoWorkerLeftError(f"no agent worker is left: {self._error}") from self._error
            await asyncio.wait(self._replacing, return_when=asyncio.FIRST_COMPLETED)
        self._serving.rotate(-1)
        return self._serving[-1]

    @property
    def serving(self) -> list[A]:
        return list(self._serving)

    def lose(self, worker: A) -> None:
        """Replace the worker. Idempotent, since every call that it had in flight reports its loss."""
        if worker in self._serving:
            self._serving.remove(worker)
            task = asyncio.create_task(self._bring_another(worker))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _bring_another(self, lost: A) -> None:
        """Replace the worker; where that fails, again after a while, as long as others serve or start meanwhile."""
        while True:
            self._num_starting += 1
            try:
                return self._serving.append(await self._replace(lost))
            except Exception as error:
                logger.warning("an agent worker is not replaced", exc_info=error)
                self._error = error
            finally:
                self._num_starting -= 1
            if not self._serving and not self._num_starting:
                return
            await asyncio.sleep(AGAIN_S)
