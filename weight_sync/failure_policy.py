"""Decides what happens to replicas that fail in a weight update. The checkpoint manager acts on it."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

MISSES_IN_A_ROW = 2
"""A replica that misses so many updates is given up: each costs the others its deadlines."""


class Retries:
    """Decides which replicas are tried together, and how often, in one update.

    In a transport where all wait for one another, one failure makes others fail. So a replica that failed by itself is
    tried once more, after those that it may have made fail, and apart from them. (The checkpoint manager leaves both to
    the next update where the trainer has gone on meanwhile.)

    Example:
        retries = Retries(["a", "b", "c"])
        for names in retries:                             # {"a", "b", "c"}, then {"a"}, then {"b"}
            retries.record({"a", "b"}, stopped_by="b")    # b failed, so the trainer stopped sending to a
    """

    def __init__(self, names: Iterable[str]):
        self._groups = deque([frozenset(names)])
        self._failures: Counter[str] = Counter()

    def __iter__(self) -> Iterator[frozenset[str]]:
        while self._groups:
            yield self._groups.popleft()

    def record(self, failed: Collection[str], stopped_by: str | None) -> set[str]:
        """Takes note of an attempt, and returns the replicas that are not tried again. `stopped_by`: the one that ended
        the sending by its failure, if one did: then the others that failed had to."""
        culprits = {name for name in failed if stopped_by in (None, name)}
        self._failures.update(culprits)
        again = frozenset(name for name in culprits if self._failures[name] == 1)
        if victims := frozenset(failed) - culprits:
            self._groups.appendleft(victims)
        if again:
            self._groups.append(again)
        return culprits - again
