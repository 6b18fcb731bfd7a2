"""What rollout.agent_args.retriever may say."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout.search.http import HttpRetriever
from rollout.search.retrievers import make_retriever

URL = "http://localhost:8000/retrieve"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"retriever\.kind=None: must be one of http, fts5, bm25s, world"),
        ({"kind": "faiss"}, r"retriever\.kind=faiss: must be one of"),
        ({"kind": "http"}, r"retriever\.url: must be set with kind=http"),
        ({"kind": "http", "url": "localhost:8000"}, r"retriever\.url=localhost:8000: must be such as http://"),
        ({"kind": "http", "url": URL, "form": "both"}, r"retriever\.form=both: must be one of queries, query"),
        ({"kind": "http", "url": URL, "timeout_s": "5"}, r"retriever\.timeout_s=5: must be a number above 0"),
        ({"kind": "http", "url": URL, "max_batch": 0.5}, r"retriever\.max_batch=0.5: must be a whole number above 0"),
        (
            {"kind": "http", "url": URL, "cache_size": -1},
            r"retriever\.cache_size=-1: must be a whole number of at least 0",
        ),
        ({"kind": "http", "url": URL, "top_k": 3}, r"retriever\.top_k: is no key; kind=http has url, form, "),
        ({"kind": "http", "url": URL, "transport": 3}, r"retriever\.transport: is no key"),
        ({"kind": "fts5"}, r"retriever\.corpus: must be set with kind=fts5"),
        ({"kind": "fts5", "corpus": "nowhere"}, "corpus=nowhere: no such file or folder"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_retriever(spec)


def test_a_config_names_a_corpus_or_a_server(tmp_path: Path) -> None:
    (tmp_path / "towns.md").write_text("Marjol is a city.\n")

    async def main() -> None:
        local = make_retriever({"kind": "fts5", "corpus": str(tmp_path)})
        [found] = await local.search(["Marjol"], 3)
        assert [document.title for document in found.documents] == ["towns"]
        assert make_retriever(local) is local

    asyncio.run(main())
    remote = make_retriever({"kind": "http", "url": URL, "batch_s": 0, "cache_size": 0})
    assert isinstance(remote, HttpRetriever) and remote.url == URL
