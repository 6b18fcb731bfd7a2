"""Arguments of a search and its retriever in rollout.agent_args."""

from pathlib import Path
from typing import Any

import pytest

from rollout.agents.loop import load_agent_loop
from rollout.environments.search.documents import Document
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.http import HttpRetriever
from rollout.environments.search.retrievers import make_retriever
from tests.support.chat_models import chat_tokenizer
from tests.support.real_clock import on_real_clock

URL = "http://localhost:8000/retrieve"
TOKENIZER = chat_tokenizer("qwen2.5")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, r"retriever\.kind=None: must be one of http, fts5, world"),
        ({"kind": "faiss"}, r"retriever\.kind=faiss: must be one of"),
        ({"kind": "http"}, r"retriever\.url: must be set with kind=http"),
        ({"kind": "http", "url": "localhost:8000"}, r"retriever\.url=localhost:8000: must be such as http://"),
        ({"kind": "http", "url": URL, "form": "both"}, r"retriever\.form=both: must be one of queries, query"),
        ({"kind": "http", "url": URL, "timeout_s": "5"}, r"retriever\.timeout_s=5: must be a number above 0"),
        ({"kind": "http", "url": URL, "max_batch": 0.5}, r"\.max_batch=0.5: must be a whole number of at least 1"),
        (
            {"kind": "http", "url": URL, "cache_size": -1},
            r"retriever\.cache_size=-1: must be a whole number of at least 0",
        ),
        ({"kind": "http", "url": URL, "top_k": 3}, r"retriever\.top_k: is no key; kind=http has url, form, "),
        ({"kind": "http", "url": URL, "transport": 3}, r"retriever\.transport: is no key"),
        ({"kind": "fts5"}, r"retriever\.corpus: must be set with kind=fts5"),
        ({"kind": "fts5", "corpus": "nowhere"}, "corpus=nowhere: no such file or folder"),
        ({"kind": ["world"]}, r"retriever\.kind=\['world'\]: must be one of"),
        ({"kind": "world", "documents": 3}, r"retriever\.documents=3: must be a whole number of at least 8"),
        ({"kind": "world", "seed": "x"}, r"retriever\.seed=x: must be a whole number of at least 0"),
        (None, r"retriever=None: must have a kind and its keys, such as \{kind: world\}"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_retriever(spec)


@pytest.mark.parametrize("form", ["tags", "chat"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": 0}, "topk=0: must be a whole number from 1 to 100"),
        ({"topk": "3"}, "topk=3: must be a whole number from 1 to 100"),
        ({"format_score": "half"}, "format_score=half: must be a number"),
        ({"max_document_tokens": 0}, "max_document_tokens=0: must be at least 1"),
        ({"max_turns": 0}, "max_turns=0: must be a whole number, at least 1"),
        ({"step_timeout_s": 0}, "step_timeout_s=0: must be a number above 0"),
        ({"retriever": {"kind": "http", "url": URL, "down_timeout_s": 660}}, "down_timeout_s=660: must be below"),
    ],
)
def test_a_wrong_argument_of_a_form_is_said_before_there_are_episodes(
    form: str, arguments: dict[str, Any], message: str
) -> None:
    agent_args = {"retriever": Fts5Retriever([Document(text="a")]), **arguments}
    with pytest.raises(ValueError, match=message):
        load_agent_loop(f"rollout.environments.search.{form}:agent_loop", TOKENIZER, agent_args)


def test_documents_are_text_or_messages() -> None:
    arguments = {"retriever": Fts5Retriever([Document(text="a")]), "documents_as": "tool"}
    with pytest.raises(ValueError, match="documents_as=tool: must be text or message"):
        load_agent_loop("rollout.environments.search.tags:agent_loop", TOKENIZER, arguments)


@on_real_clock
async def test_a_config_names_a_corpus_or_a_server(tmp_path: Path) -> None:
    (tmp_path / "towns.md").write_text("Marjol is a city.\n")
    local = make_retriever({"kind": "fts5", "corpus": str(tmp_path)})
    [result] = await local.search(["Marjol"], 3)
    assert [document.title for document in result.documents] == ["towns"]
    assert make_retriever(local) is local
    remote = make_retriever({"kind": "http", "url": URL, "batch_s": 0, "cache_size": 0})
    assert isinstance(remote, HttpRetriever) and remote.url == URL
