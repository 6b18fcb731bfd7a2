"""Counts the turns whose conversation was in the KV cache of this replica and had to be computed again."""

from dataclasses import dataclass, replace

from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest

MOST = 10_000
"""The episodes whose last turn is remembered. An episode does not say that it has ended."""
LEAST_TOKENS = 128
"""Shorter conversations do not count: a cache holds whole blocks only."""
END = 16
"""The tokens at the end of a turn by which the next one is known to go on from it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    version: int
    length: int
    end: tuple[int, ...]


class Conversations:
    """Remembers how the last turn of every episode ended, and the version under which it began, since a prefix is
    shared only by requests under the same one. So a turn after an update, or after a move from another replica, is not
    one that the cache has forgotten, nor is one that begins another conversation, as a sub-agent's does.

    Example:
        conversations.add(request, completion)  # a second turn, of which nothing was in the cache
        conversations.computed_again            # 1
    """

    def __init__(self) -> None:
        self.turns = 0
        """The turns that have ended."""
        self.computed_again = 0
        """Turns of them of which most of the turns before was not in the cache any more."""
        self._has_cache = False  # the cache of prefixes may be off
        self._last = dict[RequestId, _Turn]()

    def add(self, request: GenerationRequest, completion: Completion) -> None:
        """Take in a turn that has ended."""
        self.turns += 1
        self._has_cache |= completion.cached_tokens > 0
        episode = replace(request.request_id, turn=0)
        before = self._last.pop(episode, None)
        if not completion.spans:
            return
        version = completion.spans[0].global_steps
        end = (*request.prompt_ids[-END:], *completion.token_ids[-END:].tolist())[-END:]
        self._last[episode] = _Turn(version, len(request.prompt_ids) + completion.num_tokens, end)
        if len(self._last) > MOST:
            del self._last[next(iter(self._last))]
        if before is not None and self._has_cache and before.version == version and _goes_on(request, before):
            self.computed_again += 2 * completion.cached_tokens < before.length


def _goes_on(request: GenerationRequest, before: _Turn) -> bool:
    """Return whether the prompt begins with the turn before, which is not too short."""
    start = before.length - len(before.end)
    return before.length >= LEAST_TOKENS and request.prompt_ids[start : before.length] == before.end
