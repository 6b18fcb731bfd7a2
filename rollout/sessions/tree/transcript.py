"""The tree of generations of one session, which says what each request went on from and what of it is trained."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rollout.chat.messages import ChatRequest, Finish, Message
from rollout.chat.verification import Cause
from rollout.rewards.outcome import checked_metrics, finite_number
from rollout.sessions.tree.attachment import Attachment, TreeIndex
from rollout.sessions.tree.generation import Delivery, Generation, Names, Place, State
from rollout.sessions.tree.sequences import SessionStatistics, rows, statistics, to_sequence
from rollout.types import EMPTY, Completion, TokenSequence


class TranscriptClosedError(RuntimeError):
    """The session has ended: it takes no requests and no rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRewards:
    """The rewards that a harness has posted."""

    value: float | None = None
    """The reward of the session as a whole."""
    turns: Mapping[int, float] = field(default_factory=dict)
    """The rewards of single answers, by number of the generation."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float | None:
        """The reward of the trajectory, which contains those of turns; None if nothing was posted."""
        if self.value is None and not self.turns:
            return None
        return (self.value or 0.0) + sum(self.turns.values())


class Transcript:
    """Holds the generations of a session. They are added, never removed, and their tokens never change.

    No method waits for anything, and requests may run side by side. All changes are made by one thread.

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
        """All generations, by number."""
        return tuple(self._generations)

    def generation(self, number: int) -> Generation:
        """Return a generation. Raises ValueError for a number that no generation has."""
        if not 0 <= number < len(self._generations):
            raise ValueError(f"generation {number}: this session has {len(self._generations)}, counted from 0")
        return self._generations[number]

    def answered(self, name: str) -> int | None:
        """Return the finished generation that an id of ours belongs to; None for any other id."""
        return self._index.answered(name)

    def history(self, number: int) -> tuple[Message, ...]:
        """Return the conversation that ends with the answer of a generation, as the policy has read it."""
        return self._index.history(self.generation(number).number)

    # -- requests ------------------------------------------------------------------------------------------------------

    def attach(self, request: ChatRequest, prompt_ids: Sequence[int] | None = None) -> Attachment:
        """Return the place of a request in the tree, without adding anything. `prompt_ids` are those of a plain prompt,
        for which the request stands. Raises UnknownGenerationError for a request that continues an unknown answer, and
        TranscriptClosedError."""
        self._check_open()
        return self._index.attach(request) if prompt_ids is None else self._index.attach_plain(request, prompt_ids)

    def begin(self, attachment: Attachment) -> tuple[Generation, ...]:
        """Add the generations of a request, one for each answer that it wants. They run until `finish` or `cancel`."""
        self._check_open()
        call = len(self._generations)
        if attachment.parent is not None:
            self._update(attachment.parent, delivery=Delivery.read)  # the harness quotes the answer, so it has read it
        request, place = attachment.request, {field.name: getattr(attachment, field.name) for field in fields(Place)}
        for number in range(call, call + request.num_answers):
            generation = Generation(number=number, call=call, sampling=request.sampling, tools=request.tools, **place)
            self._generations.append(generation)
            self._index.add(generation)
        return tuple(self._generations[call:])

    def repeat(self, attachment: Attachment) -> tuple[Generation, ...]:
        """Return the generations that answer a request which was sent before. An answer that was lost is on its way
        again: `deliver` says whether it arrives."""
        self._num_repeated += 1
        for number in attachment.recorded:
            if self._generations[number].delivery is Delivery.lost:
                self._update(number, delivery=Delivery.pending)
        return tuple(self._generations[number] for number in attachment.recorded)

    # -- a generation --------------------------------------------------------------------------------------------------

    def set_prompt(self, number: int, prompt_ids: Iterable[int], cause: Cause | None = None) -> Generation:
        """Set the tokens that the model reads before it answers. `cause` is the renderer's reason why they are not what
        the messages so far suggest. Raises ValueError for a prompt that leaves the parent's tokens without a cause."""
        generation = self._running(number)
        ids = np.fromiter(prompt_ids, np.int32)
        before = None if generation.parent is None else self._generations[generation.parent].token_ids
        continues = before is not None and np.array_equal(ids[: len(before)], before)
        cause = generation.cause or cause
        if before is not None and not continues and cause is None:
            raise ValueError(
                f"generation {number}: its prompt of {len(ids)} tokens does not begin with the {len(before)} tokens of "
                f"generation {generation.parent}: give the cause, one of {', '.join(cause.name for cause in Cause)}"
            )
        return self._update(number, prompt_ids=ids, continues=continues, cause=cause)

    def finish(self, number: int, completion: Completion, answer: Message, finish: Finish) -> Generation:
        """Record the answer. Its tool calls must have the ids `names.call_id(number, 0)`, 1, ..."""
        generation = self._running(number)
        expected = [self.names.call_id(number, index) for index in range(len(answer.tool_calls))]
        if [call.call_id for call in answer.tool_calls] != expected:
            raise ValueError(f"generation {number}: its tool calls must have the ids {expected}, not {answer}")
        paths = self._index.add_answer(generation, answer)
        return self._update(
            number, completion=completion, answer=answer, finish=finish, paths=paths, state=State.finished
        )

    def cancel(self, number: int, completion: Completion = EMPTY) -> Generation:
        """End a generation without an answer. `completion` has the tokens that were sampled, which are kept and not
        trained. It may be called again once more of these are known."""
        if self.generation(number).state is not State.cancelled:
            self._running(number)
        return self._update(number, completion=completion, finish=Finish.abort, state=State.cancelled)

    def deliver(self, number: int, *, whole: bool) -> Generation:
        """Note whether the client read an answer to its end. An answer that was read once stays read."""
        generation = self.generation(number)
        if generation.state is not State.finished:
            raise ValueError(f"generation {number}: it is {generation.state.name} and has no answer")
        was_read = whole or generation.delivery is Delivery.read
        return self._update(number, delivery=Delivery.read if was_read else Delivery.lost)

    # -- the end -------------------------------------------------------------------------------------------------------

    def reward(self, value: float, answer_id: str | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Reward the session, or the answer `answer_id`, and replace an earlier reward for the same. Raises ValueError
        for an unknown answer and for numbers that no reward has (`finite_number`), and TranscriptClosedError."""
        self._check_open()
        value = finite_number("a reward", value)
        metrics = {**self.rewards.metrics, **checked_metrics(metrics or {})}
        if answer_id is None:
            self.rewards = replace(self.rewards, value=value, metrics=metrics)
            return
        if (number := self.answered(answer_id)) is None:
            raise ValueError(f"reward for {answer_id!r}: must be the id of an answer that this session has given")
        self.rewards = replace(self.rewards, turns={**self.rewards.turns, number: value}, metrics=metrics)

    def close(self) -> None:
        """Take no more requests and rewards. Generations that run may still finish or be cancelled."""
        self.is_closed = True

    def sequences(self) -> tuple[TokenSequence, ...]:
        """Return the sequences to train, in the order in which they began. A linear session is one sequence, and every
        token of the trained generations is sampled in exactly one of them."""
        rewards = self.rewards.turns
        rewarded = sorted({self._generations[number].call for number in rewards})
        return tuple(to_sequence(row, rewards, rewarded) for row in rows(self._generations))

    def newest_sequence(self) -> int:
        """Return the index of the sequence with the newest answer, which is the outcome of the session; 0 where there
        is no sequence."""
        ends = [row[-1].number for row in rows(self._generations)]
        return ends.index(max(ends)) if ends else 0

    def statistics(self) -> SessionStatistics:
        return statistics(self._generations, self._num_repeated)

    # ------------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise TranscriptClosedError(f"session {self.names.session} has ended")

    def _running(self, number: int) -> Generation:
        generation = self.generation(number)
        if generation.state is not State.running:
            raise ValueError(f"generation {number}: it is {generation.state.name} already")
        return generation

    def _update(self, number: int, **changes: Any) -> Generation:
        self._generations[number] = replace(self._generations[number], **changes)
        return self._generations[number]
