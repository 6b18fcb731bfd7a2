"""Questions about a generated world, and episodes of a searcher who answers them by tags."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.environments.search.lookup import listed
from rollout.environments.search.tags import information
from rollout.environments.search.world import Question, Thing, World

HOPS = (1, 2, 2)
"""The hops of the questions, which take turns."""
MAX_DRAWS = 50
"""The draws per question that is wanted: a world has only so many questions."""


def split_questions(world: World, num_train: int, num_val: int, seed: int) -> tuple[list[Question], list[Question]]:
    """Draw (train, val) questions, all distinct; the same arguments give the same questions. No article that a question
    of val needs is needed by one of train. Raises ValueError when the world has fewer."""
    rng = random.Random(seed)
    val = _drawn(world, num_val, set(), rng)
    return _drawn(world, num_train, {name for question in val for name in question.path}, rng), val


def _drawn(world: World, count: int, untouched: set[str], rng: random.Random) -> list[Question]:
    """Draw distinct questions that need none of the articles `untouched`."""
    drawn: dict[str, Question] = {}
    for _ in range(MAX_DRAWS * count):
        if len(drawn) == count:
            break
        question = world.draw(HOPS[len(drawn) % len(HOPS)], rng)
        if untouched.isdisjoint(question.path):
            drawn[question.text] = question
    if len(drawn) < count:
        raise ValueError(f"{count} questions: a world of {len(world.things)} documents has too few")
    return list(drawn.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The probabilities that a searcher errs."""

    guess: float = 0.15
    """The probability per episode that it answers with a name of the right kind, without a search."""
    wrong_query: float = 0.1
    """The probability per search that it asks about something else of the same kind, and believes what it reads."""
    misread: float = 0.7
    """The probability per article that it takes the first that the article says, whatever was asked."""
    stop_early: float = 0.65
    """The probability after each document that it answers, though there is more to look up."""


FLAWLESS = Faults(guess=0.0, wrong_query=0.0, misread=0.0, stop_early=0.0)


def episode(world: World, question: Question, rng: random.Random, faults: Faults = FLAWLESS) -> tuple[str, ...]:
    """Return by turns what the searcher reads and what it says, with one document per search.

    After each article the searcher says what it takes from it.

    Example: ("Name Mudhus's hero.", " <search> Mudhus's hero</search>", "\\n\\n<information>Doc 1(Title: Mudhus) Mudhus
        is a person with home Ritgur and hero Mosdis.</information>\\n\\n", " hero Mosdis <answer> Mosdis</answer>")
    """
    if rng.random() < faults.guess:
        return question.text, f" <answer> {_another(world, question.answer, rng)}</answer>"
    texts, note, name = [question.text], "", question.path[0]
    for hop, relation in enumerate(question.relations, 1):
        if rng.random() < faults.wrong_query:
            name = _another(world, name, rng)
        thing = world.things[name]
        texts += [f"{note} <search> {name}'s {relation}</search>", information(listed([thing.article]))]
        taken, name = _read(thing, relation, rng.random() < faults.misread)
        note = f" {taken} {name}"
        if hop == question.hops or rng.random() < faults.stop_early:
            break
    return *texts, f"{note} <answer> {name}</answer>"


def _another(world: World, name: str, rng: random.Random) -> str:
    """Draw something else of the same kind."""
    other = rng.choice(world.by_kind[world.things[name].kind])
    return other if other != name else _another(world, name, rng)


def _read(thing: Thing, relation: str, is_careless: bool) -> tuple[str, str]:
    """Return what the article says of the relation, or the first that it says where that is nothing."""
    if is_careless or relation not in thing.facts:
        return next(iter(thing.facts.items()))
    return relation, thing.facts[relation]


def demonstrations(
    world: World, questions: Sequence[Question], *, num_clean: int, num_sloppy: int, seed: int
) -> list[tuple[str, ...]]:
    """Build a curriculum of episodes, their questions drawn with replacement: `num_clean` flawless ones teach to search
    and to read, then `num_sloppy` sloppy ones make the model wrong often enough that reinforcement learning has
    something to improve."""
    rng = random.Random(seed)
    clean = [episode(world, question, rng) for question in rng.choices(questions, k=num_clean)]
    return clean + [episode(world, question, rng, Faults()) for question in rng.choices(questions, k=num_sloppy)]
