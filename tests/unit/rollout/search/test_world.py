"""The generated world: what its articles say, and that each question about it has one right answer."""

import itertools
import random
import time
from collections import Counter

import pytest

from rollout.search.names import FIRST, NUM_KINDS, OTHER, names
from rollout.search.words import COMMON_SHARE
from rollout.search.world import RELATIONS, Question, World

WORLD = World(seed=3, num_documents=400)


def answers(question: Question, world: World) -> set[str]:
    """By the articles' own words, whatever the world knows: all names that the relations lead to."""
    articles = [article.text for article in world.articles]
    found = {question.path[0]}
    for relation in question.relations:
        about = [text for text in articles if text.split()[0] in found]
        found = {words[words.index(relation) + 1] for words in map(_words, about) if relation in words}
    return found


def _words(text: str) -> list[str]:
    return text.replace(",", "").rstrip(".").split()


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_question_has_one_right_answer_which_is_in_the_articles(hops: int) -> None:
    for question in itertools.islice(WORLD.questions(hops), 0, None, 97):
        assert answers(question, WORLD) == {question.answer}
        assert question.hops == len(question.queries) == hops
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
    asked = {question.text for question in WORLD.questions(2)}
    rng = random.Random(0)
    assert {WORLD.draw(2, rng).text for _ in range(50)} < asked


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
    named = [name for kind in range(NUM_KINDS) for name in names(kind, 5000, random.Random(0))]
    assert len(set(named)) == 20_000 and {len(name) for name in named} == {6}
    many = names(0, 6000, random.Random(0))
    assert len(set(many)) == 6000 and {len(name) for name in many} == {9}
    assert len({syllable for pool in (*FIRST, *OTHER) for syllable in pool}) == 640, "no kind shares one with another"
