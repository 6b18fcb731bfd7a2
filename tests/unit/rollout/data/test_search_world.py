"""Questions about the world and episodes of a searcher: what they read is what the environment says, token by token."""

import asyncio
import random
from dataclasses import asdict, replace

import pytest

from rollout.agents.environment import Turn
from rollout.data.search_world import FLAWLESS, Faults, demonstrations, episode, split_questions
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.world import Question, World
from tests.support.searches import tag_environment

WORLD = World(seed=1, num_documents=2000)
TRAIN, VAL = split_questions(WORLD, 600, 100, seed=0)


def of_hops(hops: int) -> list[Question]:
    return [question for question in TRAIN if question.hops == hops]


def test_train_and_val_need_no_article_in_common_and_the_seed_decides_them() -> None:
    assert (TRAIN, VAL) == split_questions(WORLD, 600, 100, seed=0) != split_questions(WORLD, 600, 100, seed=1)
    assert len({question.text for question in TRAIN + VAL}) == 700
    assert not {name for question in TRAIN for name in question.path} & {
        name for question in VAL for name in question.path
    }
    assert [question.hops for question in VAL[:4]] == [1, 2, 2, 1]
    with pytest.raises(ValueError, match="500 questions: a world of 20 documents has too few"):
        split_questions(World(0, 20), 500, 0, seed=0)


def test_what_an_episode_reads_is_what_the_environment_tells() -> None:
    """Whatever goes wrong in it: each search finds the article that the demonstration shows."""

    async def replay(question: Question, texts: tuple[str, ...], retriever: Fts5Retriever) -> float:
        environment = tag_environment(question, retriever)
        for said, told in zip(texts[1:-1:2], texts[2::2], strict=True):
            assert (await environment.step(Turn.of(said))).observation == told
        last = await environment.step(Turn.of(texts[-1]))
        assert last.done and last.reward is not None
        return last.reward

    async def replays(faults: Faults) -> list[float]:
        retriever, rng = Fts5Retriever(WORLD.articles), random.Random(0)
        return [await replay(question, episode(WORLD, question, rng, faults), retriever) for question in TRAIN]

    assert set(asyncio.run(replays(FLAWLESS))) == {1.0}
    assert 0.1 < sum(asyncio.run(replays(Faults()))) / 600 < 0.5


@pytest.mark.parametrize(("fault", "hops", "num_texts"), [("guess", 2, 2), ("stop_early", 2, 4), ("stop_early", 1, 4)])
def test_an_episode_that_ends_early(fault: str, hops: int, num_texts: int) -> None:
    question = of_hops(hops)[0]
    texts = episode(WORLD, question, random.Random(0), replace(FLAWLESS, **{fault: 1.0}))
    assert (len(texts), texts[0]) == (num_texts, question.text)
    name = texts[-1].partition("<answer> ")[2].removesuffix("</answer>")
    if fault == "guess":
        assert WORLD.things[name].kind == WORLD.things[question.answer].kind and name != question.answer
    else:
        assert name == (*question.path, question.answer)[1]


def test_an_episode_that_misreads_takes_what_the_article_says_first() -> None:
    rng, faults = random.Random(0), replace(FLAWLESS, misread=1.0)
    for question in of_hops(1):
        relation, name = next(iter(WORLD.things[question.path[0]].facts.items()))
        assert episode(WORLD, question, rng, faults)[-1] == f" {relation} {name} <answer> {name}</answer>"


def test_a_wrong_query_is_about_something_else_of_the_same_kind() -> None:
    for question in of_hops(1)[:50]:
        _, said, *_ = episode(WORLD, question, random.Random(0), replace(FLAWLESS, wrong_query=1.0))
        name, _, relation = said.removeprefix(" <search> ").removesuffix("</search>").partition("'s ")
        assert relation == question.relations[0] and name != question.path[0]
        assert WORLD.things[name].kind == WORLD.things[question.path[0]].kind


def test_demonstrations_are_flawless_first_then_sloppy() -> None:
    right = {question.text: question.answer for question in TRAIN}
    episodes = demonstrations(WORLD, TRAIN, num_clean=200, num_sloppy=400, seed=5)
    assert episodes == demonstrations(WORLD, TRAIN, num_clean=200, num_sloppy=400, seed=5)
    is_right = [f"> {right[texts[0]]}<" in texts[-1] for texts in episodes]
    assert all(is_right[:200]) and 0.1 < sum(is_right[200:]) / 400 < 0.5
    assert all(0 < share < 1 for share in asdict(Faults()).values())
