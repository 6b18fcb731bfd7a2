"""One session: requests of a harness become generations of its transcript, and at the end an episode."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from configs.rollout import MOST_KEPT
from rollout.agents.loop import EpisodeTask, GenerateGroup
from rollout.chat.messages import Answer, ChatRequest, Finish, Message, Role
from rollout.request_ids import RequestId
from rollout.sessions.budget import SessionBudget, SessionLimits
from rollout.sessions.call import Call
from rollout.sessions.codec import ChatCodec
from rollout.sessions.dialects.dialect import ParsedRequest
from rollout.sessions.dialects.fields import shown
from rollout.sessions.dialects.rule import MAX_NAMES
from rollout.sessions.errors import BadRequestError, SessionEndedError, SessionError
from rollout.sessions.tree.attachment import Attachment, UnknownGenerationError
from rollout.sessions.tree.generation import Generation, State
from rollout.sessions.tree.transcript import Transcript, TranscriptClosedError
from rollout.types import EMPTY, Completion, GenerationRequest, SamplingParams

NO_ANSWER = "none"
"""The id of an answer for which nothing was generated."""
FINISHES = {"stop": Finish.stop, "length": Finish.length}
NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Parameters that replicas do not sample by, each with the value that changes nothing."""


class Session:
    """Answers the requests of one harness, which may come side by side.

    Example:
        session = Session(task, generate, codec, limits)
        (answer,) = await session.answer(request)
        session.transcript.sequences()
    """

    def __init__(
        self,
        task: EpisodeTask,
        generate: GenerateGroup,
        codec: ChatCodec,
        limits: SessionLimits,
        takes_sampling: bool = False,
        is_drafted: bool = False,
    ):
        """
        Args:
            takes_sampling: let requests set the temperature and the like, which otherwise are those of the task.
            is_drafted: replicas decode speculatively, and refuse what vLLM cannot draft by.
        """
        # The name leaves out the attempt, so that a harness that starts again hears the same ids.
        self.transcript = Transcript(str(replace(task.request_id, attempt=0)))
        self.budget = SessionBudget(limits)
        self.is_aborted = False
        self.num_requests = 0
        """Requests for answers that were understood, refused ones included."""
        self.num_refused = 0
        self.last_refusal: str | None = None
        """The reason that the harness was told when a request was refused the last time."""
        self.failure: Exception | None = None
        """The error that `generate` raised. It is no fault of the harness, which was answered with a server error."""
        self.left_out: set[str] = set()
        """The fields of its requests that were left out, by the rule of `rollout/sessions/dialects/rule.py`."""
        self._stored: dict[str, ParsedRequest] = {}
        """The requests whose answers a client may ask for again, by the ids of the answers."""
        self._task = task
        self._generate = generate
        self._codec = codec
        self._takes_sampling, self._is_drafted = takes_sampling, is_drafted
        self._calls: dict[int, Call] = {}
        """The calls under way, by number of each of their generations."""
        self._stops: dict[int, str | None] = {}
        """The stop strings that ended generations."""

    @property
    def num_sampled(self) -> int:
        return sum(generation.completion.num_tokens for generation in self.transcript.generations)

    def leave_out(self, names: Sequence[str]) -> None:
        """Note fields of a request that were left out."""
        self.left_out.update(names[: max(0, MAX_NAMES - len(self.left_out))])

    async def answer(self, request: ChatRequest) -> list[Answer]:
        """Return the answers to a request, or those that it had before. Cancelling the last call that waits for a
        generation ends it at the engine.

        A request with a `prompt` is a conversation by itself, or goes on from the answer whose tokens it begins with.

        It may take as long as it must, for example while the replicas are paused.

        Raises:
            SessionLimitError: a limit was reached, and the harness has heard of it by an answer that ended by length.
            SessionEndedError: the session was aborted.
            BadRequestError: the request cannot be rendered, sampled by, or continued.
        """
        if self._takes_sampling:
            self._requested_sampling(request)  # refuses before anything begins
        self.num_requests += 1
        num_least = self._least_tokens(request)
        if self.budget.is_too_long(num_least):  # before anything is rendered
            self.budget.refuse_too_long(num_least)
            return [_empty_answer() for _ in range(request.num_answers)]
        prompt_ids = None
        if request.prompt is not None:
            prompt_ids, request = await self._codec.plain_prompt(request.prompt, request)
        attachment = self._attach(request, prompt_ids)
        if attachment.recorded:
            generations = self.transcript.repeat(attachment)
        else:
            num_begun = len(self.transcript.generations)
            if self.budget.is_used_up(num_begun, self.num_sampled, request.num_answers):
                return [_empty_answer() for _ in range(request.num_answers)]
            generations = self.transcript.begin(attachment)
            self._start(attachment, [generation.number for generation in generations], prompt_ids)
        numbers = [generation.number for generation in generations]
        await self._wait(numbers)
        return [self._answer(self.transcript.generation(number)) for number in numbers]

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the prompt that the request would get. Raises BadRequestError for one that
        cannot fit into the context."""
        if self.budget.is_too_long(num_least := self._least_tokens(request)):
            raise BadRequestError(f"the messages have at least {num_least} tokens, for {self.budget.context}")
        prompt_ids, _ = await self._codec.prompt(self.transcript, self._attach(request))
        return len(prompt_ids)

    def refused(self, error: SessionError) -> None:
        """Note that a request of the harness was refused."""
        self.num_refused += 1
        self.last_refusal = error.message

    def deliver(self, *answer_ids: str, whole: bool) -> None:
        """Note whether answers were written whole while the client was still there: it may not have read others."""
        for number in map(self.transcript.answered, answer_ids):
            if number is not None:
                self.transcript.deliver(number, whole=whole)

    def recorded(self, answer_id: str) -> Answer | None:
        """Return an answer that this session has given."""
        number = self.transcript.answered(answer_id)
        return None if number is None else self._answer(self.transcript.generation(number))

    def store(self, answer_id: str, parsed: ParsedRequest) -> None:
        """Keep the form of an answer, so that a client may ask for it again."""
        last = next(reversed(self._stored.values()), parsed)  # what every request repeats is kept once
        echoed = {name: _same(last.echoed.get(name), value) for name, value in parsed.echoed.items()}
        self._stored[answer_id] = replace(
            parsed, request=ChatRequest(), echoed=echoed, offers=_same(last.offers, parsed.offers)
        )

    def stored(self, answer_id: str) -> tuple[ParsedRequest, Answer] | None:
        """Return the form of an answer that was stored, and the answer."""
        parsed, answer = self._stored.get(answer_id), self.recorded(answer_id)
        return None if parsed is None or answer is None else (parsed, answer)

    def abort(self) -> None:
        """End all that runs. The session is not trained."""
        self.is_aborted = True
        self.close()

    def close(self) -> None:
        """Take no more requests, and end those under way."""
        self.transcript.close()
        for call in self._calls.values():
            call.cancel()

    async def ended(self, timeout_s: float) -> None:
        """Return when all that was under way at `close` has ended, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for call in set(self._calls.values()):
                    await call.ended()

    def _least_tokens(self, request: ChatRequest) -> int:
        try:
            return self._codec.least_tokens(request)
        except RecursionError:
            raise BadRequestError("the request is nested too deeply") from None

    def _attach(self, request: ChatRequest, prompt_ids: Sequence[int] | None = None) -> Attachment:
        try:
            return self.transcript.attach(request, prompt_ids)
        except TranscriptClosedError as error:
            raise SessionEndedError(str(error)) from None
        except UnknownGenerationError as error:
            raise BadRequestError(str(error), code="previous_response_not_found") from None
        except RecursionError:
            raise BadRequestError("the request is nested too deeply") from None

    async def _wait(self, numbers: Sequence[int]) -> None:
        """Wait for the generations of one call, for which other clients may wait too."""
        call = self._calls.get(numbers[0])
        with self.budget.waiting():
            try:
                if call is not None:
                    await call.wait()
            except asyncio.CancelledError:
                if self.transcript.is_closed:
                    raise SessionEndedError("the session has ended") from None
                if call is not None and not call.num_waiting:
                    self._give_up(call)
                raise

    def _give_up(self, call: Call) -> None:
        """End a call that nobody waits for. A client that asks again gets other answers."""
        for number in call.numbers:
            # Before the engine is asked to end: a client may ask again while it does.
            if self.transcript.generation(number).state is State.running:
                self.transcript.cancel(number)
            elif self.transcript.generation(number).state is State.finished:
                self.transcript.deliver(number, whole=False)
        call.give_up()

    # -- generation ----------------------------------------------------------------------------------------------------

    def _start(self, attachment: Attachment, numbers: Sequence[int], prompt_ids: Sequence[int] | None) -> None:
        call = Call(numbers, [self._request_id(number) for number in numbers], self._generate)
        self._calls |= dict.fromkeys(numbers, call)
        call.start(self._run(call, attachment, prompt_ids))

    async def _run(self, call: Call, attachment: Attachment, prompt_ids: Sequence[int] | None) -> None:
        """Generate the answers of one request, and put them into the transcript. `prompt_ids` is None where the prompt
        is rendered from messages."""
        numbers, request, cause = call.numbers, attachment.request, None
        is_plain = prompt_ids is not None
        completions: dict[int, Completion] = {}
        try:
            if prompt_ids is None:
                prompt_ids, cause = await self._codec.prompt(self.transcript, attachment)
            for number in numbers:
                self.transcript.set_prompt(number, prompt_ids, cause)
            room = self.budget.room(request.max_tokens, self.num_sampled, len(prompt_ids), len(numbers))
            if room <= 0:
                return
            requests = [self._request(number, prompt_ids, room, request) for number in numbers]
            completions = dict(zip(numbers, await call.generated(requests), strict=True))
            for number, completion in completions.items():
                if self.transcript.generation(number).state is State.running:
                    await self._finish(number, completion, request, is_plain)
            is_cut = any(completion.finish_reason == "length" for completion in completions.values())
            self.budget.was_cut = is_cut and room != request.max_tokens
        finally:
            self.failure = self.failure or call.failure
            for number in numbers:
                del self._calls[number]
                if self.transcript.generation(number).state is not State.finished:
                    self.transcript.cancel(number, completions.get(number, EMPTY))

    async def _finish(self, number: int, completion: Completion, request: ChatRequest, is_plain: bool) -> None:
        finish = FINISHES.get(completion.finish_reason)
        if finish is None:  # a client of the control routes aborted it
            self.transcript.cancel(number, completion)
            self.abort()
            return
        if is_plain:
            message, stop = await self._codec.plain_answer(completion, request)
        else:
            message, stop = await self._codec.answer(self.transcript, number, completion, request)
        self._stops[number] = stop
        if finish is Finish.stop and message.tool_calls:
            finish = Finish.tool_calls
        self.transcript.finish(number, completion, message, finish)

    def _request(self, number: int, prompt_ids: Sequence[int], room: int, request: ChatRequest) -> GenerationRequest:
        sampling = self._task.sampling
        end_ids = (*sampling.stop_token_ids, *self._codec.renderer.end_token_ids)
        if self._takes_sampling:
            sampling = self._requested_sampling(request)
        sampling = replace(
            sampling.reseeded(number),
            max_tokens=room,
            stop=(*sampling.stop, *request.stop),
            stop_token_ids=tuple(dict.fromkeys(end_ids)),
        )
        return GenerationRequest(request_id=self._request_id(number), prompt_ids=tuple(prompt_ids), sampling=sampling)

    def _requested_sampling(self, request: ChatRequest) -> SamplingParams:
        return requested_sampling(self._task.sampling, request.sampling, self._is_drafted)

    def _request_id(self, number: int) -> RequestId:
        return replace(self._task.request_id, turn=number)

    def _answer(self, generation: Generation) -> Answer:
        prompt_ids = tuple(generation.prompt_ids.tolist())
        if generation.answer is None:
            if self.is_aborted or self.transcript.is_closed:
                raise SessionEndedError("the session was aborted")
            return _empty_answer(prompt_ids)
        assert generation.finish is not None
        return Answer(
            answer_id=self.transcript.names.answer_id(generation.number),
            message=generation.answer,
            finish=generation.finish,
            prompt_ids=prompt_ids,
            completion=generation.completion,
            stop_string=self._stops.get(generation.number),
        )


def _same(earlier: Any, value: Any) -> Any:
    """Return the earlier of two equal values."""
    return earlier if earlier == value else value


def _empty_answer(prompt_ids: tuple[int, ...] = ()) -> Answer:
    """Return an answer that ends by length without a token, as harnesses know it from a full context."""
    return Answer(
        answer_id=NO_ANSWER,
        message=Message(role=Role.assistant),
        finish=Finish.length,
        prompt_ids=prompt_ids,
        completion=EMPTY,
    )


def requested_sampling(
    default: SamplingParams, requested: Mapping[str, float], is_drafted: bool = False
) -> SamplingParams:
    """Return `default` with the parameters of a request. Raises BadRequestError for those that cannot be sampled by:
    with `is_drafted`, where replicas decode speculatively, min_p is one of them.

    Example: requested_sampling(SamplingParams(top_p=0.9), {"temperature": 0.0}).top_p == 0.9
    """
    for name, neutral in NEUTRAL.items():
        if (value := requested.get(name, neutral)) != neutral:
            raise _refusal(name, value, f"{neutral:g}: sessions sample by temperature, top_p, top_k, min_p and seed")
    temperature, top_p = requested.get("temperature", default.temperature), requested.get("top_p", default.top_p)
    if temperature < 0:
        raise _refusal("temperature", temperature, "a number from 0 (greedy) on")
    if not 0 < top_p <= 1:
        raise _refusal("top_p", top_p, "a number above 0 and up to 1")
    min_p = requested.get("min_p", default.min_p)
    if not 0 <= min_p <= 1:
        raise _refusal("min_p", min_p, "a number from 0 to 1")
    if is_drafted and min_p > 0:
        raise _refusal("min_p", min_p, "0: this server decodes speculatively (rollout.speculative.method)")
    allowed = f"-1 (the whole vocabulary) or an integer from 1 to {MOST_KEPT}"
    top_k = _whole(requested, "top_k", default.top_k, allowed)
    if top_k == 0 or not -1 <= top_k <= MOST_KEPT:
        raise _refusal("top_k", top_k, allowed)
    seed = default.seed if "seed" not in requested else _whole(requested, "seed", 0, "an integer")
    sampled_by = {"temperature": float(temperature), "top_p": float(top_p), "top_k": top_k, "min_p": float(min_p)}
    return replace(default, seed=seed, **sampled_by)


def _whole(requested: Mapping[str, float], name: str, default: int, allowed: str) -> int:
    value = requested.get(name, default)
    if value != int(value):
        raise _refusal(name, value, allowed)
    return int(value)


def _refusal(name: str, value: float, allowed: str) -> BadRequestError:
    return BadRequestError(f"{name} = {shown(value)}: allowed is {allowed}", param=name)
