"""The agent loop of both forms of the search environment."""

from dataclasses import replace

from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.multi_turn import MultiTurn
from rollout.search.answers import UNANSWERED
from rollout.search.lookup import COUNTS

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
