"""BM25 over large corpora by the package bm25s: an index on disk, which all processes of a machine share."""

import asyncio
import fcntl
import json
import logging
import mmap
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollout.search.batches import Batches
from rollout.search.corpus import Corpus, CorpusError
from rollout.search.documents import Document, Found, RetrievalError
from rollout.search.words import rarest, words

logger = logging.getLogger(__name__)
THREADS = 2
BATCH = 32
MAX_MATCHES = 2_000_000
"""Entries of the index that are read for a query, which takes some 10 ns each."""
MADE_OF, TEXTS, OFFSETS = "made_of.json", "documents.jsonl", "documents.offsets.npy"
VERSION = 2


class Bm25sRetriever:
    """A `Retriever` over a corpus on disk.

    The index is made once and lies beside the corpus, at `CORPUS.bm25s`. It is made anew when the files of the corpus
    have changed. Index and texts are memory-mapped: a process needs memory for the vocabulary only.

    Example:
        retriever = Bm25sRetriever("wiki.jsonl")
        [found] = await retriever.search(["capital of France"], topk=3)
    """

    def __init__(self, corpus: str, index: str | None = None):
        """`corpus`: as `Corpus` reads it. `index`: another folder for the index. Raises CorpusError, and
        RetrievalError without the package."""
        package, path = _package(), Path(corpus).expanduser().absolute()
        folder = path.with_name(f"{path.name}.bm25s") if index is None else Path(index).expanduser().absolute()
        _ = Corpus(path).files()
        try:
            with _locked(folder):
                if not _is_fresh(folder, path):
                    _build(folder, path)
        except OSError as error:
            why = "cannot be written; retriever.index names another folder for it"
            raise CorpusError(f"the index {folder} {why}: {error}") from error
        self._index = package.BM25.load(str(folder), mmap=True)
        self._indptr = np.load(folder / "indptr.csc.index.npy", mmap_mode="r")
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        with (folder / TEXTS).open("rb") as file:
            self._texts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._threads = ThreadPoolExecutor(THREADS, "bm25s")
        self._batches = Batches(self._search, max_size=BATCH, max_running=THREADS)

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return list(await asyncio.gather(*(self._batches.answer((query, topk)) for query in queries)))

    async def close(self) -> None:
        await self._batches.close()
        self._threads.shutdown(wait=False)

    async def _search(self, asked: Sequence[tuple[str, int]]) -> list[Found]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._found, asked)

    def _found(self, asked: Sequence[tuple[str, int]]) -> list[Found]:
        return [Found(tuple(self._best(query, topk))) for query, topk in asked]

    def _best(self, query: str, topk: int) -> Iterator[Document]:
        terms = rarest(query, self._frequency, len(self._offsets) - 1, MAX_MATCHES)
        if not terms:
            return
        scores = self._index.get_scores(terms)  # [documents]
        least = np.partition(scores, -topk)[-topk] if topk < len(scores) else 0.0
        rows = np.flatnonzero((scores >= least) & (scores > 0))
        for row in rows[np.lexsort((rows, -scores[rows]))][:topk]:
            begin, end = self._offsets[row : row + 2].tolist()
            title, text = json.loads(self._texts[begin:end])
            yield Document(title=title, text=text, score=float(scores[row]))

    def _frequency(self, word: str) -> int:
        number = self._index.vocab_dict.get(word)
        return 0 if number is None else int(self._indptr[number + 1] - self._indptr[number])


def _package() -> Any:
    try:
        import bm25s
    except ImportError:
        raise RetrievalError("retriever.kind=bm25s needs the package bm25s: pip install bm25s") from None
    return bm25s


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process makes the index, the others wait for it. The lock of one that dies is free."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that makes the index %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _made_of(corpus: Path) -> dict[str, Any]:
    """What an index depends on: files with size and time."""
    stats = {str(path): path.stat() for path in Corpus(corpus).files()}
    files = {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}
    return {"version": VERSION, "bm25s": _package().__version__, "files": files}


def _is_fresh(folder: Path, corpus: Path) -> bool:
    made_of = folder / MADE_OF
    return made_of.is_file() and json.loads(made_of.read_text()) == _made_of(corpus)


def _build(folder: Path, corpus: Path) -> None:
    """Makes the index in another folder, and moves it when it is whole."""
    package, made_of = _package(), _made_of(corpus)
    logger.warning("making the index %s, which may take minutes", folder)
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    vocabulary: dict[str, int] = {"": 0}
    ids, offsets = list[list[int]](), [0]
    with (new / TEXTS).open("wb") as texts:
        for document in Corpus(corpus):
            found = words(f"{document.title} {document.text}") or [""]
            ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in found])
            texts.write(json.dumps([document.title, document.text]).encode() + b"\n")
            offsets.append(texts.tell())
    np.save(new / OFFSETS, np.array(offsets, np.int64))
    index = package.BM25()
    index.index((ids, vocabulary), show_progress=False)
    index.save(str(new))
    (new / MADE_OF).write_text(json.dumps(made_of))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
