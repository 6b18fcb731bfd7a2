"""What a search finds, and what a retriever is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

MAX_CHARS, MAX_TITLE_CHARS = 100_000, 300
"""Of a document, wherever it comes from; the rest is cut off. A policy reads some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    title: str = ""
    text: str
    score: float = 0.0
    """Of the query that found it, higher is better; comparable within one answer only."""


class RetrievalError(RuntimeError):
    """A retriever cannot answer at all: it cannot be built, or is down for longer than anybody waits."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to one query.

    Example: Found((Document(title="Faust", text="A play by Goethe."),)), or Found(error="no answer within 10 s")
    """

    documents: tuple[Document, ...] = ()
    """Best first; none where nothing fits."""
    error: str | None = None
    """Why this query has no answer, such as one that came too late or could not be read. The episode goes on."""


@runtime_checkable
class Retriever(Protocol):
    """Finds documents. Safe to call from many episodes at once.

    Example: [found] = await retriever.search(["Who wrote Faust?"], topk=2)
    """

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        """The best documents of each query, at most `topk`. Never blocks the event loop. Raises RetrievalError where
        the episode had better fail than go on."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...
