"""BM25 over a corpus on disk: the index is made once, used again, and made anew when the corpus has changed."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from rollout.search.bm25s import MADE_OF, Bm25sRetriever
from rollout.search.corpus import CorpusError
from rollout.search.documents import RetrievalError

TOWNS = {
    "Marjol": "Marjol is a city on the river Tord.",
    "Kerdos": "Kerdos is a city. Its twin is Marjol.",
    "Café Zoë": "A house in Kerdos, painted blue.",
    "!": "?!",
    **{f"Village {number}": "A village on a hill." for number in range(40)},
}


def write_corpus(path: Path, towns: dict[str, str]) -> Path:
    path.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in towns.items()))
    return path


def search(retriever: Bm25sRetriever, *queries: str, topk: int = 3) -> list[list[str]]:
    found = asyncio.run(retriever.search(queries, topk))
    return [[document.title for document in one.documents] for one in found]


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(RetrievalError, match=r"needs the package bm25s: pip install bm25s"):
        Bm25sRetriever(str(write_corpus(tmp_path / "towns.jsonl", TOWNS)))
    assert [path.name for path in tmp_path.iterdir()] == ["towns.jsonl"]


def test_the_best_come_first_and_equally_good_ones_in_their_order(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    retriever = Bm25sRetriever(str(write_corpus(tmp_path / "towns.jsonl", TOWNS)))
    assert search(retriever, "Marjol twin", "cafe", "", "unknown words", "hill?") == [
        *(["Kerdos", "Marjol"], ["Café Zoë"], [], []),
        ["Village 0", "Village 1", "Village 2"],
    ]
    assert len(search(retriever, "village", topk=99)[0]) == 40
    assert search(retriever, '" OR (', "\0", "\udc80 Marjol", topk=1) == [[], [], ["Marjol"]]


def test_the_index_is_used_again_until_the_corpus_changes(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    corpus = write_corpus(tmp_path / "towns.jsonl", TOWNS)
    search(Bm25sRetriever(str(corpus)), "Marjol")
    made = (tmp_path / "towns.jsonl.bm25s" / MADE_OF).stat()
    assert search(Bm25sRetriever(str(corpus)), "blue") == [["Café Zoë"]]
    assert (tmp_path / "towns.jsonl.bm25s" / MADE_OF).stat().st_ino == made.st_ino
    write_corpus(corpus, {"Marjol": "Painted blue."})
    os.utime(corpus, ns=(0, 0))
    assert search(Bm25sRetriever(str(corpus)), "blue") == [["Marjol"]]


def test_a_bad_corpus_leaves_no_index_and_a_folder_that_cannot_be_written_names_the_key(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "bad.jsonl").write_text("[]\n")
    with pytest.raises(CorpusError, match=r"bad\.jsonl:1"):
        Bm25sRetriever(str(tmp_path / "bad.jsonl"))
    assert not (tmp_path / "bad.jsonl.bm25s").exists()
    corpus = write_corpus(tmp_path / "towns.jsonl", TOWNS)
    with pytest.raises(CorpusError, match=r"cannot be written; retriever\.index names another folder"):
        Bm25sRetriever(str(corpus), index=str(corpus / "index"))
    assert search(Bm25sRetriever(str(corpus), index=str(tmp_path / "elsewhere")), "blue") == [["Café Zoë"]]
