"""The words of documents and queries, as indexes know them."""

import re
import unicodedata

_IDEOGRAPH = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPH}]|[^\W_{_IDEOGRAPH}]+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
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
