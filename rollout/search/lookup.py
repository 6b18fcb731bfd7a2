"""The searches of one episode: what the policy reads of what was found, and what is counted. Both forms of the search
environment are made of it."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rollout.agents.threads import OneThread
from rollout.search.documents import Document, Retriever
from rollout.text_encoder import LONG_TEXT

NOTHING = "Nothing was found."
FAILED = "The search failed."
STEP_TIMEOUT_S = 660.0
"""Deadline of a step of a search environment: longer than an `HttpRetriever` waits for a server that is down."""
Shorten = Callable[[str], str]
"""Cuts a document to its share of an observation."""
_tokenizer_thread = OneThread("documents")
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
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Over the episode: searches, repeated_queries, empty_results, failed_searches, cut_documents, retrieval_ms."""
    _queries: set[str] = field(default_factory=set)

    async def find(self, query: str) -> str:
        """The documents, as the policy reads them. Raises RetrievalError."""
        began = time.monotonic()
        [found] = await self.retriever.search([query], self.topk)
        has_failed, ms = found.error is not None, 1000 * (time.monotonic() - began)
        self._count(query, is_empty=not has_failed and not found.documents, has_failed=has_failed, ms=ms)
        if has_failed:
            return FAILED
        is_long = sum(len(document.text) for document in found.documents) > LONG_TEXT
        return await _tokenizer_thread(self.shown, found.documents) if is_long else self.shown(found.documents)

    def recall(self, query: str, found: str) -> None:
        """Count a search of an episode that runs again, which hears what it `found` before. Nothing is looked up."""
        self._count(query, is_empty=NOTHING in found, has_failed=FAILED in found, ms=0.0)

    def _count(self, query: str, *, is_empty: bool, has_failed: bool, ms: float) -> None:
        known = " ".join(query.lower().split())
        flags = {"repeated_queries": known in self._queries, "empty_results": is_empty, "failed_searches": has_failed}
        for name, value in {"searches": 1, "retrieval_ms": ms, **flags}.items():
            self.counts[name] += value
        self._queries.add(known)

    def metrics(self) -> dict[str, float]:
        """Every count, 0 where there was nothing to count."""
        return {name: float(self.counts[name]) for name in COUNTS}

    def shown(self, documents: Sequence[Document]) -> str:
        """`listed`, each document shortened."""
        short = [replace(one, title=self.shorten(one.title), text=self.shorten(one.text)) for one in documents]
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
