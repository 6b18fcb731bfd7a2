"""The sessions that are open in one process, as the HTTP side asks for them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.sessions.backend import PromptRequest, Reward
from rollout.sessions.errors import BadRequestError, SessionEndedError
from rollout.sessions.keys import SessionKeys
from rollout.sessions.messages import Answer, ChatRequest
from rollout.sessions.session import Session
from rollout.sessions.transcript import TranscriptClosedError


class OpenSessions:
    """A `SessionBackend` but for `create`: who opens sessions and what becomes of them is for its subclasses to say."""

    def __init__(self, model: str):
        self.keys = SessionKeys()
        self._model = model
        self._sessions: dict[str, Session] = {}

    @property
    def model(self) -> str:
        return self._model

    async def answer(self, session: str, request: ChatRequest | PromptRequest) -> Sequence[Answer]:
        return await self._of(session).answer(request)

    def delivered(self, session: str, answer_ids: Sequence[str], whole: bool) -> None:
        found = self._sessions.get(session)
        if found is None:
            return  # it ended while the answer was written
        for answer_id in answer_ids:
            found.deliver(answer_id, whole)

    async def count_tokens(self, session: str, request: ChatRequest) -> int:
        return await self._of(session).count_tokens(request)

    async def reward(self, session: str, reward: Reward) -> None:
        try:
            self._of(session).transcript.reward(reward.value, reward.answer_id, reward.metrics)
        except TranscriptClosedError as error:
            raise SessionEndedError(str(error)) from None
        except ValueError as error:
            raise BadRequestError(str(error)) from None

    async def finish(self, session: str) -> None:
        self._of(session).close()

    async def abort(self, session: str) -> None:
        self._of(session).abort()

    async def transcript(self, session: str) -> Mapping[str, Any]:
        return _summary(self._of(session))

    def _of(self, session: str) -> Session:
        found = self._sessions.get(session)
        if found is None:
            raise SessionEndedError(f"session {session[:80]} has ended")
        return found


def _summary(session: Session) -> Mapping[str, Any]:
    """The transcript as JSON, for people and harnesses."""
    return {
        "session": session.transcript.names.session,
        "generations": [
            {
                "id": session.transcript.names.answer_id(one.number),
                "parent": one.parent,
                "state": one.state.name,
                "cause": None if one.cause is None else one.cause.name,
                "prompt_tokens": len(one.prompt_ids),
                "tokens": one.completion.num_tokens,
                "versions": [(span.start, span.end, span.global_steps) for span in one.completion.spans],
                "finish": None if one.finish is None else one.finish.name,
                "answer": None if one.answer is None else one.answer.content,
            }
            for one in session.transcript.generations
        ],
        "limit": session.limit_reached,
    }
