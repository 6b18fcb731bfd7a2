"""Full-text search: what is found, in which order, and that no query is an error."""

import asyncio
import sqlite3
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.environments.search.documents import Document, Found, RetrievalError
from rollout.environments.search.fts5 import MAX_MATCHES, QUICK_MATCHES, Fts5Retriever
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock

TOWNS = [
    Document(title="Marjol", text="Marjol is a city on the river Tord."),
    Document(title="Kerdos", text="Kerdos is a city. Its twin is Marjol."),
    Document(title="Café Zoë", text="A house in Kerdos, painted blue."),
    Document(title="東京", text="東京は日本の首都"),
    *(Document(title=f"Village {number}", text="A village on a hill.") for number in range(40)),
]


def search(retriever: Fts5Retriever, *queries: str, topk: int = 3) -> list[list[str]]:
    async def main() -> list[Found]:
        return await retriever.search(queries, topk)

    return [[document.title for document in result.documents] for result in asyncio.run(main())]


@pytest.fixture(scope="module")
def towns() -> Fts5Retriever:
    return Fts5Retriever(TOWNS)


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("Where is Marjol?", ["Marjol", "Kerdos"]),
        ("MARJOL twin", ["Kerdos", "Marjol"]),
        ("cafe zoe", ["Café Zoë"]),
        ("CAFÉ", ["Café Zoë"]),
        ("首都", ["東京"]),
        ("blue_house", ["Café Zoë"]),
        ("nothing whatsoever fits this query", []),
        ("", []),
        (" \n", []),
    ],
)
def test_the_best_come_first(towns: Fts5Retriever, query: str, titles: list[str]) -> None:
    assert search(towns, query) == [titles]


@pytest.mark.parametrize(
    "query",
    [
        '"Marjol',
        '""Marjol"',
        "Marjol AND (",
        "NOT Marjol",
        "NEAR(Marjol",
        "title:Marjol",
        "Marj* ^Marjol +-",
        "Marjol\0",
    ]
    + ["\udc80 Marjol", "x" * 100_000 + " Marjol", "Marjol ' OR 1=1; drop table documents; --"],
)
def test_a_query_is_words_and_no_language(towns: Fts5Retriever, query: str) -> None:
    ((first, *_),) = search(towns, query)
    assert first == "Marjol"


@settings(max_examples=60, deadline=None)
@given(queries=st.lists(st.text(), min_size=1, max_size=5), topk=st.integers(1, 9))
def test_no_query_is_an_error(queries: list[str], topk: int) -> None:
    retriever = Fts5Retriever(TOWNS)
    assert len(search(retriever, *queries, topk=topk)) == len(queries)


@on_real_clock
async def test_equally_good_documents_come_in_their_order_however_often_one_asks(towns: Fts5Retriever) -> None:
    async def one(topk: int) -> list[str]:
        [result] = await towns.search(["a hill"], topk)
        return [document.title for document in result.documents]

    answers = await asyncio.gather(*(one(1 + number % 5) for number in range(200)))
    assert all(titles == [f"Village {k}" for k in range(1 + n % 5)] for n, titles in enumerate(answers))


def test_common_words_neither_cost_time_nor_hide_the_rare_one() -> None:
    """A word that is everywhere is not looked up beside a rarer one; alone it finds the first documents."""
    size = 2 * MAX_MATCHES
    texts = (f"the the the thing {number}" if number != 5 else "number 5 is not like that" for number in range(size))
    retriever = Fts5Retriever(Document(text=text) for text in texts)

    async def main() -> list[str]:
        return [each.documents[0].text for each in await retriever.search([f"the thing {size - 9}", "the thing"], 1)]

    assert asyncio.run(main()) == [f"the the the thing {size - 9}", "the the the thing 0"]


def test_only_a_quick_search_is_done_on_the_event_loop() -> None:
    """One that ranks hundreds of documents takes milliseconds, in which no other episode could go on."""
    ran: list[str] = []

    class Watched(Fts5Retriever):
        def _look_up(self, looks: Any) -> list[Found]:
            ran.append(threading.current_thread().name)
            return super()._look_up(looks)

    texts = [f"a {'red' if number < QUICK_MATCHES else 'blue'} house" for number in range(3 * QUICK_MATCHES)]
    retriever = Watched(Document(text=text) for text in texts)
    assert search(retriever, "red") and search(retriever, "blue")
    assert len(ran) == 2 and ran[0] == threading.main_thread().name and ran[1].startswith("fts5")


def test_of_common_words_only_a_document_with_all_of_them_comes_first_wherever_it_is() -> None:
    size = 6 * MAX_MATCHES
    texts = [f"a {('red', 'wide', 'odd')[number % 3]} thing" for number in range(size)]
    texts[-1] = "a red and wide thing"
    retriever = Fts5Retriever(Document(title=f"{number}", text=text) for number, text in enumerate(texts))
    assert search(retriever, "wide, red", topk=3) == [[str(size - 1), "1", "4"]], "then those with the rarer word"


def test_threads_that_search_come_after_the_event_loop_whatever_the_priority_of_the_process() -> None:
    """A priority may not be raised: with a fixed one, no search would run in a process that has less."""
    script = """
import asyncio, os, threading
from rollout.environments.search.documents import Document
from rollout.environments.search.fts5 import Fts5Retriever

os.setpriority(os.PRIO_PROCESS, 0, max(15, os.getpriority(os.PRIO_PROCESS, 0)))
os.setresuid(65534, 65534, 65534) if os.getuid() == 0 else None
retriever = Fts5Retriever(Document(text=f"a village, number {number}") for number in range(400))
[found] = asyncio.run(retriever.search(["village"], 3))
threads = [one for one in threading.enumerate() if one.name.startswith("fts5")]
print(len(found.documents), {os.getpriority(os.PRIO_PROCESS, one.native_id) for one in threads})
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "3 {19}\n", done.stderr


def test_without_fts5_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            if "fts5" in sql:
                raise sqlite3.OperationalError("no such module: fts5")
            return super().execute(sql, *rest)  # pyright: ignore[reportArgumentType]

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path: connect(path, factory=Without))
    with pytest.raises(RetrievalError, match=r"SQLite 3\..* cannot index the documents: no such module: fts5"):
        Fts5Retriever(TOWNS)
