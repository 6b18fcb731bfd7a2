"""Counts the turns whose conversation was in the KV cache of this replica and had to be computed again."""

from dataclasses import replace

from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest

MOST = 10_000
"""The episodes whose last turn is remembered. An episode does not say that it has ended."""


class Conversations:
    """Remembers the version under which the last turn of every episode began, since a prefix is shared only by requests
    under the same one. So a turn after an update, or after a move from another replica, is not one that the cache has
    forgotten.

    Example:
        conversations.add(request, completion)  # a second turn, of which nothing was in the cache
        conversations.computed_again            # 1
    """

    def __init__(self) -> None:
        self.turns = 0
        """The turns that have ended."""
        self.computed_again = 0
        """Turns of them of which most of the turns before was not in the cache any more."""
        self._versions = dict[RequestId, int | None]()

    def add(self, request: GenerationRequest, completion: Completion) -> None:
        """Take in a turn that has ended."""
        self.turns += 1
        episode = replace(request.request_id, turn=0)
        version = completion.spans[0].global_steps if completion.spans else None
        before = self._versions.pop(episode, None)
        self._versions[episode] = version
        if len(self._versions) > MOST:
            del self._versions[next(iter(self._versions))]
        earlier = len(request.prompt_ids) - (request.num_observed or 0)
        if before is not None and before == version and 2 * completion.cached_tokens < earlier:
            self.computed_again += 1
