"""A generated world of made-up people, cities, companies and events: articles to search, and questions with one right
answer, which nobody knows without having read them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rollout.environments.search.documents import Document

_CODAS = "lsnrmdkt"
FIRST = tuple(tuple(map("".join, product(onsets, "aeiou", _CODAS))) for onsets in ("BM", "DR", "GL", "KT"))
"""Eighty syllables per kind that begin a name."""
OTHER = tuple(tuple(map("".join, product("bdfghpvz", "aeiou", codas))) for codas in ("ls", "nr", "md", "kt"))
"""Eighty syllables per kind that follow."""
ROOM = 1.25
"""The least ratio of possible names to drawn ones."""


def names(kind: int, count: int, rng: random.Random) -> list[str]:
    """Draw distinct names of one of four kinds, of two syllables up to some 5,000 of them. Kinds have none in common.

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


SEED = 0
NUM_DOCUMENTS = 20_000
RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"home": "city", "firm": "company", "hero": "person"},
    "city": {"mayor": "person", "fair": "event", "twin": "city"},
    "company": {"chief": "person", "seat": "city", "rival": "company"},
    "event": {"site": "city", "host": "company", "star": "person"},
}
"""The relations of each kind of thing: what an article may say about it, and of which kind that is. No relation belongs
to two kinds, and what an article says is of three kinds: how a name sounds tells which relation it answers."""
NUM_FACTS = (1, 2, 2, 3, 3)
"""The numbers of facts in an article, each as likely."""
MIN_DOCUMENTS = 2 * len(RELATIONS)
"""The smallest world in which everything can refer to another thing of its own kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """Example: Thing(name="Derbor", kind="city", facts={"mayor": "Medhus", "twin": "Dadgor"})"""

    name: str
    """The name, which nothing else has."""
    kind: str
    facts: Mapping[str, str]
    """The names of other things by relation, one to three."""

    @property
    def article(self) -> Document:
        """Example: Document(title="Derbor", text="Derbor is a city with mayor Medhus and twin Dadgor.")"""
        *first, last = (f"{relation} {name}" for relation, name in self.facts.items())
        listed = f"{', '.join(first)} and {last}" if first else last
        kind = f"an {self.kind}" if self.kind[0] in "aeiou" else f"a {self.kind}"
        return Document(title=self.name, text=f"{self.name} is {kind} with {listed}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Example: Question(relations=("mayor", "home"), path=("Derbor", "Medhus"), answer="Dadgor")"""

    relations: tuple[str, ...]
    """The relations to follow: from the thing that the question names, then from what was found."""
    path: tuple[str, ...]
    """The things whose articles are read, one per hop. The question names the first."""
    answer: str

    @property
    def hops(self) -> int:
        """The number of articles that must be read one after another."""
        return len(self.relations)

    @property
    def text(self) -> str:
        """Example: "Name Derbor's mayor's home." """
        return "Name " + "'s ".join((self.path[0], *self.relations)) + "."


class World:
    """Everything follows from seed and size.

    Example:
        world = World(seed=0, num_documents=20_000)
        retriever = Fts5Retriever(world.articles)
        question = next(world.questions(hops=2))
    """

    def __init__(self, seed: int = SEED, num_documents: int = NUM_DOCUMENTS):
        """Raises ValueError for too few documents."""
        if num_documents < MIN_DOCUMENTS:
            raise ValueError(f"num_documents={num_documents}: must be at least {MIN_DOCUMENTS}")
        rng = random.Random(seed)
        kinds = list(RELATIONS)
        counts = [len(range(number, num_documents, len(kinds))) for number in range(len(kinds))]
        drawn = [names(number, count, rng) for number, count in enumerate(counts)]
        self.by_kind = dict(zip(kinds, drawn, strict=True))
        """The names of all things of each kind."""
        self.named = [drawn[number % len(kinds)][number // len(kinds)] for number in range(num_documents)]
        self.things = {
            name: _thing(name, kinds[number % len(kinds)], self.by_kind, rng) for number, name in enumerate(self.named)
        }

    @property
    def articles(self) -> Sequence[Document]:
        return [thing.article for thing in self.things.values()]

    def questions(self, hops: int) -> Iterator[Question]:
        """Yield all questions of so many hops in which no relation and no thing comes twice."""
        for name in self.things:
            yield from self._questions((), (name,), hops)

    def _questions(self, relations: tuple[str, ...], way: tuple[str, ...], hops: int) -> Iterator[Question]:
        if hops == 0:
            yield Question(relations=relations, path=way[:-1], answer=way[-1])
            return
        for relation, name in self.things[way[-1]].facts.items():
            if relation not in relations and name not in way:
                yield from self._questions((*relations, relation), (*way, name), hops - 1)

    def draw(self, hops: int, rng: random.Random) -> Question:
        """Draw one of `questions(hops)`."""
        while True:
            way, relations = [rng.choice(self.named)], list[str]()
            for _ in range(hops):
                relation, name = rng.choice([*self.things[way[-1]].facts.items()])
                relations.append(relation)
                way.append(name)
            if len(set(way)) == len(way) and len(set(relations)) == hops:
                return Question(relations=tuple(relations), path=tuple(way[:-1]), answer=way[-1])


def _thing(name: str, kind: str, named: Mapping[str, Sequence[str]], rng: random.Random) -> Thing:
    relations = RELATIONS[kind]
    facts: dict[str, str] = {}
    for relation in rng.sample(list(relations), rng.choice(NUM_FACTS)):
        facts[relation] = rng.choice(named[relations[relation]])
        while facts[relation] == name:
            facts[relation] = rng.choice(named[relations[relation]])
    return Thing(name=name, kind=kind, facts=facts)
