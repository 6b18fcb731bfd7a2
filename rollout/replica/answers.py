"""The answers of one call on their way from a replica: what they say alike of a prompt travels once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from rollout.types import Completion, Routes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """Completions of the requests of one call, which have their prompt in common where a group is sampled together.

    Example:
        Answers.of(completions).completions()  # the same completions
    """

    parts: tuple[Completion, ...]
    """The completions, each without the first `num_shared` rows of its routes."""
    num_shared: tuple[int, ...]
    shared: Routes | None
    """The first rows of routes, as the first completion has them."""

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Self:
        """Take out of every completion the first rows of routes that it has in common with the first that has any."""
        routed = [completion.routes for completion in completions if completion.routes is not None]
        if len(routed) < 2:
            return cls(parts=tuple(completions), num_shared=(0,) * len(completions), shared=None)
        counts = [_num_shared(routed[0], completion.routes) for completion in completions]
        shared = routed[0].first(sorted(counts)[-2])  # the largest is that of the first itself
        counts = [min(count, len(shared)) for count in counts]
        parts = tuple(_without(completion, count) for completion, count in zip(completions, counts, strict=True))
        return cls(parts=parts, num_shared=tuple(counts), shared=shared)

    def completions(self) -> list[Completion]:
        """Return the completions as they were."""
        return [self._whole(part, count) for part, count in zip(self.parts, self.num_shared, strict=True)]

    def _whole(self, part: Completion, count: int) -> Completion:
        if not count or part.routes is None or self.shared is None:
            return part
        rows = np.concatenate([self.shared.experts[:count], part.routes.experts])
        return replace(part, routes=Routes(experts=rows))


def _num_shared(first: Routes, routes: Routes | None) -> int:
    return 0 if routes is None or routes.experts.shape[1:] != first.experts.shape[1:] else first.num_equal(routes)


def _without(completion: Completion, count: int) -> Completion:
    routes = completion.routes
    return completion if routes is None else replace(completion, routes=routes.last(len(routes) - count))
