"""A generated world of made-up people, cities, companies and events: articles to search, and questions with one right
answer, which nobody knows without having read them."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rollout.search.documents import Document
from rollout.search.names import names

SEED = 0
NUM_DOCUMENTS = 20_000
RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"home": "city", "firm": "company", "hero": "person"},
    "city": {"mayor": "person", "fair": "event", "twin": "city"},
    "company": {"chief": "person", "seat": "city", "rival": "company"},
    "event": {"site": "city", "host": "company", "star": "person"},
}
"""Per kind of thing what an article may say about it, and of which kind that is. No relation belongs to two kinds, and
what an article says is of three kinds: how a name sounds tells which relation it answers."""
NUM_FACTS = (1, 2, 2, 3, 3)
"""Of an article, each as likely."""
MIN_DOCUMENTS = 2 * len(RELATIONS)
"""So that everything can refer to another thing of its own kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """Example: Thing(name="Derbor", kind="city", facts={"mayor": "Medhus", "twin": "Dadgor"})"""

    name: str
    """Of this thing only."""
    kind: str
    facts: Mapping[str, str]
    """By relation the name of another thing; one to three."""

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
    """What is asked of the thing that it names, then of what was found."""
    path: tuple[str, ...]
    """The things whose articles are read, one per hop. The question names the first."""
    answer: str

    @property
    def hops(self) -> int:
        """How many articles must be read one after another."""
        return len(self.relations)

    @property
    def text(self) -> str:
        """Example: "Name Derbor's mayor's home." """
        return "Name " + "'s ".join((self.path[0], *self.relations)) + "."

    @property
    def queries(self) -> tuple[str, ...]:
        """What a searcher who knows the way asks, one per hop.

        Example: ("Derbor's mayor", "Medhus's home")
        """
        return tuple(f"{name}'s {relation}" for name, relation in zip(self.path, self.relations, strict=True))


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
        self.of_kind = dict(zip(kinds, drawn, strict=True))
        """The names of all things of each kind."""
        self.named = [drawn[number % len(kinds)][number // len(kinds)] for number in range(num_documents)]
        self.things = {
            name: _thing(name, kinds[number % len(kinds)], self.of_kind, rng) for number, name in enumerate(self.named)
        }

    @property
    def articles(self) -> Sequence[Document]:
        return [thing.article for thing in self.things.values()]

    def questions(self, hops: int) -> Iterator[Question]:
        """All of so many hops, in which no relation and no thing comes twice, from the start to the answer."""
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
        """One of `questions(hops)`."""
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
