"""The question: how long does a search take with many episodes in one process, and does the event loop stand still?
Half a minute on two cores.

python -m scripts.bench.search [--seconds 20] [--world]

512 episodes at once, each of three searches and an answer: the search environment and its loop are the real ones, and
so is FTS5 over 20,000 articles of 100 words, whose frequencies fall as those of a language do (Zipf). With `--world`
the articles are those of the generated world. A query has the title of an article and words of its text. The policy is
scripted: a turn takes a log-normal time of 2 s on average. As an episode ends the next one begins.
Other processes hold the loop up as well: a loop without any work, in a process of its own, is watched beside it in the
same way, and what holds that one up is the machine. The last line is JSON:

    search_ms_p50, search_ms_p95, search_ms_worst
                            from the call of the retriever to what it found, the queue before it included
    searches_per_s          of all episodes
    found                   share of the searches whose first document is the article that was asked for
    stall_ms_p999, stall_ms_worst
                            how much later than asked for a sleep of 1 ms ends on the event loop
    idle_stall_ms_p999, idle_stall_ms_worst
                            the same of the loop without work
    stall_cpu_ms_worst      the most CPU time that the event loop's thread took between two of these sleeps. A loop that
                            had no core for long has more to do afterwards
"""

import asyncio
import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np

from rollout.actors.collector import collect_rarely
from rollout.environments.search.documents import Document, Found, Retriever
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.tags import agent_loop
from rollout.environments.search.world import World
from rollout.types import Completion, GenerationRequest
from scripts.bench.common import make_task, scripted
from scripts.bench.event_loop import Stalls
from scripts.bench.harness import make_parser, show_figures
from scripts.observe.tables import write_json

SEARCHES = 3
"""The searches of an episode."""
DOCUMENTS = 20_000
WORDS = 100
"""The words of an article."""
VOCABULARY = 50_000
TOPK = 3
PREPARED = 5000
"""The searches that the policy chooses from: they are tokenized before, as an engine does it elsewhere."""
SIGMA = 0.5
"""The standard deviation of the logarithm of a turn's time."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="until no further episode begins")
    parser.add_argument("--world", action="store_true", help="search the articles of the generated world")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in agent workers
    articles = World(0, DOCUMENTS).articles if options.world else made_up(DOCUMENTS)
    retriever = Fts5Retriever(articles)
    job = Job(articles=articles, seconds=options.seconds)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        other.submit(os.getpid).result()  # starts it
        idle = other.submit(idle_stalls, options.seconds)
        figures = asyncio.run(run(job, retriever)) | idle.result()
    show_figures(f"{job.episodes} episodes at once, {len(articles)} documents", figures)
    write_json(figures)


def made_up(num_documents: int) -> list[Document]:
    """Return articles of made-up words. The n-th most frequent word is n times rarer than the first."""
    drawn = np.random.default_rng(0)
    names = [_word(number) for number in range(VOCABULARY)]
    weights = 1 / np.arange(1, VOCABULARY + 1)
    ranks = drawn.choice(VOCABULARY, (num_documents, WORDS), p=weights / weights.sum())
    return [
        Document(
            title=f"{_word(row + VOCABULARY)} {names[row % VOCABULARY]}", text=" ".join(names[k] for k in ranks[row])
        )
        for row in range(num_documents)
    ]


def _word(number: int) -> str:
    """Return the n-th word: syllables in place of digits."""
    syllables = [first + last for first in "bdfgklmnprstvz" for last in "aeiou"]
    name = ""
    while number or not name:
        number, syllable = divmod(number, len(syllables))
        name += syllables[syllable]
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    articles: Sequence[Document]
    seconds: float
    """The time after which no episode begins any more."""
    episodes: int = 512
    """The number that runs at once."""
    turn_s: float = 2.0


@dataclass(slots=True)
class Timed:
    """Notes how long the searches of a retriever take, and whether they find their article."""

    retriever: Retriever
    seconds: list[float] = field(default_factory=list)
    hits: int = 0

    async def search(self, queries: Sequence[str], topk: int) -> list[Found]:
        began = time.perf_counter()
        results = await self.retriever.search(queries, topk)
        self.seconds.append(time.perf_counter() - began)
        for query, result in zip(queries, results, strict=True):
            self.hits += bool(result.documents) and query.startswith(result.documents[0].title)
        return results

    async def close(self) -> None:
        await self.retriever.close()


class Searcher:
    """A policy that looks for articles, and then gives up."""

    def __init__(self, job: Job, tokenizer: Any):
        self._turn_s, self._drawn = job.turn_s, random.Random(0)
        says = [*map(self._search, self._drawn.choices(job.articles, k=PREPARED)), "<answer>none</answer>"]
        self._replies = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32) for text in says]

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        await asyncio.sleep(self._turn_s * math.exp(self._drawn.gauss(-(SIGMA**2) / 2, SIGMA)))
        is_last = request.request_id.turn == SEARCHES
        return [scripted(self._replies[-1] if is_last else self._replies[self._drawn.randrange(PREPARED)])]

    def _search(self, article: Document) -> str:
        text = article.text.split()
        query = f"{article.title} {' '.join(self._drawn.choices(text, k=6))}"
        return f"<think>{' '.join(text[:20])}</think><search>{query}</search>"


async def run(job: Job, retriever: Retriever) -> dict[str, float]:
    from trainer.tiny.model import build_tokenizer  # takes seconds to import

    tokenizer = build_tokenizer(article.text for article in job.articles[:200])
    timed, stalls = Timed(retriever), Stalls()
    loop = agent_loop(tokenizer, retriever=timed, topk=TOPK)
    policy, numbers = Searcher(job, tokenizer), itertools.count()
    collect_rarely()  # as agent workers do
    began = time.perf_counter()

    async def one_after_another(number: int) -> None:
        await asyncio.sleep(number / job.episodes * job.turn_s)
        while time.perf_counter() < began + job.seconds:
            episode = await loop.run_episode(make_task(next(numbers)), policy.generate)
            assert episode.result is None or episode.result.error is None, episode.result

    async with stalls.watched():
        await asyncio.gather(*map(one_after_another, range(job.episodes)))
    seconds = time.perf_counter() - began
    await retriever.close()
    p50, p95, worst = 1000 * np.percentile(timed.seconds, [50, 95, 100])
    return {
        "search_ms_p50": float(p50),
        "search_ms_p95": float(p95),
        "search_ms_worst": float(worst),
        "searches_per_s": len(timed.seconds) / seconds,
        "found": timed.hits / len(timed.seconds),
        **stalls.figures(),
        "stall_cpu_ms_worst": 1000 * max(stalls.loop_cpu),
    }


def idle_stalls(seconds: float) -> dict[str, float]:
    """Watch a loop without work."""
    stalls = Stalls()

    async def wait() -> None:
        async with stalls.watched():
            await asyncio.sleep(seconds)

    asyncio.run(wait())
    return stalls.figures("idle_stall")


if __name__ == "__main__":
    main()
