"""A generated world of made-up people, places and events: articles to search, and questions with one right answer."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.search.documents import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    text: str
    answer: str
    hops: int
    """How many articles must be read one after another."""
    queries: tuple[str, ...]
    """What a searcher who knows the way would ask, one per hop."""


class World:
    """Everything follows from seed and size."""

    def __init__(self, seed: int, num_documents: int):
        self.articles: Sequence[Document] = ()
