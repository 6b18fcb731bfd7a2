"""The searches of one episode: what the policy reads of what was found, and what is counted. Both forms of the search
environment are made of it."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.search.documents import Document, Retriever

NOTHING = "Nothing was found."
Shorten = Callable[[str], str]
"""Cuts a document to its share of an observation."""
COUNTS = ("searches", "repeated_queries", "empty_results", "failed_searches", "cut_documents", "retrieval_ms")
"""Of an episode. Milliseconds are summed, too: over those of its searches they give the mean of all searches."""


@dataclass(slots=True)
class Lookup:
    """Example:
    lookup = Lookup(retriever, topk=3, shorten=lambda text: text[:500])
    text = await lookup.find("capital of France")
    lookup.counts["searches"]  # 1.0
    """

    retriever: Retriever
    topk: int
    shorten: Shorten
    counts: Counter[str] = field(default_factory=Counter)
    """Over the episode: searches, repeated_queries, empty_results, cut_documents, retrieval_ms."""
    _queries: set[str] = field(default_factory=set)

    async def find(self, query: str) -> str:
        """The documents, as the policy reads them. Raises RetrievalError."""
        began = time.monotonic()
        [documents] = await self.retriever.search([query], self.topk)
        known = " ".join(query.lower().split())
        self.counts.update(
            searches=1,
            repeated_queries=known in self._queries,
            empty_results=not documents,
            retrieval_ms=1000 * (time.monotonic() - began),
        )
        self._queries.add(known)
        return self.shown(documents)

    def metrics(self) -> dict[str, float]:
        """Every count, 0 where there was nothing to count."""
        return {name: float(self.counts[name]) for name in COUNTS}

    def shown(self, documents: Sequence[Document]) -> str:
        """As Search-R1 shows them.

        Example: "Doc 1(Title: Paris) Paris is the capital of France.\\nDoc 2(Title: Lyon) ..."
        """
        lines: list[str] = []
        for number, document in enumerate(documents, 1):
            text = self.shorten(document.text)
            self.counts["cut_documents"] += len(text) < len(document.text)
            title = f"(Title: {self.shorten(document.title)})" if document.title else ":"
            lines.append(f"Doc {number}{title} {text}")
        return "\n".join(lines) or NOTHING
