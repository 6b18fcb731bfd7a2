"""Sessions that no run trains: clients open them over HTTP, and each becomes a JSON file when it ends."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.agents.threads import OneThread
from rollout.chat.messages import Message
from rollout.chat.template import tool_dict
from rollout.request_ids import RequestId
from rollout.sessions.budget import LOOK_S, SessionLimits
from rollout.sessions.codec import ChatCodec
from rollout.sessions.errors import BadRequestError, NoReplicaError, NotRecordedError, TooManySessionsError
from rollout.sessions.registry import OpenSessions
from rollout.sessions.session import Session
from rollout.sessions.tree.sequences import rows
from rollout.types import Prompt, SamplingParams

logger = logging.getLogger(__name__)
RETRY_S = 30.0
"""The seconds until a record that could not be written is tried again."""
END_S = 5.0
"""The seconds that a session which ends waits for the calls that it has cancelled."""
ID_BITS = 48

# -- the record --------------------------------------------------------------------------------------------------------


class Ending(Enum):
    finished = "finished"
    """The harness ended the session."""
    aborted = "aborted"
    """The harness aborted the session, or a client of the control routes aborted an answer of it."""
    timed_out = "timed_out"
    """The harness took too long or went away: sessions.timeout_s, sessions.idle_timeout_s."""
    unfinished = "unfinished"
    """The server ended before the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """One answer of the policy. `parent` leads to those before it."""

    id: str
    """The id that clients get, without the prefix of their dialect."""
    parent: str | None
    """The answer that this one goes on from; null begins a conversation."""
    messages: list[dict[str, Any]]
    """The messages since the parent's answer, in the form of OpenAI's chat."""
    answer: dict[str, Any] | None
    """Null where there is none: the client went away, or the session ended before it."""
    state: str
    """The state of the call: finished, cancelled or running."""
    finish: str | None
    """The reason why the call ended: stop, length, tool_calls or abort."""
    cause: str | None
    """The reason why the prompt is not simply the conversation so far with new messages: template, retoken, edit,
    compaction, retry, length or tools."""
    delivery: str
    """The fate of the reply (read, pending or lost): whether the client read it to the end."""
    sampling: dict[str, float]
    """The parameters of the request, which replace the `sampling` of the session."""
    prompt_tokens: int
    sampled_tokens: int
    reward: float | None
    """The reward of this answer, beside that of the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """Tokens as the model read and sampled them. A linear conversation is one sequence, and every branch one more. Each
    sampled token is in the response of exactly one of them."""

    messages: list[dict[str, Any]]
    """The conversation with its last answer, in the form of OpenAI's chat."""
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    response_ids: list[int]
    """The tokens of answers, and between them those that the model read."""
    loss_mask: list[int]
    """Per token of the response: 1 where the policy sampled it, and the engine could say from what."""
    rollout_logprobs: list[float]
    """Per token of the response: its logprob in the distribution that it was sampled from, 0 where it was not
    sampled."""
    versions: list[tuple[int, int, int]]
    """[start, end, global_steps] of the sampled response tokens."""
    turn_rewards: list[tuple[int, float, int]]
    """[end, reward, number] of the answers, where any has a reward of its own; `number` rewarded ones precede it."""
    kept_counts: list[int] = field(default_factory=list)
    """Per token of the response: the number of tokens that it was drawn from, 0 for the whole vocabulary, -1 where the
    engine could not say. Empty, and left out of the file: all from the whole vocabulary."""
    kept_ids: list[int] = field(default_factory=list)
    """The tokens that were drawn from, one response token after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    id: str
    ending: str
    """The way the session ended: finished, aborted, timed_out or unfinished."""
    task: Mapping[str, Any]
    """The task that the session was opened with."""
    model: str
    sampling: Mapping[str, Any]
    """The parameters of requests that set no others."""
    began: float
    """Seconds since the epoch, as `ended`."""
    ended: float
    reward: float | None
    """The sum of all posted rewards, those of answers included; null if none was posted."""
    metrics: Mapping[str, float]
    """The metrics that were posted with rewards."""
    limit: str | None
    """The limit that the session reached."""
    answers: list[AnswerRecord]
    """The answers in the order in which they began."""
    sequences: list[SequenceRecord]
    """The sequences of the finished answers."""

    def to_json(self) -> bytes:
        """Return a JSON object with a line for each field. Half of a surrogate pair, which UTF-8 cannot hold, is
        written as JSON's own escape."""
        values = asdict(self)
        for sequence in values["sequences"]:
            if not sequence["kept_counts"]:
                del sequence["kept_counts"], sequence["kept_ids"]
        encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=dict).encode
        lines = (f"{encode(column.name)}: {encode(values[column.name])}" for column in fields(self))
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8", "backslashreplace")


def answer_records(session: Session) -> list[AnswerRecord]:
    transcript = session.transcript
    return [
        AnswerRecord(
            id=transcript.names.answer_id(generation.number),
            parent=None if generation.parent is None else transcript.names.answer_id(generation.parent),
            messages=[chat_message(message) for message in generation.messages],
            answer=None if generation.answer is None else chat_message(generation.answer),
            state=generation.state.value,
            finish=None if generation.finish is None else generation.finish.value,
            cause=None if generation.cause is None else generation.cause.value,
            delivery=generation.delivery.value,
            sampling=dict(generation.sampling),
            prompt_tokens=len(generation.prompt_ids),
            sampled_tokens=generation.completion.num_tokens,
            reward=transcript.rewards.turns.get(generation.number),
        )
        for generation in transcript.generations
    ]


def sequence_records(session: Session) -> list[SequenceRecord]:
    transcript = session.transcript
    return [
        SequenceRecord(
            messages=[chat_message(message) for message in transcript.history(row[-1].number)],
            tools=[dict(tool_dict(tool)) for tool in row[-1].tools],
            prompt_ids=sequence.prompt_ids.tolist(),
            response_ids=sequence.response_ids.tolist(),
            loss_mask=sequence.loss_mask.astype(int).tolist(),
            # As few digits as tell each float32 from the next.
            rollout_logprobs=[float(str(number)) for number in sequence.rollout_logprobs],
            versions=[(span.start, span.end, span.global_steps) for span in sequence.spans],
            turn_rewards=[(turn.end, turn.reward, turn.number) for turn in sequence.turn_rewards],
            kept_counts=[] if sequence.kept is None else sequence.kept.counts.tolist(),
            kept_ids=[] if sequence.kept is None else sequence.kept.token_ids.tolist(),
        )
        for row, sequence in zip(rows(transcript.generations), transcript.sequences(), strict=True)
    ]


def chat_message(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI's chat, with `reasoning_content` as most servers have it."""
    body: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.call_id is not None:
        body["tool_call_id"] = message.call_id
    return body


# -- the sessions ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A session that is open or waits to be recorded."""

    session: Session
    task: Mapping[str, Any]
    began: float = field(default_factory=time.time)
    ending: Ending | None = None
    """The way in which the session ended. The entry stays until the session is recorded."""
    due_at: float = 0.0
    """The time of the next try to record the session."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionArchive(OpenSessions):
    """Keeps each session from `create` until its record is written.

    Example:
        async with archive.watched(), served(session_app(archive), listener):
            ...  # sessions that are open at the end of the block are recorded as unfinished
    """

    def __init__(
        self,
        *,
        codec: ChatCodec | str,
        limits: SessionLimits,
        sampling: SamplingParams,
        model: str,
        route: Callable[[], GenerateGroup],
        max_open: int,
        write: Callable[[SessionRecord], None],
        is_drafted: bool = False,
    ):
        """
        Args:
            codec: a text says why there can be no sessions.
            sampling: the parameters of requests that set no others.
            route: makes the `generate` of a session.
            max_open: sessions.max_open.
            write: writes a record; may block, and raise OSError.
            is_drafted: replicas decode speculatively.
        """
        super().__init__(model)
        self._codec, self._limits, self._sampling = codec, limits, sampling
        self._route, self._max_open, self._write = route, max_open, write
        self._is_drafted = is_drafted
        self._entries: dict[str, _Entry] = {}
        self._in_thread = OneThread("session-archive")
        self._is_ending = False

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """End sessions whose harness takes too long while the block runs. Those that are open at its end are recorded
        as unfinished. No error of a session ends the block or keeps others from being recorded."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(), name="session-archive")
                yield
                watching.cancel()
        finally:
            await self._end_all()

    async def create(self, task: Mapping[str, Any]) -> str:
        if isinstance(self._codec, str):
            raise BadRequestError(f"there are no sessions of this model: {self._codec}", code="no_chat_template")
        if self._is_ending:
            raise NoReplicaError("the server is about to end")
        if len(self._entries) >= self._max_open:
            raise TooManySessionsError(f"{self._max_open} sessions are open (sessions.max_open): finish or abort one")
        ordinal = secrets.randbits(ID_BITS)
        name = f"{ordinal:0{ID_BITS // 4}x}"
        prompt = Prompt(ordinal=ordinal, text="", token_ids=(), ground_truth="", extra=dict(task))
        episode = EpisodeTask(request_id=RequestId(ordinal=ordinal), prompt=prompt, index=0, sampling=self._sampling)
        session = Session(
            episode, self._route(), self._codec, self._limits, takes_sampling=True, is_drafted=self._is_drafted
        )
        self._sessions[name] = session
        self._entries[name] = _Entry(session=session, task=task)
        return name

    async def finish(self, session: str) -> None:
        """End a session. Raises NotRecordedError, and records the session later."""
        self.find(session)
        await self._end(session, Ending.finished)

    async def abort(self, session: str) -> None:
        """Abort a session. Raises NotRecordedError, and records the session later."""
        self.find(session).abort()
        await self._end(session, Ending.aborted)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for name, entry in list(self._entries.items()):
                if (ending := self._due(entry)) is not None:
                    await self._end_or_log(name, ending)

    def _due(self, entry: _Entry) -> Ending | None:
        """Return how the session has to end now; None if it goes on."""
        if entry.ending is not None:
            return entry.ending if time.monotonic() >= entry.due_at else None
        if entry.session.is_aborted:  # by a client of the control routes, which aborted an answer of it
            return Ending.aborted
        budget = entry.session.budget
        left, limit = budget.time_left()
        if left > 0:
            return None
        budget.limit_reached = budget.limit_reached or limit
        return Ending.timed_out

    async def _end_all(self) -> None:
        self._is_ending = True
        for entry in self._entries.values():  # all are closed before the first waits for what it has cancelled
            entry.session.close()
        for name in list(self._entries):
            await self._end_or_log(name, Ending.unfinished)

    async def _end_or_log(self, name: str, ending: Ending) -> None:
        try:
            await self._end(name, ending)
        except NotRecordedError as error:
            logger.error("%s", error)
        except Exception:  # of this session only: the others go on
            logger.exception("session %s cannot be ended", name)

    async def _end(self, name: str, ending: Ending) -> None:
        """End a session and record it. The first caller says how it ended. Raises NotRecordedError."""
        entry = self._entries.get(name)  # None: it was ended while the watcher waited for another
        if entry is None:
            return
        async with entry.lock:  # the watcher and a client may end it at the same time, and one of them records it
            if name not in self._entries:
                return
            entry.ending = entry.ending or ending
            entry.session.close()
            self.keys.revoke(name)
            await entry.session.ended(END_S)  # only then nothing changes the session, and another thread may read it
            try:
                await self._in_thread(self._record, name, entry, entry.ending)
            except Exception as error:
                entry.due_at = time.monotonic() + RETRY_S
                if not isinstance(error, OSError):  # a fault of ours in this session, and not of the disk
                    logger.exception("session %s has no record", name)
                what = f"the record of session {name} cannot be written: {error}"
                raise NotRecordedError(f"{what}; it is tried again every {RETRY_S:g} s") from error
            del self._entries[name], self._sessions[name]

    def _record(self, name: str, entry: _Entry, ending: Ending) -> None:
        rewards = entry.session.transcript.rewards
        record = SessionRecord(
            id=name,
            ending=ending.value,
            task=entry.task,
            model=self.model,
            sampling=asdict(self._sampling),
            began=round(entry.began, 3),
            ended=round(time.time(), 3),
            reward=rewards.total,
            metrics=rewards.metrics,
            limit=entry.session.budget.limit_reached,
            answers=answer_records(entry.session),
            sequences=sequence_records(entry.session),
        )
        self._write(record)
