"""Full-text search by SQLite's FTS5 and its bm25(): some hundred thousand documents, and no server."""

import asyncio
import json
import math
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from rollout.environments.search.batches import Batches
from rollout.environments.search.documents import Document, Found, RetrievalError, known_words, rarest, words

MAX_MATCHES = 1000
"""The most documents that are ranked for a query, which takes 3 ms per thousand."""
TOGETHER = 3
"""The number of rarest words that the first documents have, where all words of a query are common."""
QUICK_MATCHES = 150
"""The most documents of a query that is answered at once: it takes less than half a millisecond, and is not worth a
thread, whose turn may come late."""
THREADS = 2
NICENESS = 10
"""The niceness of these threads, beside that of the process."""
BATCH = 4
_SEARCH = """
select json_group_array(json(found)) from (select (
    select json_group_array(json_array(id, score)) from (
        select rowid as id, -rank as score from documents
        where documents match json_extract(query.value, '$[0]') and rowid <= json_extract(query.value, '$[1]')
        order by score desc, id limit ?)
) as found from json_each(?) as query order by query.key)
"""
"""Answers all queries of a batch, each [terms, last row], in one step of SQLite, which needs no interpreter lock. A
thread that needed the lock row by row would wait for the event loop each time."""


class Fts5Retriever:
    """A `Retriever` over documents in the memory of this process. The same query always finds the same; documents that
    fit equally well come in their own order.

    Example:
        retriever = Fts5Retriever([Document(title="Paris", text="Paris is the capital of France.")])
        [found] = await retriever.search(["capital of France"], topk=1)
    """

    def __init__(self, documents: Iterable[Document]):
        """Index the documents, 25,000 in a second. Raises RetrievalError where SQLite has no FTS5."""
        self._documents = tuple(documents)
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        with TemporaryDirectory(prefix="fts5-") as folder:  # an open file stays, though nobody finds it any more
            path = Path(folder) / "index.db"
            self._frequency = _build(path, self._documents)
            for _ in range(THREADS + 1):  # one for the event loop itself
                self._idle.put(_opened(path))
        self._threads = ThreadPoolExecutor(THREADS, "fts5", initializer=_give_way)
        self._batches = Batches(self._search, max_size=BATCH, max_running=THREADS)

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return list(await asyncio.gather(*(self._answer(query, topk) for query in queries)))

    async def close(self) -> None:
        await self._batches.close()
        self._threads.shutdown(wait=False)

    async def _answer(self, query: str, topk: int) -> Found:
        size, frequency = len(self._documents), self._frequency.__getitem__
        terms = rarest(query, frequency, size, MAX_MATCHES)
        if not terms:
            return Found()
        look = _look("OR", terms, size, matches=sum(map(frequency, terms)), topk=topk)
        if look.last == size:
            is_quick = sum(map(frequency, terms)) <= QUICK_MATCHES
            return self._look_up([look])[0] if is_quick else await self._batches.answer(look)
        # All words are common: first what has several of them, and then the first documents that have one.
        common = known_words(query, frequency)[:TOGETHER]
        expected = size * math.prod(frequency(word) / size for word in common)
        result = await self._batches.answer(_look("AND", common, size, matches=expected, topk=topk))
        if len(result.documents) == topk:
            return result
        rest = await self._batches.answer(look)
        known = {(document.title, document.text) for document in result.documents}
        more = (document for document in rest.documents if (document.title, document.text) not in known)
        return Found((*result.documents, *more)[:topk])

    async def _search(self, looks: Sequence["_Look"]) -> list[Found]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._look_up, looks)

    def _look_up(self, looks: Sequence["_Look"]) -> list[Found]:
        connection = self._idle.get_nowait()
        try:
            limit = max(look.topk for look in looks)
            matches = json.dumps([(look.terms, look.last) for look in looks])
            (answer,) = connection.execute(_SEARCH, (limit, matches)).fetchone()
        finally:
            self._idle.put(connection)
        return [
            Found(tuple(replace(self._documents[row], score=score) for row, score in hits[: look.topk]))
            for hits, look in zip(json.loads(answer), looks, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A query as FTS5 takes it, the last row that it looks at, and how many documents are wanted."""

    terms: str
    last: int
    topk: int


def _look(operator: str, terms: Sequence[str], size: int, *, matches: float, topk: int) -> _Look:
    """Make the lookup of these words. `matches`: how many documents may have them; of too many only the first are
    looked at."""
    last = size if matches <= MAX_MATCHES else int(size * MAX_MATCHES / matches)
    return _Look(terms=f" {operator} ".join(f'"{term}"' for term in terms), last=last, topk=topk)


def _give_way() -> None:
    """Let the event loop have a core before this thread: all episodes wait for it."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.nice(NICENESS)


def _build(path: Path, documents: Sequence[Document]) -> Counter[str]:
    """Write the index, and return in how many documents each word is."""
    connection = sqlite3.connect(path)
    try:
        connection.execute("pragma journal_mode=off")
        connection.execute("pragma synchronous=off")
        # The words are those of `words`, and no character of them separates two for the ascii tokenizer.
        connection.execute("create virtual table documents using fts5(words, content='', tokenize='ascii')")
        texts = (f"{document.title} {document.text}" for document in documents)
        rows = ((row, " ".join(words(text))) for row, text in enumerate(texts))
        connection.executemany("insert into documents(rowid, words) values (?, ?)", rows)
        connection.execute("insert into documents(documents) values ('optimize')")
        connection.execute("create virtual table temp.frequencies using fts5vocab(main, documents, row)")
        frequency = Counter(dict(connection.execute("select term, doc from frequencies")))
        connection.commit()
        return frequency
    except sqlite3.OperationalError as error:
        raise RetrievalError(f"SQLite {sqlite3.sqlite_version} cannot index the documents: {error}") from error
    finally:
        connection.close()


def _opened(path: Path) -> sqlite3.Connection:
    """Open a connection that reads without locks, since the file never changes."""
    connection = sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True, check_same_thread=False)
    connection.execute(f"pragma mmap_size={path.stat().st_size}")
    connection.execute("select count(*) from documents where documents match 'a'").fetchone()  # opens the file
    return connection
