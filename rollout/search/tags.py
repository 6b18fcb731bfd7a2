"""Search by tags in one assistant text, as in Search-R1 (Jin et al. 2025, arXiv 2503.09516): it works with base models.

The policy writes <think>, then <search>query</search> or <answer>...</answer>. What was found comes back within
<information>. rollout.agent_loop=rollout.search.tags:agent_loop
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.search.answers import gold_answers, scores
from rollout.search.documents import Retriever
from rollout.search.episodes import SearchLoop, check_arguments, check_patience
from rollout.search.escape import breaker, special_tokens, tags
from rollout.search.lookup import STEP_TIMEOUT_S, Lookup, Shorten
from rollout.search.retrievers import make_retriever
from rollout.search.shorten import in_tokens
from rollout.types import Prompt

STOP = ("</search>", "</answer>")
TAGS = tags("think", "search", "information", "answer")
HINT = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I"
    " want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn asks for: its first whole tag."""

    kind: str
    """search or answer."""
    text: str


def action_of(turn: str) -> Action | None:
    """None where a turn has no whole tag, or an empty one.

    Example: action_of("<think>Hm</think> <search>Faust author</search>") == Action("search", "Faust author")
    """
    found = _ACTION.search(turn)
    return Action(found[1], found[2].strip()) if found is not None and found[2].strip() else None


def information(found: str) -> str:
    """What the policy reads after a search."""
    return f"\n\n<information>{found}</information>\n\n"


class TagEnvironment:
    """One episode. The reward is the exact match of the answer in the policy's own words: what documents say between
    <answer> and </answer> is never read as one."""

    def __init__(self, prompt: Prompt, lookup: Lookup, format_score: float = 0.0):
        """`format_score`: the reward of a wrong answer in the right form."""
        self._gold, self._lookup, self._format_score = gold_answers(prompt), lookup, format_score

    async def step(self, turn: Turn, /) -> Step:
        action = action_of(turn)
        if action is None:
            return Step(observation=HINT, counts={"invalid_actions": 1.0})
        if action.kind == "search" and turn.recorded is not None:
            self._lookup.recall(action.text, turn.recorded)
            return Step(observation=turn.recorded, metrics=self._metrics())
        if action.kind == "search":
            found = await self._lookup.find(action.text)
            return Step(observation=information(found), metrics=self._metrics())
        scored = scores(action.text, self._gold)
        return Step(done=True, reward=scored["exact_match"] or self._format_score, metrics=self._metrics() | scored)

    def _metrics(self) -> dict[str, float]:
        return self._lookup.metrics()


def agent_loop(
    tokenizer: Any,
    *,
    retriever: Mapping[str, Any] | Retriever,
    topk: int = 3,
    max_turns: int = 4,
    max_turn_tokens: int | None = 500,
    max_document_tokens: int = 200,
    format_score: float = 0.0,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> MultiTurn:
    """Arguments are those of rollout.agent_args. `retriever`: as `make_retriever` takes it. `step_timeout_s`: of each
    step, which includes the wait for a retriever that is down. Raises ValueError."""
    check_arguments(topk, format_score)
    found = make_retriever(retriever)
    check_patience(found, step_timeout_s)
    shorten: Shorten = in_tokens(tokenizer, max_document_tokens, breaker((*TAGS, *special_tokens(tokenizer))))
    return SearchLoop(
        lambda prompt: TagEnvironment(prompt, Lookup(found, topk, shorten), format_score),
        tokenizer,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        step_timeout_s=step_timeout_s,
        stop=STOP,
        closes=(found.close,),
    )
