"""One session: the requests of a harness become generations of its transcript, and at the end an episode."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.request_ids import RequestId
from rollout.sessions.attachment import Attachment, UnknownGenerationError
from rollout.sessions.backend import PromptRequest
from rollout.sessions.call import Call
from rollout.sessions.errors import BadRequestError, SessionEndedError, SessionLimitError
from rollout.sessions.generation import Cause, Generation, State
from rollout.sessions.messages import Answer, ChatRequest, Finish, Message, Role
from rollout.sessions.parsing import AnswerParser, leaves_reasoning_open
from rollout.sessions.render import Parent, Renderer
from rollout.sessions.sampling import asked_sampling
from rollout.sessions.transcript import Transcript, TranscriptClosedError
from rollout.sessions.verification import is_check_due
from rollout.types import EMPTY, Completion, GenerationRequest, IntArray

T = TypeVar("T")
NO_ANSWER = "none"
"""Id of an answer for which nothing was generated."""
PROMPT_END = 16
"""Last tokens of a prompt, which show whether it has begun the reasoning of the answer."""
FINISHES = {"stop": Finish.stop, "length": Finish.length}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    max_turns: int
    """Answers of the policy."""
    max_tokens: int
    """Sampled in all answers together. Of answers that are made side by side each may take all that was left."""
    max_turn_tokens: int | None
    """Sampled in one answer; None is as many as are left."""
    max_context: int
    """Prompt and answer of one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What makes tokens of messages, and messages of tokens, in a thread of its own: neither may run twice at once."""

    renderer: Renderer
    parser: AnswerParser
    in_thread: Callable[..., Awaitable[Any]]
    """(function, *arguments) -> what it returns."""
    forks_on_mismatch: bool = False
    """Whether a history that the harness edited, or that the template renders in another way, begins a new sequence."""
    check_up_to_tokens: int = 8192
    """See `is_check_due`."""


class Session:
    """Answers the requests of one harness, which may come side by side.

    Example:
        session = Session(task, generate, words, limits)
        (answer,) = await session.answer(request)
        session.transcript.sequences()
    """

    def __init__(
        self,
        task: EpisodeTask,
        generate: GenerateGroup,
        words: Words,
        limits: SessionLimits,
        takes_sampling: bool = False,
    ):
        """`takes_sampling`: whether temperature and the like are those that a request asks for, if it does, rather than
        those of the task."""
        # By what the episode is, so that its harness hears the same ids when it starts again.
        self.transcript = Transcript(str(replace(task.request_id, attempt=0)))
        self.limit_reached: str | None = None
        """The limit that ended the conversation."""
        self.was_cut = False
        """Whether the latest answer ended by length for a limit of the session, rather than of its request."""
        self.is_aborted = False
        self.last_active = time.monotonic()
        self._task = task
        self._generate = generate
        self._words = words
        self._limits = limits
        self._takes_sampling = takes_sampling
        self.failure: Exception | None = None
        """What `generate` raised: no fault of the harness, which has heard of it as a server error."""
        self._calls: dict[int, Call] = {}
        """Those under way, by number of each of their generations."""
        self._under_way = 0
        self._waited_s, self._waiting_since = 0.0, 0.0
        self._stops: dict[int, str | None] = {}  # the stop string that ended a generation

    @property
    def num_sampled(self) -> int:
        return sum(one.completion.num_tokens for one in self.transcript.generations)

    @property
    def is_waiting(self) -> bool:
        """Whether a request is under way."""
        return self._under_way > 0

    @property
    def waited_s(self) -> float:
        """Seconds with a request under way."""
        return self._waited_s + (time.monotonic() - self._waiting_since if self.is_waiting else 0.0)

    async def answer(self, request: ChatRequest | PromptRequest) -> list[Answer]:
        """Return the answers to a request, or those that it had before. Cancelling the last call that waits for a
        generation ends it at the engine.

        A `PromptRequest` is a conversation by itself, or goes on from the answer whose tokens it begins with.

        Raises:
            SessionLimitError: a limit was reached, and the harness has heard of it by an answer that ended by length.
            SessionEndedError: the session was aborted.
            BadRequestError: the request asks for what cannot be rendered, sampled by, or continued.
        """
        if self._takes_sampling:
            asked_sampling(self._task.sampling, request.sampling)  # refuses before anything begins
        prompt_ids = None
        if isinstance(request, PromptRequest):
            prompt_ids, chat = await self._words.in_thread(self._as_chat, request)
        else:
            chat = request
        attachment = self._attach(chat)
        if prompt_ids is not None:
            attachment = replace(attachment, parent=self._parent_of(prompt_ids), can_bridge=False, cause=None)
        if attachment.recorded:
            generations = self.transcript.repeat(attachment)
        else:
            if self._is_over(request.num_answers):
                return [self._cut() for _ in range(request.num_answers)]
            generations = self.transcript.begin(attachment)
            self._start(attachment, [one.number for one in generations], prompt_ids)
        numbers = [one.number for one in generations]
        await self._hear(numbers)
        return [self._answer(self.transcript.generation(number)) for number in numbers]

    async def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that the request would get."""
        prompt_ids, _ = await self._prompt(self._attach(request))
        return len(prompt_ids)

    def deliver(self, answer_id: str, whole: bool) -> None:
        """Say whether the client read an answer to its end."""
        number = self.transcript.names.number(answer_id)
        if number is not None and number < len(self.transcript.generations):
            self.transcript.deliver(number, whole=whole)

    def abort(self) -> None:
        """End all that runs. The session is not trained."""
        self.is_aborted = True
        self.close()

    def close(self) -> None:
        """Take no more requests, and end those under way: nobody waits for them."""
        self.transcript.close()
        for call in self._calls.values():
            call.cancel()

    async def ended(self, timeout_s: float) -> None:
        """Return when all that was under way at `close` has ended, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for call in set(self._calls.values()):
                    await call.ended()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _hear(self, numbers: Sequence[int]) -> None:
        """Wait for the generations of one call, for which others may wait, too."""
        call = self._calls.get(numbers[0])
        self._enter()
        try:
            if call is not None:
                await call.wait()
        except asyncio.CancelledError:
            if self.transcript.is_closed:
                raise SessionEndedError("the session has ended") from None
            if call is not None and not call.num_waiting:
                self._give_up(call)
            raise
        finally:
            self._leave()

    def _give_up(self, call: Call) -> None:
        """Nobody waits for these answers any more, and who asks again gets others."""
        for number in call.numbers:
            if self.transcript.generation(number).state is State.running:
                self.transcript.cancel(number)
            elif self.transcript.generation(number).state is State.finished:
                self.transcript.deliver(number, whole=False)
        call.give_up()

    def _start(self, attachment: Attachment, numbers: Sequence[int], given: Sequence[int] | None) -> None:
        call = Call(numbers, [self._request_id(number) for number in numbers], self._generate)
        self._calls |= dict.fromkeys(numbers, call)
        call.start(self._run(call, attachment, given))

    async def _run(self, call: Call, attachment: Attachment, given: Sequence[int] | None) -> None:
        """Generate the answers of one request, and put them into the transcript. `given`: its prompt, if that is not
        rendered from messages."""
        numbers = call.numbers
        completions: dict[int, Completion] = {}
        try:
            prompt_ids, cause = await self._prompt(attachment) if given is None else (given, None)
            for number in numbers:
                self.transcript.set_prompt(number, prompt_ids, cause)
            if (room := self._room(attachment.request, len(prompt_ids), len(numbers))) <= 0:
                return
            requests = [self._request(number, prompt_ids, room, attachment.request) for number in numbers]
            completions = dict(zip(numbers, await call.generated(requests), strict=True))
            for number, completion in completions.items():
                if self.transcript.generation(number).state is State.running:
                    await self._finish(number, completion, attachment.request)
            ends = [one.finish_reason for one in completions.values()]
            self.was_cut = "length" in ends and room != attachment.request.max_tokens
        finally:
            self.failure = self.failure or call.failure
            for number in numbers:
                del self._calls[number]
                if self.transcript.generation(number).state is not State.finished:
                    self.transcript.cancel(number, completions.get(number, EMPTY))

    async def _finish(self, number: int, completion: Completion, request: ChatRequest) -> None:
        finish = FINISHES.get(completion.finish_reason)
        if finish is None:  # a client of the fleet aborted it
            self.transcript.cancel(number, completion)
            self.abort()
            return
        message, self._stops[number] = await self._words.in_thread(self._parsed, number, completion, request)
        if finish is Finish.stop and message.tool_calls:
            finish = Finish.tool_calls
        self.transcript.finish(number, completion, message, finish)

    def _parsed(self, number: int, completion: Completion, request: ChatRequest) -> tuple[Message, str | None]:
        renderer = self._words.renderer
        text = renderer.answer_text(completion.token_ids.tolist())
        before, stop = _cut_at(text, request.stop)
        prompt_end = renderer.text(self.transcript.generation(number).prompt_ids[-PROMPT_END:].tolist())
        message = self._words.parser.parse(
            before,
            lambda index: self.transcript.names.call_id(number, index),
            tools=request.tools,
            options=request.template_options,
            reasoning_open=leaves_reasoning_open(prompt_end),
        )
        return message, stop

    def _request(self, number: int, prompt_ids: Sequence[int], room: int, request: ChatRequest) -> GenerationRequest:
        ends = (*self._task.sampling.stop_token_ids, *self._words.renderer.end_token_ids)
        sampling = self._task.sampling
        if self._takes_sampling:
            sampling = asked_sampling(sampling, request.sampling)
        sampling = replace(
            sampling.reseeded(number),
            max_tokens=room,
            stop=(*sampling.stop, *request.stop),
            stop_token_ids=tuple(dict.fromkeys(ends)),
        )
        return GenerationRequest(request_id=self._request_id(number), prompt_ids=tuple(prompt_ids), sampling=sampling)

    def _request_id(self, number: int) -> RequestId:
        return replace(self._task.request_id, turn=number)

    def _answer(self, one: Generation) -> Answer:
        if one.answer is None:
            if self.is_aborted or self.transcript.is_closed:
                raise SessionEndedError("the session was aborted")
            return self._cut(one.prompt_ids)
        assert one.finish is not None
        return Answer(
            answer_id=self.transcript.names.answer_id(one.number),
            message=one.answer,
            finish=one.finish,
            prompt_ids=tuple(one.prompt_ids.tolist()),
            completion=one.completion,
            stop_string=self._stops.get(one.number),
        )

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def _prompt(self, attachment: Attachment) -> tuple[Sequence[int], Cause | None]:
        """Raises BadRequestError for messages that the chat template does not take."""
        try:
            return await self._words.in_thread(self._rendered, attachment)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the chat template refuses this request: {error}") from None

    def _rendered(self, attachment: Attachment) -> tuple[Sequence[int], Cause | None]:
        """The tokens of the parent with the new messages, or all messages anew with the cause of that."""
        request, words = attachment.request, self._words
        is_trusted = attachment.cause in (None, Cause.retry) or not words.forks_on_mismatch
        cause = attachment.cause
        if attachment.parent is not None and attachment.can_bridge and is_trusted:
            parent = self.transcript.generation(attachment.parent)
            bridge = words.renderer.bridge(
                self._parent(parent, attachment), attachment.messages, request.tools, request.template_options
            )
            prompt_ids = [] if bridge is None else [*parent.token_ids.tolist(), *bridge]
            mismatch = None if bridge is None else self._mismatch(parent, prompt_ids, attachment)
            if bridge is not None and (mismatch is None or not words.forks_on_mismatch):
                return prompt_ids, mismatch
            cause = cause or mismatch or Cause.template
        return words.renderer.full(attachment.conversation, request.tools, request.template_options), cause

    def _as_chat(self, request: PromptRequest) -> tuple[list[int], ChatRequest]:
        """The ids of the prompt, and a request whose one message stands for it in the transcript."""
        prompt = request.prompt
        ids = self._words.renderer.plain(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self._words.renderer.vocab_size
        if not ids or max(ids) >= vocab_size:
            given = f"{len(ids)} token ids up to {max(ids, default=-1)}"
            raise BadRequestError(f"prompt has {given}: allowed is one or more below {vocab_size}", param="prompt")
        return ids, ChatRequest(
            messages=(Message(role=Role.user, content=str(prompt)),),
            max_tokens=request.max_tokens,
            stop=request.stop,
            num_answers=request.num_answers,
            sampling=request.sampling,
            is_retry=request.is_retry,
        )

    def _parent_of(self, prompt_ids: Sequence[int]) -> int | None:
        """The newest answer whose tokens the prompt begins with."""
        ids = np.asarray(prompt_ids, np.int32)
        for one in reversed(self.transcript.generations):
            if one.state is State.finished and np.array_equal(ids[: len(one.token_ids)], one.token_ids):
                return one.number
        return None

    def _mismatch(self, parent: Generation, prompt_ids: list[int], attachment: Attachment) -> Cause | None:
        """How a bridged prompt differs from a render of its whole history, where it is time to look."""
        if not is_check_due(len(parent.token_ids), len(prompt_ids), self._words.check_up_to_tokens):
            return None
        sampled, at = [], parent
        while True:
            sampled.append((len(at.prompt_ids), len(at.prompt_ids) + at.completion.num_tokens))
            if at.parent is None or not at.continues:
                break
            at = self.transcript.generation(at.parent)
        request = attachment.request
        found = self._words.renderer.check(
            prompt_ids, sampled[::-1], attachment.conversation, request.tools, request.template_options
        )
        return None if found is None else found.cause

    def _parent(self, one: Generation, attachment: Attachment) -> Parent:
        assert one.answer is not None
        sent = attachment.conversation[: len(attachment.conversation) - len(attachment.messages)]
        has_reasoning = any(message.reasoning for message in self.transcript.history(one.number))
        return Parent(
            token_ids=one.token_ids.tolist(),
            ended=one.finish is not Finish.length,
            calls=one.answer.tool_calls,
            has_reasoning=has_reasoning,
            reasoning_sent=all(message.reasoning for message in sent if message.role is Role.assistant),
        )

    # -- limits --------------------------------------------------------------------------------------------------------

    def _is_over(self, num_answers: int) -> bool:
        """Whether the limits leave no room for another request."""
        if len(self.transcript.generations) + num_answers > self._limits.max_turns:
            return self._reach(f"sessions.max_turns={self._limits.max_turns}")
        if self.num_sampled >= self._limits.max_tokens:
            return self._reach(f"rollout.max_response_tokens={self._limits.max_tokens}")
        return False

    def _room(self, request: ChatRequest, num_prompt: int, num_answers: int) -> int:
        """How many tokens each answer may have."""
        left = (self._limits.max_tokens - self.num_sampled) // num_answers
        context = self._limits.max_context - num_prompt
        if context <= 0:
            self._reach(f"the context of {self._limits.max_context} tokens")
        elif left <= 0:
            self._reach(f"rollout.max_response_tokens={self._limits.max_tokens}")
        asked = [request.max_tokens, self._limits.max_turn_tokens]
        return min([left, context, *(one for one in asked if one is not None)])

    def _reach(self, limit: str) -> bool:
        """Raises SessionLimitError where the harness has heard of a limit before."""
        if self.limit_reached is not None:
            raise SessionLimitError(f"the session has reached its limit: {self.limit_reached}")
        self.limit_reached = limit
        return True

    def _cut(self, prompt_ids: IntArray | None = None) -> Answer:
        """An empty answer that ends by length, as harnesses know it from a full context."""
        return Answer(
            answer_id=NO_ANSWER,
            message=Message(role=Role.assistant),
            finish=Finish.length,
            prompt_ids=() if prompt_ids is None else tuple(prompt_ids.tolist()),
            completion=EMPTY,
        )

    def _attach(self, request: ChatRequest) -> Attachment:
        try:
            return self.transcript.attach(request)
        except TranscriptClosedError as error:
            raise SessionEndedError(str(error)) from None
        except UnknownGenerationError as error:
            raise BadRequestError(str(error), code="previous_response_not_found") from None
        except RecursionError:
            raise BadRequestError("the request is nested too deeply") from None

    def _enter(self) -> None:
        self._under_way += 1
        if self._under_way == 1:
            self._waiting_since = time.monotonic()

    def _leave(self) -> None:
        self._under_way -= 1
        self.last_active = time.monotonic()
        if self._under_way == 0:
            self._waited_s += self.last_active - self._waiting_since


def _cut_at(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first of the stop strings, and which one it is."""
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, stop = min(found)
    return text[:end], stop
