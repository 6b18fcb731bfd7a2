"""An episode that runs again does not ask the retriever for what it has heard already, and counts its searches."""

import asyncio
from collections.abc import Sequence

from rollout.agents.environment import Step, Turn
from rollout.search.documents import Found, RetrievalError
from rollout.search.lookup import NOTHING, Lookup
from rollout.search.tags import TagEnvironment
from tests.support.fakes import make_prompt


class Down:
    """A retriever that is down."""

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        raise RetrievalError("down")

    async def close(self) -> None: ...


def test_a_recorded_search_needs_no_retriever_and_is_counted() -> None:
    lookup = Lookup(Down(), topk=3, shorten=lambda text: text)
    environment = TagEnvironment(make_prompt(0), lookup)
    found = "<information>Doc 1(Title: Paris) It is the capital.</information>"

    async def play() -> list[Step]:
        heard = [found, found, f"<information>{NOTHING}</information>"]
        turns = [Turn.of("<search>capital</search>", recorded=text) for text in heard]
        return [await environment.step(turn) for turn in turns]

    steps = asyncio.run(play())
    assert [step.observation for step in steps][:2] == [found, found]
    metrics = steps[-1].metrics
    names = ("searches", "repeated_queries", "empty_results", "retrieval_ms")
    assert [metrics[name] for name in names] == [3.0, 2.0, 1.0, 0.0]
