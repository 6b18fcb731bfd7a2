"""The tree of generations of one session: what each request went on from, and what of it is trained."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollout.sessions.attachment import Attachment, TreeIndex
from rollout.sessions.generation import Cause, Delivery, Generation, State
from rollout.sessions.messages import ChatRequest, Finish, Message
from rollout.sessions.names import Names
from rollout.sessions.sequences import SessionStatistics, rows, statistics, to_sequence
from rollout.types import EMPTY, Completion, TokenSequence


class TranscriptClosedError(RuntimeError):
    """The session has ended: it takes no requests and no rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRewards:
    """What a harness posted."""

    value: float | None = None
    """For the session as a whole."""
    turns: Mapping[int, float] = field(default_factory=dict)
    """For single answers, by number of the generation."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float | None:
        """The trajectory's reward, which contains those of turns; None if nothing was posted."""
        if self.value is None and not self.turns:
            return None
        return (self.value or 0.0) + sum(self.turns.values())


class Transcript:
    """Generations are added, never removed, and their tokens never change. No call waits for anything, and requests may
    run side by side; all calls are from one thread.

    Example:
        attachment = transcript.attach(request)
        if attachment.recorded:  # the client sends it again
            answers = transcript.repeat(attachment)
        else:
            (generation,) = transcript.begin(attachment)  # at once: from now on an equal request can join it
            transcript.set_prompt(generation.number, prompt_ids)
            transcript.finish(generation.number, completion, message, Finish.stop)
        transcript.deliver(generation.number, whole=True)
    """

    def __init__(self, session: str):
        self.names = Names(session)
        self.rewards = SessionRewards()
        self.is_closed = False
        self._generations: list[Generation] = []
        self._index = TreeIndex(self.names, self._generations)
        self._num_repeated = 0

    @property
    def generations(self) -> tuple[Generation, ...]:
        """By number."""
        return tuple(self._generations)

    def generation(self, number: int) -> Generation:
        """Raises ValueError for a number that there is not."""
        if not 0 <= number < len(self._generations):
            raise ValueError(f"generation {number}: this session has {len(self._generations)}, counted from 0")
        return self._generations[number]

    def history(self, number: int) -> tuple[Message, ...]:
        """The conversation that ends with the answer of a generation."""
        return self._index.history(self.generation(number).number)

    # -- requests ------------------------------------------------------------------------------------------------------

    def attach(self, request: ChatRequest) -> Attachment:
        """Where the request belongs. Changes nothing. Raises UnknownGenerationError if it says that it continues what
        is not there, and TranscriptClosedError."""
        self._check_open()
        return self._index.attach(request)

    def begin(self, attachment: Attachment) -> tuple[Generation, ...]:
        """Add the generations of a request, as many as it wants answers. They run until `finish` or `cancel`."""
        self._check_open()
        call = len(self._generations)
        if attachment.parent is not None:
            self._update(attachment.parent, delivery=Delivery.read)  # the harness knows the answer
        for number in range(call, call + attachment.request.num_answers):
            generation = Generation(
                number=number,
                parent=attachment.parent,
                call=call,
                messages=attachment.messages,
                depth=attachment.depth,
                paths=attachment.paths,
                tools_hash=attachment.tools_hash,
                head=attachment.head,
                digest=attachment.digest,
                cause=attachment.cause,
                sampling=attachment.request.sampling,
                tools=attachment.request.tools,
            )
            self._generations.append(generation)
            self._index.add(generation)
        return tuple(self._generations[call:])

    def repeat(self, attachment: Attachment) -> tuple[Generation, ...]:
        """Return the generations that answer a request which was sent before. An answer that was lost is now on its
        way again: say with `deliver` whether it came."""
        if not attachment.recorded:
            raise ValueError("the request was not sent before: begin its generations")
        self._num_repeated += 1
        for number in attachment.recorded:
            if self._generations[number].delivery is Delivery.lost:
                self._update(number, delivery=Delivery.pending)
        return tuple(self._generations[number] for number in attachment.recorded)

    # -- a generation --------------------------------------------------------------------------------------------------

    def set_prompt(self, number: int, prompt_ids: Iterable[int], cause: Cause | None = None) -> Generation:
        """Say what the model reads, before it answers. `cause`: why it is not what the messages so far suggest, where
        the renderer found that. Raises ValueError for a prompt that leaves the parent's tokens without a cause."""
        one = self._running(number)
        ids = np.fromiter(prompt_ids, np.int32)
        before = None if one.parent is None else self._generations[one.parent].token_ids
        continues = before is not None and np.array_equal(ids[: len(before)], before)
        cause = one.cause or cause
        if before is not None and not continues and cause is None:
            raise ValueError(
                f"generation {number}: its prompt of {len(ids)} tokens does not begin with the {len(before)} tokens of "
                f"generation {one.parent}: give the cause, one of {', '.join(cause.name for cause in Cause)}"
            )
        return self._update(number, prompt_ids=ids, continues=continues, cause=cause)

    def finish(self, number: int, completion: Completion, answer: Message, finish: Finish) -> Generation:
        """Record the answer. Its tool calls have the ids `names.call_id(number, 0)`, 1, ..."""
        one = self._running(number)
        if not len(one.prompt_ids):
            raise ValueError(f"generation {number}: set its prompt before its answer")
        if finish is Finish.abort:
            raise ValueError(f"generation {number}: what was aborted has no answer, cancel it")
        expected = [self.names.call_id(number, index) for index in range(len(answer.tool_calls))]
        if [call.call_id for call in answer.tool_calls] != expected:
            raise ValueError(f"generation {number}: its tool calls must have the ids {expected}, not {answer}")
        paths = self._index.add_answer(one, answer)
        return self._update(
            number, completion=completion, answer=answer, finish=finish, paths=paths, state=State.finished
        )

    def cancel(self, number: int, completion: Completion = EMPTY) -> Generation:
        """End it without an answer. `completion`: what was sampled; it is kept and not trained. May be called again
        when more is known of that."""
        if self.generation(number).state is not State.cancelled:
            self._running(number)
        return self._update(number, completion=completion, finish=Finish.abort, state=State.cancelled)

    def deliver(self, number: int, *, whole: bool) -> Generation:
        """Say whether the client read an answer to its end. Who has read it once, has read it."""
        one = self.generation(number)
        if one.state is not State.finished:
            raise ValueError(f"generation {number}: it is {one.state.name} and has no answer")
        if whole:
            return self._update(number, delivery=Delivery.read)
        return one if one.delivery is Delivery.read else self._update(number, delivery=Delivery.lost)

    # -- the end -------------------------------------------------------------------------------------------------------

    def reward(self, value: float, answer_id: str | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Reward the session, or one answer. A later reward for the same replaces it. Raises ValueError for an unknown
        answer or what is no number, and TranscriptClosedError."""
        self._check_open()
        if not math.isfinite(value):
            raise ValueError(f"reward {value}: must be a finite number")
        metrics = {**self.rewards.metrics, **(metrics or {})}
        if answer_id is None:
            self.rewards = replace(self.rewards, value=value, metrics=metrics)
            return
        number = self.names.number(answer_id)
        if number is None or number >= len(self._generations) or self._generations[number].answer is None:
            raise ValueError(f"reward for {answer_id!r}: must be the id of an answer that this session has given")
        self.rewards = replace(self.rewards, turns={**self.rewards.turns, number: value}, metrics=metrics)

    def close(self) -> None:
        """End the session: it takes no more requests and rewards. What runs may still finish or be cancelled."""
        self.is_closed = True

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences to train, in the order in which they began: one for a linear session. Every token of the
        trained generations is sampled in exactly one of them."""
        rewards = self.rewards.turns
        rewarded = sorted({self._generations[number].call for number in rewards})
        return tuple(to_sequence(row, rewards, rewarded) for row in rows(self._generations))

    def newest_sequence(self) -> int:
        """Which of the sequences has the newest answer: what the session came to. 0 where there is none."""
        ends = [row[-1].number for row in rows(self._generations)]
        return ends.index(max(ends)) if ends else 0

    def statistics(self) -> SessionStatistics:
        return statistics(self._generations, self._num_repeated)

    # ------------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise TranscriptClosedError(f"session {self.names.session} has ended")

    def _running(self, number: int) -> Generation:
        one = self.generation(number)
        if one.state is not State.running:
            raise ValueError(f"generation {number}: it is {one.state.name} already")
        return one

    def _update(self, number: int, **changes: Any) -> Generation:
        self._generations[number] = replace(self._generations[number], **changes)
        return self._generations[number]
