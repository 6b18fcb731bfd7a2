"""Sessions that no run trains: clients open them over HTTP, and what was sampled is recorded when they end."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.rollout import SessionsConfig
from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.agents.threads import OneThread
from rollout.request_ids import RequestId
from rollout.sessions.deadlines import LOOK_S, time_left
from rollout.sessions.errors import BadRequestError, NoReplicaError, NotRecordedError, TooManySessionsError
from rollout.sessions.open_sessions import OpenSessions
from rollout.sessions.record import Ending, SessionRecord, recorded_answers, recorded_sequences
from rollout.sessions.session import Session, SessionLimits, Words
from rollout.types import Prompt, SamplingParams

logger = logging.getLogger(__name__)
RETRY_S = 30.0
"""Seconds until a record that could not be written is tried again."""
END_S = 5.0
"""So long a session that ends waits for what it has cancelled."""
NAME_BITS = 48


@dataclass(slots=True, kw_only=True)
class _Open:
    """What the record says beside the transcript."""

    session: Session
    task: Mapping[str, Any]
    began: float = field(default_factory=time.time)
    began_at: float = field(default_factory=time.monotonic)
    ending: Ending | None = None
    """Once it has one. It stays open until it is recorded."""
    due_at: float = 0.0
    """When the next try to record it is due."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RecordedSessions(OpenSessions):
    """A session is open from `create` until its record is written.

    Example:
        async with sessions.watched(), served(session_app(sessions, sessions.keys), listener):
            ...  # sessions that are open at the end of the block are recorded as unfinished
    """

    def __init__(
        self,
        *,
        words: Words | str,
        limits: SessionLimits,
        sampling: SamplingParams,
        model: str,
        route: Callable[[], GenerateGroup],
        config: SessionsConfig,
        write: Callable[[SessionRecord], None],
    ):
        """`words`: a text says why there can be no sessions. `sampling`: where requests ask for nothing else. `route`:
        makes the `generate` of a session. `write`: may block, and raise OSError."""
        super().__init__(model)
        self._words, self._limits, self._sampling = words, limits, sampling
        self._route, self._config, self._write = route, config, write
        self._open: dict[str, _Open] = {}
        self._in_thread = OneThread("records")
        self._is_ending = False

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block runs, sessions are ended whose harness takes too long. Those that are open at its end are
        recorded as unfinished."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(), name="sessions")
                yield
                watching.cancel()
        finally:
            await self._end_all()

    # -- SessionBackend ------------------------------------------------------------------------------------------------

    async def create(self, task: Mapping[str, Any]) -> str:
        if isinstance(self._words, str):
            raise BadRequestError(f"there are no sessions of this model: {self._words}", code="no_chat_template")
        if self._is_ending:
            raise NoReplicaError("the server is about to end")
        if len(self._open) >= self._config.max_open:
            allowed = f"{self._config.max_open} sessions are open (sessions.max_open): finish or abort one"
            raise TooManySessionsError(allowed)
        ordinal = secrets.randbits(NAME_BITS)
        name = f"{ordinal:0{NAME_BITS // 4}x}"
        prompt = Prompt(ordinal=ordinal, text="", token_ids=(), ground_truth="", extra=dict(task))
        episode = EpisodeTask(request_id=RequestId(ordinal=ordinal), prompt=prompt, index=0, sampling=self._sampling)
        session = Session(episode, self._route(), self._words, self._limits, takes_sampling=True)
        self._sessions[name] = session
        self._open[name] = _Open(session=session, task=task)
        return name

    async def finish(self, session: str) -> None:
        """Raises NotRecordedError, and records the session later."""
        self._of(session)
        await self._end(session, Ending.finished)

    async def abort(self, session: str) -> None:
        """Raises NotRecordedError, and records the session later."""
        self._of(session).abort()
        await self._end(session, Ending.aborted)

    # -- ends ----------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for name, one in list(self._open.items()):
                if (ending := self._due(one)) is not None:
                    await self._end_or_log(name, ending)

    def _due(self, one: _Open) -> Ending | None:
        """How the session has to end now; None if it goes on."""
        if one.ending is not None:
            return one.ending if time.monotonic() >= one.due_at else None
        if one.session.is_aborted:  # with an answer, by a client of the control routes
            return Ending.aborted
        left, limit = time_left(one.session, one.began_at, self._config)
        if left > 0:
            return None
        one.session.limit_reached = one.session.limit_reached or limit
        return Ending.timed_out

    async def _end_all(self) -> None:
        self._is_ending = True
        for one in self._open.values():
            one.session.close()
        for name in list(self._open):
            await self._end_or_log(name, Ending.unfinished)

    async def _end_or_log(self, name: str, ending: Ending) -> None:
        try:
            await self._end(name, ending)
        except NotRecordedError as error:
            logger.error("%s", error)

    async def _end(self, name: str, ending: Ending) -> None:
        """End the session and record it, as the first caller says. Raises NotRecordedError."""
        one = self._open[name]
        async with one.lock:
            if name not in self._open:
                return  # another caller was first
            one.ending = one.ending or ending
            one.session.close()
            self.keys.revoke(name)
            await one.session.ended(END_S)
            try:
                await self._in_thread(self._record, name, one, one.ending)
            except OSError as error:
                one.due_at = time.monotonic() + RETRY_S
                what = f"the record of session {name} cannot be written: {error}"
                raise NotRecordedError(f"{what}; it is tried again every {RETRY_S:g} s") from error
            del self._open[name], self._sessions[name]

    def _record(self, name: str, one: _Open, ending: Ending) -> None:
        """Nothing changes the session any more, so that another thread may read it."""
        rewards = one.session.transcript.rewards
        record = SessionRecord(
            id=name,
            ending=ending.value,
            task=one.task,
            model=self._model,
            sampling=asdict(self._sampling),
            began=round(one.began, 3),
            ended=round(time.time(), 3),
            reward=rewards.total,
            metrics=rewards.metrics,
            limit=one.session.limit_reached,
            answers=recorded_answers(one.session),
            sequences=recorded_sequences(one.session),
        )
        self._write(record)
