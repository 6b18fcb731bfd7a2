"""The benchmark of searches, over a small corpus."""

import asyncio

from rollout.environments.search.fts5 import Fts5Retriever
from scripts.bench.search import Job, idle_stalls, made_up, run


def test_every_episode_finds_the_articles_that_it_asks_for() -> None:
    articles = made_up(300)
    job = Job(articles=articles, episodes=16, turn_s=0.02, seconds=0.3)
    figures = asyncio.run(run(job, Fts5Retriever(articles)))
    assert figures["found"] == 1 and figures["searches_per_s"] > 0
    assert 0 < figures["search_ms_p50"] <= figures["search_ms_p95"] <= figures["search_ms_worst"]
    assert 0 < figures["stall_ms_p999"] <= figures["stall_ms_worst"]


def test_a_loop_without_work_is_watched_in_the_same_way() -> None:
    figures = idle_stalls(0.2)
    assert 0 < figures["idle_stall_ms_p999"] <= figures["idle_stall_ms_worst"]
