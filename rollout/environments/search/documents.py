"""Documents, the interface of a retriever, and the words by which local indices find documents."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W_{_IDEOGRAPH}]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
MAX_TERMS = 16
"""The most words of a query that are looked up."""
COMMON_SHARE = 0.1
FEW = 100
"""Limits of common words: one in more documents than these, and than this share of all, tells nothing beside rarer
ones."""
MAX_WORD = 64
"""The characters of a word that count: what is longer is no word, and an index of such texts would be as large as
they."""


def words(text: str) -> list[str]:
    """Split a text into words, in lower case and without accents. Chinese and Japanese, which have no spaces, are taken
    by character.

    Example: words("L'Été: 1999_b") == ["l", "ete", "1999", "b"]
    """
    if text.isascii():
        text = text.lower()
    else:
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold())).casefold()
    return [word[:MAX_WORD] for word in _WORD.findall(text)]


def known_words(query: str, frequency: Callable[[str], int]) -> list[str]:
    """Return the words of a query that any document has, each once, the rarest first."""
    return sorted((word for word in dict.fromkeys(words(query)) if frequency(word)), key=frequency)


def rarest(query: str, frequency: Callable[[str], int], num_documents: int, max_matches: int) -> list[str]:
    """Return the words of a query that are worth looking up, the rarest first: at most MAX_TERMS, in at most
    `max_matches` documents together, and none that is common (FEW, COMMON_SHARE). A query of common words only has its
    rarest one; one whose words no document has, none."""
    known = known_words(query, frequency)
    terms, left = known[:1], max_matches - (frequency(known[0]) if known else 0)
    for word in known[1:MAX_TERMS]:
        left -= frequency(word)
        if left < 0 or frequency(word) > max(FEW, COMMON_SHARE * num_documents):
            break
        terms.append(word)
    return terms


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ValueError for what is no whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value}: must be a whole number {allowed}")


def check_number(name: str, value: object, *, above: float | None = None, least: float = float("-inf")) -> None:
    """Raise ValueError for what is no number of at least `least`, or above `above`."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (value >= least if above is None else value > above)
    ):
        allowed = f" above {above}" if above is not None else f" of at least {least}" if least > float("-inf") else ""
        raise ValueError(f"{name}={value}: must be a number{allowed}")


MAX_CHARS, MAX_TITLE_CHARS = 100_000, 300
"""The most characters of a document, wherever it comes from; the rest is cut off. A policy reads some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    title: str = ""
    text: str
    score: float = 0.0
    """The score for the query that found it. Higher is better; scores are comparable within one answer only."""


class RetrievalError(RuntimeError):
    """A retriever cannot answer at all: it cannot be built, or is down for longer than anybody waits."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to one query.

    Example: Found((Document(title="Faust", text="A play by Goethe."),)), or Found(error="no answer within 10 s")
    """

    documents: tuple[Document, ...] = ()
    """Best first; none where nothing fits."""
    error: str | None = None
    """The reason why this query has no answer: it came too late, or could not be read. The episode goes on."""


@runtime_checkable
class Retriever(Protocol):
    """Finds documents. Safe to call from many episodes at once.

    Example: [found] = await retriever.search(["Who wrote Faust?"], topk=2)
    """

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        """Return the best documents of each query, at most `topk`, without blocking the event loop. Raises
        RetrievalError where the episode had better fail than go on."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...
