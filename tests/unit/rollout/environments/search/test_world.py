"""The generated world: what its articles say, and that each question about it has one right answer."""

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from rollout.agents.environment import Step, Turn
from rollout.environments.search.documents import COMMON_SHARE, Document, Found, Retriever
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.world import FIRST, OTHER, RELATIONS, Question, World, names
from tests.support.searches import tag_environment

WORLD = World(seed=3, num_documents=400)


def answers(question: Question, world: World) -> set[str]:
    """Read in the articles, whatever the world knows, all names that the relations lead to."""
    articles = [article.text for article in world.articles]
    reached = {question.path[0]}
    for relation in question.relations:
        about = [text for text in articles if text.split()[0] in reached]
        reached = {words[words.index(relation) + 1] for words in map(_words, about) if relation in words}
    return reached


def _words(text: str) -> list[str]:
    return text.replace(",", "").rstrip(".").split()


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_question_has_one_right_answer_which_is_in_the_articles(hops: int) -> None:
    for question in itertools.islice(WORLD.questions(hops), 0, None, 97):
        assert answers(question, WORLD) == {question.answer}
        assert question.hops == hops
        assert len({*question.path, question.answer}) == hops + 1, "it goes on, and does not come back"
        assert question.answer not in question.text


def test_an_article_has_one_to_three_facts_about_things_that_there_are() -> None:
    articles, things = WORLD.articles, WORLD.things
    assert len(articles) == len({article.title for article in articles}) == 400
    assert {len(thing.facts) for thing in things.values()} == {1, 2, 3}
    for thing in things.values():
        assert all(things[name].kind == RELATIONS[thing.kind][relation] for relation, name in thing.facts.items())
        assert thing.name not in thing.facts.values()
    event = next(thing for thing in things.values() if thing.kind == "event" and len(thing.facts) == 3)
    (one, first), (two, second), (three, third) = event.facts.items()
    assert event.article.text == f"{event.name} is an event with {one} {first}, {two} {second} and {three} {third}."


def test_questions_are_all_there_are_and_a_drawn_one_is_among_them() -> None:
    assert sum(1 for _ in WORLD.questions(1)) == sum(len(thing.facts) for thing in WORLD.things.values())
    texts = {question.text for question in WORLD.questions(2)}
    rng = random.Random(0)
    assert {WORLD.draw(2, rng).text for _ in range(50)} < texts


def test_seed_and_size_decide_everything() -> None:
    assert World(3, 400).articles == WORLD.articles != World(4, 400).articles
    assert list(World(3, 400).questions(1)) == list(WORLD.questions(1))
    with pytest.raises(ValueError, match="num_documents=7: must be at least 8"):
        World(0, 7)
    assert len(list(World(0, 8).questions(1))) >= 8


def test_a_large_world_is_made_at_once_and_its_relations_are_common_words() -> None:
    """Words in so many documents are not looked up by FTS5, which would take long."""
    began = time.process_time()
    world = World(0, 20_000)
    assert len(world.articles) == 20_000 and time.process_time() - began < 3
    shares = Counter(relation for thing in world.things.values() for relation in thing.facts)
    assert min(shares.values()) > COMMON_SHARE * 20_000


def test_names_are_distinct_as_short_as_their_number_allows_and_tell_their_kind() -> None:
    named = [name for kind in range(len(FIRST)) for name in names(kind, 5000, random.Random(0))]
    assert len(set(named)) == 20_000 and {len(name) for name in named} == {6}
    many = names(0, 6000, random.Random(0))
    assert len(set(many)) == 6000 and {len(name) for name in many} == {9}
    assert len({syllable for pool in (*FIRST, *OTHER) for syllable in pool}) == 640, "no kind shares one with another"


LARGE = World()
SMALL = World(seed=5, num_documents=200)


class AnyDocuments:
    """A retriever that does not look at the query."""

    def __init__(self, documents: Sequence[Document]):
        self._documents, self._rng = documents, random.Random(0)

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        return [Found(tuple(self._rng.sample(self._documents, topk))) for _ in queries]

    async def close(self) -> None:
        pass


async def searched(question: Question, retriever: Retriever) -> float:
    """The reward of a policy that reads: it knows the question's text and what it is told, and nothing else."""
    start, *relations = re.findall(r"(\w+)(?:'s|\.)", question.text)
    world, name = tag_environment(question, retriever), start
    for relation in relations:
        told = (await world.step(Turn.of(f"I look it up. <search>{name}'s {relation}</search>"))).observation
        match = re.search(rf"\b{relation} (\w+)", str(told)) or re.search(r"with \w+ (\w+)", str(told))
        assert match is not None
        name = match[1]
    return reward(await world.step(Turn.of(f"So it is this. <answer>{name}</answer>")))


async def guessed(question: Question, rng: random.Random) -> float:
    """The reward of a policy that answers at once, with a name of the right kind."""
    kind = LARGE.things[question.answer].kind
    answer = rng.choice(LARGE.by_kind[kind])
    return reward(await tag_environment(question, AnyDocuments([])).step(Turn.of(f"<answer>{answer}</answer>")))


def reward(step: Step) -> float:
    assert step.done and step.reward is not None and step.metrics["exact_match"] == step.reward
    return step.reward


async def rewards(questions: Iterable[Question], retriever: Retriever) -> list[float]:
    return [await searched(question, retriever) for question in questions]


def drawn(hops: int, count: int) -> list[Question]:
    rng = random.Random(hops)
    return [LARGE.draw(hops, rng) for _ in range(count)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_who_searches_is_always_right(hops: int) -> None:
    assert set(asyncio.run(rewards(SMALL.questions(hops), Fts5Retriever(SMALL.articles)))) == {1.0}
    assert set(asyncio.run(rewards(drawn(hops, 300), Fts5Retriever(LARGE.articles)))) == {1.0}


def test_who_does_not_search_is_right_in_less_than_one_of_a_hundred() -> None:
    async def all_of(questions: list[Question]) -> list[float]:
        rng = random.Random(0)
        return [await guessed(question, rng) for question in questions]

    assert mean(asyncio.run(all_of([*drawn(1, 1000), *drawn(2, 1000)]))) < 0.01


def test_a_retriever_of_any_documents_is_worth_less_than_two_of_a_hundred() -> None:
    retriever = AnyDocuments(LARGE.articles)
    assert mean(asyncio.run(rewards([*drawn(1, 1000), *drawn(2, 1000)], retriever))) < 0.02
