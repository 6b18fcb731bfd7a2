"""The words of documents and queries, as indexes know them."""

import re
import unicodedata
from collections.abc import Callable

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W_{_IDEOGRAPH}]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
MAX_TERMS = 16
"""Of a query."""
COMMON_SHARE = 0.1
FEW = 100
"""A word in more documents than these, and than this share of all, tells nothing beside rarer ones."""
MAX_WORD = 64
"""Characters of a word that count: what is longer is no word, and an index of such texts would be as large as they."""


def words(text: str) -> list[str]:
    """In lower case and without accents. Chinese and Japanese, which have no spaces, are taken by character.

    Example: words("L'Été: 1999_b") == ["l", "ete", "1999", "b"]
    """
    if text.isascii():
        text = text.lower()
    else:
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold())).casefold()
    return [word[:MAX_WORD] for word in _WORD.findall(text)]


def known_words(query: str, frequency: Callable[[str], int]) -> list[str]:
    """The words of a query that any document has, each once, the rarest first."""
    return sorted((word for word in dict.fromkeys(words(query)) if frequency(word)), key=frequency)


def rarest(query: str, frequency: Callable[[str], int], num_documents: int, max_matches: int) -> list[str]:
    """The words of a query that are worth looking up, the rarest first: at most MAX_TERMS, in at most `max_matches`
    documents together, and none that is common (FEW, COMMON_SHARE). A query of common words only has its rarest
    one; one whose words no document has, none."""
    known = known_words(query, frequency)
    terms, left = known[:1], max_matches - (frequency(known[0]) if known else 0)
    for word in known[1:MAX_TERMS]:
        left -= frequency(word)
        if left < 0 or frequency(word) > max(FEW, COMMON_SHARE * num_documents):
            break
        terms.append(word)
    return terms
