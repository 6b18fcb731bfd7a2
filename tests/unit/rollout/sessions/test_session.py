"""A session by itself: answers that nobody waits for, updates of the weights, and a full context."""

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest

from configs.rollout import ReasoningHistory, SessionsConfig
from rollout.agents.loop import resume_from
from rollout.chat.messages import Answer, ChatRequest, Finish, Message, Role
from rollout.progress import PartialCompletion, prompt_checksum
from rollout.request_ids import RequestId
from rollout.sessions.archive import sequence_records
from rollout.sessions.budget import SessionLimits
from rollout.sessions.codec import make_codec
from rollout.sessions.errors import SessionLimitError
from rollout.sessions.session import Session
from rollout.sessions.tree.generation import State
from rollout.types import Completion, GenerationRequest
from tests.support.chat_models import chat_tokenizer
from tests.support.fakes import make_completion
from tests.support.harnesses import FAMILY, Policy, episode_task
from tests.support.real_clock import on_real_clock

CODEC = make_codec(SessionsConfig(), chat_tokenizer(FAMILY))
LIMITS = SessionLimits(
    max_turns=9, max_tokens=900, max_turn_tokens=None, max_context=1000, timeout_s=60, idle_timeout_s=60
)
SAMPLED = CODEC.renderer.plain("The answer is")


class Engine:
    """An engine that samples SAMPLED, half of it before an update, and waits then until it may end."""

    def __init__(self, is_deaf: bool = False):
        """An engine that `is_deaf` knows no request by its name, since they are still on their way to it."""
        self.events: list[str] = []
        self.may_end = asyncio.Event()
        self._is_deaf = is_deaf
        self._answers: dict[RequestId, asyncio.Future[Completion]] = {}

    async def __call__(self, requests: list[GenerationRequest]) -> list[Completion]:
        try:
            return list(await asyncio.gather(*(self._answer(request.request_id) for request in requests)))
        except asyncio.CancelledError:
            self.events.append("cancel")
            raise

    async def _answer(self, name: RequestId) -> Completion:
        self.events.append(f"begin {name.turn}")
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        ending = asyncio.create_task(self.may_end.wait())
        await asyncio.wait([answer, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        return answer.result() if answer.done() else completion("stop")

    async def abort(self, request_ids: Collection[RequestId]) -> bool:
        self.events.append("abort")
        if self._is_deaf:
            return False
        for request_id in request_ids:
            self._answers[request_id].set_result(completion("abort"))
        return True


def completion(finish_reason: str) -> Completion:
    half, end = len(SAMPLED) // 2, len(SAMPLED)
    return make_completion(SAMPLED, [4] * half + [5] * (end - half), finish_reason)


def asks(content: str, num_answers: int = 1, is_retry: bool = False) -> ChatRequest:
    message = Message(role=Role.user, content=content)
    return ChatRequest(messages=(message,), num_answers=num_answers, is_retry=is_retry)


def session_on(engine: Engine, limits: SessionLimits = LIMITS) -> Session:
    return Session(episode_task(), engine, CODEC, limits)


async def gone(session: Session, engine: Engine, request: ChatRequest) -> None:
    """A client asks, and goes away as soon as the engine is at work."""
    known = len(engine.events)
    asking = asyncio.create_task(session.answer(request))
    while len(engine.events) < known + request.num_answers:
        await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def settled(session: Session) -> None:
    async with asyncio.timeout(5):
        while session._calls:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_answers", [1, 3])
@on_real_clock
async def test_what_was_sampled_for_a_client_that_went_away_is_recorded_and_not_trained(num_answers: int) -> None:
    engine = Engine()
    session = session_on(engine)
    await gone(session, engine, asks("Hi", num_answers))
    await settled(session)
    assert engine.events == [*(f"begin {turn}" for turn in range(num_answers)), "abort"], "nothing was cancelled"
    for generation in session.transcript.generations:
        assert (generation.state, generation.answer) == (State.cancelled, None)
        assert generation.completion.token_ids.tolist() == SAMPLED and len(generation.completion.spans) == 2
    assert session.num_sampled == num_answers * len(SAMPLED) and session.transcript.sequences() == ()
    assert not session.is_aborted, "the harness may ask for other things"


@on_real_clock
async def test_what_the_engine_does_not_know_is_cancelled() -> None:
    engine = Engine(is_deaf=True)
    session = session_on(engine)
    await gone(session, engine, asks("Hi"))
    await settled(session)
    assert engine.events == ["begin 0", "abort", "cancel"]
    (generation,) = session.transcript.generations
    assert (generation.state, generation.completion.num_tokens) == (State.cancelled, 0)


@on_real_clock
async def test_who_asks_again_gets_an_answer_of_his_own_while_the_old_one_ends() -> None:
    engine = Engine()
    session = session_on(engine)
    await gone(session, engine, asks("Hi"))
    assert session._calls, "the old one has not ended yet"
    engine.may_end.set()
    (answer,) = await session.answer(asks("Hi", is_retry=True))
    assert answer.finish is Finish.stop and answer.completion.token_ids.tolist() == SAMPLED
    assert [generation.state for generation in session.transcript.generations] == [State.cancelled, State.finished]


@on_real_clock
async def test_a_full_context_is_an_empty_answer_by_length_and_then_403() -> None:
    engine = Engine()
    engine.may_end.set()
    prompt = await session_on(engine).count_tokens(asks("Hi"))
    session = session_on(engine, replace(LIMITS, max_context=prompt + 3))

    async def answer(content: str) -> Answer:
        return (await session.answer(asks(content)))[0]

    assert (await answer("Hi")).finish is Finish.stop and engine.events == ["begin 0"]
    full = await answer("Hi, " * 9)
    assert (full.finish, full.message.content, full.completion.num_tokens) == (Finish.length, "", 0)
    assert engine.events == ["begin 0"] and "the context" in (session.budget.limit_reached or "")
    assert (await answer("Ho")).finish is Finish.stop, "another conversation has room"
    with pytest.raises(SessionLimitError, match=f"the context of {prompt + 3} tokens"):
        await answer("Ho, " * 9)


@on_real_clock
async def test_a_plain_prompt_that_goes_on_from_an_answer_is_answered_by_the_record_when_it_comes_again() -> None:
    session = Session(episode_task(), Policy(lambda _, request: str(request.request_id.turn)).generate, CODEC, LIMITS)
    (first,) = await session.answer(ChatRequest(prompt="2 + 2 ="))
    session.deliver(first.answer_id, whole=True)
    ids = (*first.prompt_ids, *first.completion.token_ids.tolist(), *CODEC.renderer.plain(" and 3 + 3 ="))
    (lost,) = await session.answer(ChatRequest(prompt=ids))
    session.deliver(lost.answer_id, whole=False)
    (again,) = await session.answer(ChatRequest(prompt=ids))
    session.deliver(again.answer_id, whole=True)
    (retried,) = await session.answer(ChatRequest(prompt=ids, is_retry=True))
    assert lost.answer_id == again.answer_id == retried.answer_id != first.answer_id
    (sequence,) = session.transcript.sequences()
    assert sequence.loss_mask.sum() == first.completion.num_tokens + lost.completion.num_tokens
    (record,) = sequence_records(session)
    assert [message["content"] for message in record.messages] == [CODEC.renderer.text(ids), lost.message.content]
    (other,) = await session.answer(ChatRequest(prompt=ids))
    assert other.answer_id != lost.answer_id, "one more sample of the same prompt"


@on_real_clock
async def test_a_plain_prompt_is_continued_by_the_text_as_it_was_sampled_with_its_tags() -> None:
    text = 'So.<think>hm</think>\n<tool_call>{"name": "search", "arguments": {}}</tool_call> then</s>'
    session = Session(episode_task(), Policy(lambda *_: text).generate, CODEC, LIMITS)
    (answer,) = await session.answer(ChatRequest(prompt="2 + 2 =", stop=("</s>",)))
    assert (answer.message, answer.finish) == (Message(role=Role.assistant, content=text[:-4]), Finish.stop)
    assert answer.stop_string == "</s>"


@on_real_clock
async def test_an_answer_without_reasoning_is_none_whose_reasoning_was_dropped() -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    policy = Policy(lambda _, request: [f"<think>\nHm.\n</think>\n\n{call}", call, "Done."][request.request_id.turn])
    policy.tokenizer = chat_tokenizer("qwen3")
    codec = make_codec(SessionsConfig(reasoning=ReasoningHistory.strip), policy.tokenizer)
    session = Session(episode_task(), policy.generate, codec, LIMITS)
    messages = asks("Hi").messages
    for _ in range(3):
        (answer,) = await session.answer(ChatRequest(messages=messages))
        calls = answer.message.tool_calls
        results = [Message(role=Role.tool, content="five", call_id=call.call_id) for call in calls]
        messages = (*messages, answer.message, *results)
    assert len(session.transcript.sequences()) == 1


@on_real_clock
async def test_what_a_client_gave_up_before_a_resume_does_not_abort_the_session_after_it() -> None:
    engine = Engine()
    session = session_on(engine)
    await gone(session, engine, asks("Hi"))
    await settled(session)
    checksum = prompt_checksum(session.transcript.generation(0).prompt_ids)
    engine.may_end.set()
    known = {(0, 0): PartialCompletion(prompt_checksum=checksum, completion=completion("abort"))}
    again = Session(episode_task(), resume_from(known, engine), CODEC, LIMITS)
    (answer,) = await again.answer(asks("Hi"))
    assert (answer.finish, again.is_aborted) == (Finish.stop, False)
