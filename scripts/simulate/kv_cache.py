"""The KV cache of a simulated engine: what fits, what requests share, and what is still there when one comes back.

It is vLLM's block pool with blocks of any length. A request is a chain of segments, such as the prompt of its group and
the conversation of its episode. A segment that several requests have lies there once. When no request holds it, it
stays until others need the room, and the one that was left for longest goes first.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

KvSegment = tuple[Hashable, int]
"""A name that equal tokens at an equal place share, and the number of its tokens."""


@dataclass(slots=True)
class _Held:
    tokens: int
    users: int = 0


@dataclass(slots=True)
class KvCache:
    """Counts tokens; no key or value is there.

    Example:
        kv = KvCache(1000)
        kv.begin([("prompt", 300), ("episode", 200)])  # 0 tokens are cached, and 500 are free
        kv.sample(50)
        kv.end([("prompt", 300), ("episode", 200)], sampled=50)
        kv.begin([("prompt", 300), ("episode", 260)])  # 550 are cached, and 440 are free
    """

    capacity: float = math.inf
    _held: dict[Hashable, _Held] = field(default_factory=dict)
    _idle: dict[Hashable, int] = field(default_factory=dict)  # the one that was left first comes first
    _num_held: int = 0
    _num_idle: int = 0

    @property
    def room(self) -> float:
        """The tokens that no running request holds."""
        return self.capacity - self._num_held

    def needed(self, segments: Iterable[KvSegment]) -> int:
        """Return how much of the room a request takes that begins now."""
        return sum(tokens for name, tokens in segments if name not in self._held)

    def begin(self, segments: Sequence[KvSegment]) -> int:
        """Hold a request. Returns how many of its tokens were there, from its beginning on."""
        cached, is_there = 0, True
        for name, tokens in segments:
            held = self._held.get(name)
            if held is None:
                idle = self._idle.pop(name, 0)
                self._num_idle -= idle
                self._num_held += tokens
                held = self._held[name] = _Held(tokens)
            else:
                idle = held.tokens
            held.users += 1
            if is_there:
                cached += min(idle, tokens)
            is_there = is_there and idle >= tokens
        self._evict()
        return cached

    def sample(self, tokens: int) -> None:
        """Hold tokens that running requests have sampled."""
        self._num_held += tokens
        self._evict()

    def end(self, segments: Sequence[KvSegment], sampled: int, *, is_of_use: bool = True) -> None:
        """Let a request go, which has sampled so many tokens since it began. They belong to its last segment.

        Args:
            is_of_use: Others may share it. Not if the weights have changed since it began.
        """
        self._num_held -= sampled
        for index, (name, _) in enumerate(segments):
            held = self._held[name]
            held.users -= 1
            if not held.users:
                del self._held[name]
                self._num_held -= held.tokens
                if is_of_use:
                    self._idle[name] = tokens = held.tokens + (sampled if index == len(segments) - 1 else 0)
                    self._num_idle += tokens
        self._evict()

    def forget(self) -> None:
        """Drop what no request holds: nobody can share it any more."""
        self._idle.clear()
        self._num_idle = 0

    def _evict(self) -> None:
        while self._idle and self._num_idle > self.room:
            name = next(iter(self._idle))
            self._num_idle -= self._idle.pop(name)
