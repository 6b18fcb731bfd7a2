"""The benchmark of searches, over a small corpus."""

import asyncio

from rollout.search.fts5 import Fts5Retriever
from scripts.bench.search import Job, made_up, run


def test_every_episode_finds_the_articles_that_it_asks_for() -> None:
    articles = made_up(300)
    job = Job(articles=articles, episodes=16, turn_s=0.02, seconds=0.3)
    figures = asyncio.run(run(job, Fts5Retriever(articles)))
    assert figures["found"] == 1 and figures["searches_per_s"] > 16
    assert 0 < figures["search_ms_p50"] <= figures["search_ms_p95"] <= figures["search_ms_worst"]
