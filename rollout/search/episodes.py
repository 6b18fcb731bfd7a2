"""The agent loop of both forms of the search environment, and what both check."""

from dataclasses import replace

from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.multi_turn import MultiTurn
from rollout.search.answers import UNANSWERED
from rollout.search.checks import check_number, check_whole
from rollout.search.documents import Retriever
from rollout.search.http import HttpRetriever
from rollout.search.lookup import COUNTS
from rollout.search.wire import MAX_TOPK

NOTHING_YET = {**dict.fromkeys((*COUNTS, "invalid_actions"), 0.0), **UNANSWERED}
"""Of an episode in which nothing was searched or answered."""


class SearchLoop(MultiTurn):
    """A `MultiTurn` whose episodes all have all metrics: a mean over those that answered would say little. An episode
    without a reward, because its retriever failed, has those that it came to."""

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        episode = await super().run_episode(task, generate)
        if episode.result is not None and episode.result.error is not None:
            return episode
        return replace(episode, metrics=NOTHING_YET | episode.metrics)


def check_arguments(topk: object, format_score: object) -> None:
    """Raises ValueError, which names the argument and what is allowed."""
    check_whole("topk", topk, 1, MAX_TOPK)
    check_number("format_score", format_score)


def check_patience(retriever: Retriever, step_timeout_s: float) -> None:
    """Raises ValueError where a step ends before the wait that is a part of it: an outage would then cost rewards."""
    check_number("step_timeout_s", step_timeout_s, above=0)
    if isinstance(retriever, HttpRetriever) and retriever.down_timeout_s >= step_timeout_s:
        longest = f"must be below step_timeout_s={step_timeout_s:g}, the deadline of a step"
        raise ValueError(f"retriever.down_timeout_s={retriever.down_timeout_s:g}: {longest}")
