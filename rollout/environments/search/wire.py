"""The requests and answers of Search-R1's retrieval server, and of those after it."""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from rollout.environments.search.documents import MAX_CHARS, MAX_TITLE_CHARS, Document, Found

MAX_QUERIES = 1024
"""The most queries in one request."""
MAX_TOPK = 100


class Form(StrEnum):
    queries = "queries"
    """The form of Search-R1, verl, slime and SkyRL's environment: {"queries": [...], "topk", "return_scores"}"""
    query = "query"
    """The form of SkyRL's retrieval server: {"query": "...", "topk", "return_scores"}, one at a time."""


class Request(msgspec.Struct):
    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = None
    return_scores: bool = False


class Record(msgspec.Struct):
    """A document as servers and corpora have it: title and text or, as in Search-R1, both as contents.

    Example: Record(contents='"Paris"\\nParis is the capital.') is Record(title="Paris", text="Paris is the capital.")
    """

    contents: str | None = None
    title: str | None = None
    text: str | None = None

    def title_and_text(self) -> tuple[str, str] | None:
        """Return title and text. None: it has neither `text` nor `contents`."""
        if self.text is not None:
            return self.title or "", self.text
        if self.contents is None:
            return None
        title, newline, text = self.contents.strip().partition("\n")
        if not newline:
            return self.title or "", title
        return self.title or title.strip().strip('"'), text.strip()


class _Hit(msgspec.Struct):
    document: Record
    score: float


class _Answer(msgspec.Struct):
    result: list[msgspec.Raw]


# -- the client's side -------------------------------------------------------------------------------------------------


def request_body(form: Form, queries: Sequence[str], topk: int) -> bytes:
    question = {"query": queries[0]} if form is Form.query else {"queries": [*queries]}
    return msgspec.json.encode(question | {"topk": topk, "return_scores": True})


def read_answer(body: bytes, num_queries: int, topk: int) -> list[Found]:
    """Return what each query found. A part that cannot be read is the error of its query. Raises ValueError for an
    answer that is none."""
    try:
        results = msgspec.json.decode(body, type=_Answer).result
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if len(results) != num_queries:
        raise ValueError(f"{len(results)} results for {num_queries} queries")
    return [_parse_result(result, topk) for result in results]


def _parse_result(result: msgspec.Raw, topk: int) -> Found:
    try:
        hits = msgspec.json.decode(result, type=list[_Hit])
        return Found(tuple(map(_document, hits[:topk])))
    except (ValueError, RecursionError) as error:
        return Found(error=f"malformed: {error}")


def _document(hit: _Hit) -> Document:
    parts = hit.document.title_and_text()
    if parts is None:
        raise ValueError("a document has neither `contents` nor `text`")
    return Document(title=parts[0][:MAX_TITLE_CHARS], text=parts[1][:MAX_CHARS], score=hit.score)


# -- the server's side -------------------------------------------------------------------------------------------------


def read_request(body: bytes, default_topk: int) -> tuple[list[str], int, bool]:
    """Return queries, topk, and whether scores are wanted. Raises ValueError, which names the field and what is
    allowed."""
    try:
        request = msgspec.json.decode(body, type=Request)
    except (ValueError, RecursionError) as error:
        example = request_body(Form.queries, ["..."], 3).decode()
        raise ValueError(f"the body must be JSON such as {example}: {error}") from None
    if (request.queries is None) == (request.query is None):
        raise ValueError("either `queries`, a list of texts, or `query`, a text, must be given")
    queries = [request.query] if request.query is not None else request.queries or []
    if len(queries) > MAX_QUERIES:
        raise ValueError(f"queries: has {len(queries)}, at most {MAX_QUERIES} are allowed")
    topk = default_topk if request.topk is None else request.topk
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk={topk}: must be from 1 to {MAX_TOPK}")
    return queries, topk, request.return_scores


def answer_body(results: Sequence[Found], return_scores: bool) -> bytes:
    result = [[_hit(document, return_scores) for document in answer.documents] for answer in results]
    return msgspec.json.encode({"result": result})


def _hit(document: Document, return_scores: bool) -> dict[str, Any]:
    shown = {
        "title": document.title,
        "text": document.text,
        "contents": f'"{document.title}"\n{document.text}' if document.title else document.text,
    }
    score = document.score if math.isfinite(document.score) else 0.0
    return {"document": shown, "score": score} if return_scores else shown
