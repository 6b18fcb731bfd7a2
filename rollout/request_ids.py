"""The names of requests: our own, and those that HTTP clients choose.

Our requests carry a `RequestId` everywhere. An engine knows requests by text only, because HTTP clients name theirs as
they like; this module is the one place where such text is made and read.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

InGroup = tuple[int, int]
"""(episode, turn): one request of a group, whatever the attempt."""

_OWN = re.compile(
    r"(?P<evaluation>eval-)?(?P<ordinal>\d+)(\.(?P<attempt>\d+))?-(?P<episode>\d+)(-(?P<turn>\d+))?(\+part(?P<part>\d+))?"
)
# vLLM's OpenAI routes give each prompt of a completion a request of its own, numbered from 0.
_OPENAI = re.compile(r"(?P<response>cmpl-(?P<chosen>.+))-\d+|chatcmpl-(?P<chat>.+)")


@dataclass(frozen=True, slots=True)
class RequestId:
    """The name of a request of a run. `str` gives it as an engine knows it.

    Example: str(RequestId(ordinal=17, attempt=1, episode=3, turn=2)) == "17.1-3-2"
    """

    ordinal: int
    """The ordinal of the prompt, in the stream or in the held-out set."""
    attempt: int = 0
    """A request of an attempt that was given up may still run, so the next one has another number."""
    episode: int = 0
    """Place in the group. The greedy trajectory of remax comes after the group's own."""
    turn: int = 0
    part: int = 0
    """An update that aborts requests sends the rest of each as another part."""
    is_evaluation: bool = False

    @property
    def in_group(self) -> InGroup:
        return self.episode, self.turn

    @property
    def whole(self) -> Self:
        """Return the request that this one is a part of."""
        return replace(self, part=0)

    def __reduce__(self) -> tuple[Any, ...]:
        """A quarter of the CPU of a dataclass's own pickling: every question for progress carries thousands of ids."""
        return type(self), (self.ordinal, self.attempt, self.episode, self.turn, self.part, self.is_evaluation)

    def __str__(self) -> str:
        text = f"{'eval-' if self.is_evaluation else ''}{self.ordinal}"
        text += f".{self.attempt}-{self.episode}" if self.attempt else f"-{self.episode}"
        text += f"-{self.turn}" if self.turn else ""
        return f"{text}+part{self.part}" if self.part else text

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read what `str` wrote. Return None for the name of an HTTP client's request."""
        match = _OWN.fullmatch(name)
        if match is None:
            return None
        numbers = {key: int(match[key] or 0) for key in ("ordinal", "attempt", "episode", "turn", "part")}
        return cls(**numbers, is_evaluation=match["evaluation"] is not None)


class ClientNames(NamedTuple):
    """The names by which clients know a request that is inside an engine. They differ for requests over HTTP only.

    Example: ClientNames.of("cmpl-a-0") == ClientNames("cmpl-a-0", response="cmpl-a", chosen="a")
    """

    engine: str
    response: str
    """The id in the response that the client gets."""
    chosen: str
    """The client's X-Request-Id, or what vLLM drew in its place."""

    @classmethod
    def of(cls, name: str) -> Self:
        """`name`: the engine's."""
        match = _OPENAI.fullmatch(name)
        if match is None:
            return cls(name, name, name)
        return cls(name, match["response"] or name, match["chosen"] or match["chat"])


def repeated(name: str, number: int) -> str:
    """A unique name for a request whose own name is in use in the engine already."""
    return f"{name}~{number}"
