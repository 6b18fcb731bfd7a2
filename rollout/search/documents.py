"""What a search finds, and what a retriever is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    title: str = ""
    text: str
    score: float = 0.0
    """Of the query that found it, higher is better; comparable within one answer only."""


class RetrievalError(RuntimeError):
    """A retriever cannot answer: it is down, or answers what no retriever does."""


class Retriever(Protocol):
    """Finds documents. Safe to call from many episodes at once.

    Example: [[first, second]] = await retriever.search(["Who wrote Faust?"], topk=2)
    """

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """The best documents of each query, best first: at most `topk`, and none where nothing fits. Never blocks the
        event loop. Raises RetrievalError."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...
