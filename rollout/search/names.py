"""Made-up names: a capital syllable, and a small one or more.

A byte-level BPE of a corpus of them learns exactly these syllables, because each consists of a consonant and one of few
endings, and what stands on the border of two is rarer. So a name is as many tokens as it has syllables.
"""

import random
from itertools import product

FIRST = tuple(map("".join, product("BDGKLMRT", "aeiou", "nrmd")))
"""160 syllables that begin a name."""
OTHER = tuple(map("".join, product("bdfghjklmnprstvz", "aeiou", "ls")))
"""160 syllables that follow."""
ROOM = 1.25
"""There are at least so many times as many names as are drawn."""


def names(count: int, rng: random.Random) -> list[str]:
    """Distinct names, of two syllables up to some 20,000 of them.

    Example: names(2, random.Random(0)) == ["Kumves", "Todgol"]
    """
    syllables = 2
    while len(FIRST) * len(OTHER) ** (syllables - 1) < ROOM * count:
        syllables += 1
    return [_name(index, syllables) for index in rng.sample(range(len(FIRST) * len(OTHER) ** (syllables - 1)), count)]


def _name(index: int, syllables: int) -> str:
    rest: list[str] = []
    for _ in range(syllables - 1):
        index, digit = divmod(index, len(OTHER))
        rest.append(OTHER[digit])
    return FIRST[index] + "".join(rest)
