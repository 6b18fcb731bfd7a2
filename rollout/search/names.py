"""Made-up names: a capital syllable, and a small one or more. How a name sounds tells its kind.

A byte-level BPE of a corpus of them learns exactly these syllables, because each consists of a consonant and one of few
endings, and what stands on the border of two is rarer. So a name is as many tokens as it has syllables, and each token
tells the kind as well.
"""

import random
from itertools import product

NUM_KINDS = 4
_CODAS = "lsnrmdkt"
FIRST = tuple(tuple(map("".join, product(onsets, "aeiou", _CODAS))) for onsets in ("BM", "DR", "GL", "KT"))
"""By kind 80 syllables that begin a name."""
OTHER = tuple(tuple(map("".join, product("bdfghpvz", "aeiou", codas))) for codas in ("ls", "nr", "md", "kt"))
"""By kind 80 syllables that follow."""
ROOM = 1.25
"""There are at least so many times as many names as are drawn."""


def names(kind: int, count: int, rng: random.Random) -> list[str]:
    """Distinct names of one of NUM_KINDS kinds, of two syllables up to some 5,000 of them. Kinds have none in common.

    Example: names(0, 2, random.Random(0)) == ["Butgis", "Mudhus"]
    """
    syllables = 2
    while _num_names(kind, syllables) < ROOM * count:
        syllables += 1
    return [_name(kind, index, syllables) for index in rng.sample(range(_num_names(kind, syllables)), count)]


def _num_names(kind: int, syllables: int) -> int:
    return len(FIRST[kind]) * len(OTHER[kind]) ** (syllables - 1)


def _name(kind: int, index: int, syllables: int) -> str:
    rest: list[str] = []
    for _ in range(syllables - 1):
        index, digit = divmod(index, len(OTHER[kind]))
        rest.append(OTHER[kind][digit])
    return FIRST[kind][index] + "".join(rest)
