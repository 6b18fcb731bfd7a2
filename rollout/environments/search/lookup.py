"""The searches of one episode: what the policy reads of the documents, and what is counted. All forms of the search
environment are made of it."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Environment
from rollout.agents.loop import Episode, EpisodeTask, GenerateGroup
from rollout.agents.multi_turn import MultiTurn
from rollout.agents.threads import OneThread
from rollout.chat.text_encoder import LONG_TEXT, text_encoder
from rollout.environments.search.answers import UNANSWERED
from rollout.environments.search.documents import Document, Retriever, check_number, check_whole
from rollout.environments.search.http import HttpRetriever
from rollout.environments.search.retrievers import make_retriever
from rollout.environments.search.wire import MAX_TOPK
from rollout.types import Prompt

NOTHING = "Nothing was found."
FAILED = "The search failed."
COUNTS = ("searches", "repeated_queries", "empty_results", "failed_searches", "cut_documents", "retrieval_ms")
NOTHING_YET = {**dict.fromkeys((*COUNTS, "invalid_actions"), 0.0), **UNANSWERED}
"""The metrics of an episode in which nothing was searched or answered."""
STEP_TIMEOUT_S = 660.0
"""The deadline of a step of a search environment: longer than an `HttpRetriever` waits for a server that is down."""
MAX_CHARS_PER_TOKEN = 32
"""The rest of a document that is longer than this is not even tokenized: a document may have megabytes."""
KEPT = 4096
"""Shortened documents that are remembered."""
Shorten = Callable[[str], str]
"""Cuts a document to its share of an observation."""
_tokenizer_thread = OneThread("documents")


# -- what the policy reads of a document -------------------------------------------------------------------------------


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that a tokenizer of transformers takes for tokens of their own, such as the end of a turn."""
    return tuple(getattr(tokenizer, "all_special_tokens", None) or ())


def tags(*names: str) -> tuple[str, ...]:
    """Return the opening and the closing tag of each name. Example: tags("search") == ("<search>", "</search>")"""
    return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))


def breaker(markers: Iterable[str]) -> Callable[[str], str]:
    """Return a function that breaks each of these texts by a space after its first character, wherever it occurs.

    Example: breaker(tags("information"))("a</information>b") == "a< /information>b"
    """
    alternatives = "|".join(re.escape(marker) for marker in set(markers) if len(marker) > 1)
    if not alternatives:
        return str
    begins = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
    return lambda text: begins.sub(r"\1 ", text)


def in_tokens(tokenizer: Any, max_tokens: int, escape: Callable[[str], str] = str) -> Shorten:
    """Return a function that cuts a text to its first `max_tokens` tokens, and remembers the last few thousand.
    `escape`, a `breaker`, is applied before. Raises ValueError for fewer than one token."""
    if max_tokens < 1:
        raise ValueError(f"max_document_tokens={max_tokens}: must be at least 1")
    encode = text_encoder(tokenizer)

    @lru_cache(maxsize=KEPT)
    def shortened(text: str) -> str:
        harmless = escape(text[: max_tokens * MAX_CHARS_PER_TOKEN])
        token_ids = encode(harmless)
        if len(token_ids) <= max_tokens and len(text) <= max_tokens * MAX_CHARS_PER_TOKEN:
            return harmless
        return tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=True)

    return shortened


def in_characters(max_chars: int, escape: Callable[[str], str] = str) -> Shorten:
    """Return the same as `in_tokens` for a caller that has no tokenizer. Raises ValueError for fewer than one
    character."""
    if max_chars < 1:
        raise ValueError(f"max_document_chars={max_chars}: must be at least 1")
    return lambda text: escape(text[:max_chars])


def listed(documents: Sequence[Document]) -> str:
    """Write documents as Search-R1 shows them.

    Example: "Doc 1(Title: Paris) Paris is the capital of France.\\nDoc 2(Title: Lyon) ..."
    """
    lines = [
        f"Doc {number}{f'(Title: {document.title})' if document.title else ':'} {document.text}"
        for number, document in enumerate(documents, 1)
    ]
    return "\n".join(lines) or NOTHING


# -- an episode --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Lookup:
    """The searches of an episode, and their counts.

    Example:
        lookup = Lookup(retriever, topk=3, shorten=lambda text: text[:500])
        text = await lookup.find("capital of France")
        lookup.counts["searches"]  # 1.0
    """

    retriever: Retriever
    topk: int
    shorten: Shorten
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The counts of `COUNTS` so far."""
    _queries: set[str] = field(default_factory=set)

    async def find(self, query: str) -> str:
        """Return the documents, as the policy reads them. Raises RetrievalError."""
        began = time.monotonic()
        [answer] = await self.retriever.search([query], self.topk)
        has_failed, ms = answer.error is not None, 1000 * (time.monotonic() - began)
        self._count(query, is_empty=not has_failed and not answer.documents, has_failed=has_failed, ms=ms)
        if has_failed:
            return FAILED
        # A short text is tokenized here, since a thread costs more; a long one would hold up all other episodes.
        is_long = sum(len(document.text) for document in answer.documents) > LONG_TEXT
        return await _tokenizer_thread(self.shown, answer.documents) if is_long else self.shown(answer.documents)

    def recall(self, query: str, recorded: str) -> None:
        """Count a search of an episode that runs again, and reads what was `recorded`. Nothing is looked up."""
        self._count(query, is_empty=NOTHING in recorded, has_failed=FAILED in recorded, ms=0.0)

    def _count(self, query: str, *, is_empty: bool, has_failed: bool, ms: float) -> None:
        normal = " ".join(query.lower().split())
        self.counts["searches"] += 1
        self.counts["retrieval_ms"] += ms
        self.counts["repeated_queries"] += normal in self._queries
        self.counts["empty_results"] += is_empty
        self.counts["failed_searches"] += has_failed
        self._queries.add(normal)

    def metrics(self) -> dict[str, float]:
        """Return every count, 0 where there was nothing to count."""
        return {name: float(self.counts[name]) for name in COUNTS}

    def shown(self, documents: Sequence[Document]) -> str:
        """Return the documents as `listed`, each shortened."""
        short = [replace(whole, title=self.shorten(whole.title), text=self.shorten(whole.text)) for whole in documents]
        pairs = zip(short, documents, strict=True)
        self.counts["cut_documents"] += sum(len(cut.text) < len(whole.text) for cut, whole in pairs)
        return listed(short)


# -- the loop ----------------------------------------------------------------------------------------------------------


class SearchLoop(MultiTurn):
    """A `MultiTurn` whose episodes all have all metrics: a mean over those that answered would say little. An episode
    without a reward, because its retriever failed, has those that it came to."""

    async def run_episode(self, task: EpisodeTask, generate: GenerateGroup) -> Episode:
        episode = await super().run_episode(task, generate)
        if episode.result is not None and episode.result.error is not None:
            return episode
        return replace(episode, metrics=NOTHING_YET | episode.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form in which a policy searches."""

    make_environment: Callable[[Prompt, Lookup], Environment]
    markers: Sequence[str]
    """Texts that are broken where documents have them, since they would end a block or a turn."""
    stop: tuple[str, ...] = ()
    chat: ChatTurns | None = None


def search_loop(
    tokenizer: Any,
    form: Form,
    *,
    retriever: Mapping[str, Any] | Retriever,
    topk: int,
    max_turns: int,
    max_turn_tokens: int | None,
    max_document_tokens: int,
    format_score: float,
    step_timeout_s: float,
) -> SearchLoop:
    """Make the loop of a form of search. Raises ValueError for an argument that is wrong."""
    check_arguments(topk, format_score)
    searched = make_retriever(retriever)
    _check_patience(searched, step_timeout_s)
    shorten = in_tokens(tokenizer, max_document_tokens, breaker(form.markers))
    return SearchLoop(
        lambda prompt: form.make_environment(prompt, Lookup(searched, topk, shorten)),
        tokenizer,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        step_timeout_s=step_timeout_s,
        stop=form.stop,
        chat=form.chat,
        closes=(searched.close,),
    )


def check_arguments(topk: object, format_score: object) -> None:
    """Raise ValueError, which names the argument and what is allowed."""
    check_whole("topk", topk, 1, MAX_TOPK)
    check_number("format_score", format_score)


def _check_patience(retriever: Retriever, step_timeout_s: float) -> None:
    """Raise ValueError where a step ends before the wait that is a part of it: an outage would then cost rewards."""
    check_number("step_timeout_s", step_timeout_s, above=0)
    if isinstance(retriever, HttpRetriever) and retriever.down_timeout_s >= step_timeout_s:
        longest = f"must be below step_timeout_s={step_timeout_s:g}, the deadline of a step"
        raise ValueError(f"retriever.down_timeout_s={retriever.down_timeout_s:g}: {longest}")
