"""Full-text search in memory, by SQLite's FTS5 and its bm25(): some hundred thousand documents, and no server."""

import asyncio
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rollout.search.documents import Document, Found, RetrievalError

MAX_TERMS = 16
"""Of a query: the rarest words."""
COMMON_SHARE = 0.1
"""A word in more documents than this tells nothing, and takes as long to look up as there are documents."""
_WORD = re.compile(r"\w+")


class Fts5Retriever:
    """A `Retriever` over documents in the memory of this process, or in a file.

    Example:
        retriever = Fts5Retriever([Document(title="Paris", text="Paris is the capital of France.")])
        [found] = await retriever.search(["capital of France"], topk=1)
    """

    def __init__(self, documents: Iterable[Document]):
        """Indexes the documents, 50,000 in a second. Raises RetrievalError where SQLite has no FTS5."""
        self._thread = ThreadPoolExecutor(1, "fts5")
        self._thread.submit(self._build, documents).result()

    def _build(self, documents: Iterable[Document]) -> None:
        self._index = sqlite3.connect(":memory:")
        try:
            self._index.execute("create virtual table documents using fts5(title, text)")
        except sqlite3.OperationalError as error:
            raise RetrievalError(f"this Python's SQLite has no FTS5: {error}") from error
        rows = ((document.title, document.text) for document in documents)
        self._index.executemany("insert into documents values (?, ?)", rows)
        (self._size,) = self._index.execute("select count(*) from documents").fetchone()
        self._index.execute("create virtual table words using fts5vocab(documents, row)")
        self._frequency = Counter(dict(self._index.execute("select term, doc from words")))

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._search, queries, topk)

    async def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return [Found(tuple(self._found(query, topk))) for query in queries]

    def _found(self, query: str, topk: int) -> list[Document]:
        terms = self._terms(query)
        if not terms:
            return []
        rows = self._index.execute(
            "select title, text, -bm25(documents) from documents where documents match ? order by bm25(documents) "
            "limit ?",
            (" OR ".join(f'"{term}"' for term in terms), topk),
        )
        return [Document(title=title, text=text, score=score) for title, text, score in rows]

    def _terms(self, query: str) -> list[str]:
        """Those words of the query that some documents have, but not most; where there are only common ones, these."""
        words = dict.fromkeys(word.lower() for word in _WORD.findall(query))
        known = sorted((word for word in words if self._frequency[word]), key=self._frequency.__getitem__)
        rare = [word for word in known if self._frequency[word] <= max(1, COMMON_SHARE * self._size)]
        return (rare or known[:1])[:MAX_TERMS]
