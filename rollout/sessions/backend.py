"""What the HTTP side of sessions stands on: who keeps the transcripts and asks the replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.sessions.messages import Answer, ChatRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A request to continue a text or token ids, with no messages and no template around them.

    Example: PromptRequest(prompt="2 + 2 =", max_tokens=4)
    """

    prompt: str | tuple[int, ...]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the harness asked for besides: temperature, top_p, penalties. The run's own count instead."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    is_retry: bool = False
    """Whether the client says that it sends this again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward that a harness posts, for the session or for one of its answers."""

    value: float
    answer_id: str | None = None
    """Of the answer that it is for; None is the whole session."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class SessionBackend(Protocol):
    """Keeps the sessions. Every method may raise a SessionError, which is answered as it says.

    A call of `answer` is cancelled when its client goes away. It may take as long as it must, for example while the
    replicas are paused.
    """

    @property
    def model(self) -> str:
        """Name of the policy, for clients that list models. A request may name any other."""
        ...

    async def create(self, task: Mapping[str, Any]) -> str:
        """Return the id of a new session: letters, digits, "-" and "_"."""
        ...

    async def answer(self, session: str, request: ChatRequest | PromptRequest) -> Sequence[Answer]:
        """Return `request.num_answers` answers to one prompt."""
        ...

    def delivered(self, session: str, answer_ids: Sequence[str], whole: bool) -> None:
        """Called once for each `answer` that returned. `whole`: all of it was written, and the client was still there;
        False means that the client may never have read it."""
        ...

    async def count_tokens(self, session: str, request: ChatRequest) -> int:
        """Return the number of token ids of the prompt."""
        ...

    async def reward(self, session: str, reward: Reward) -> None: ...

    async def finish(self, session: str) -> None: ...

    async def abort(self, session: str) -> None: ...

    async def transcript(self, session: str) -> Mapping[str, Any]:
        """Return what the session holds so far, as JSON."""
        ...
