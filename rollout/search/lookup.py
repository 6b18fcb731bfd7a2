"""The searches of one episode: what the policy reads of what was found, and what is counted. Both forms of the search
environment are made of it."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollout.search.documents import Document, Retriever

NOTHING = "Nothing was found."
Shorten = Callable[[str], str]
"""Cuts a document to its share of an observation."""


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

    def shown(self, documents: Sequence[Document]) -> str:
        """`listed`, each document shortened."""
        short = [replace(document, text=self.shorten(document.text)) for document in documents]
        pairs = zip(short, documents, strict=True)
        self.counts["cut_documents"] += sum(len(cut.text) < len(whole.text) for cut, whole in pairs)
        return listed(short)


def listed(documents: Sequence[Document]) -> str:
    """As Search-R1 shows them.

    Example: "Doc 1(Title: Paris) Paris is the capital of France.\\nDoc 2(Title: Lyon) ..."
    """
    titles = (f"(Title: {document.title})" if document.title else ":" for document in documents)
    pairs = zip(titles, documents, strict=True)
    return "\n".join(f"Doc {number}{title} {one.text}" for number, (title, one) in enumerate(pairs, 1)) or NOTHING
