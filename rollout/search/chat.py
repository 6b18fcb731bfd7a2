"""Search by tool calls, in a chat: the policy calls `search`, and what it says without a call is its answer.

rollout.agent_loop=rollout.search.chat:agent_loop data.chat_template=true
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.rewards.tagged import tagged_answer
from rollout.search.answers import Asked, gold_answers, scores
from rollout.search.documents import Retriever
from rollout.search.episodes import SearchLoop, check_arguments, check_patience
from rollout.search.escape import breaker, tags
from rollout.search.lookup import STEP_TIMEOUT_S, Lookup
from rollout.search.retrievers import make_retriever
from rollout.search.shorten import in_tokens
from rollout.sessions.chat_turns import ChatTurns
from rollout.sessions.messages import Message, Role, ToolSpec
from rollout.types import Prompt

SPEC = ToolSpec(
    name="search",
    description="Searches documents, and returns the best of them.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
    },
)
WRONG_CALL = 'Error: the only tool is search, and its arguments are {"query": "..."}, with a text that is not empty.'
HINT = "Call the tool search with a query, or give the final answer."
MARKERS = tags("tool_call", "tool_response", "think", "answer")
"""What documents must not have. The chat template's own tokens, no content ever yields."""
_CALL = "<tool_call>"


def query_of(name: str, arguments: str) -> str | None:
    """The query of a call. None where it is another tool's, or malformed, or empty.

    Example: query_of("search", '{"query": "capital of France"}') == "capital of France"
    """
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    query = given.get("query") if isinstance(given, dict) else None
    return query.strip() or None if name == SPEC.name and isinstance(query, str) else None


@dataclass(slots=True)
class Dialogue:
    """What an episode makes of the policy's calls and answers, whoever passes them on."""

    gold: Sequence[str]
    lookup: Lookup
    invalid_actions: int = 0
    """Wrong calls, and turns with neither a call nor an answer."""

    @classmethod
    def of(cls, asked: Asked, lookup: Lookup) -> "Dialogue":
        return cls(gold_answers(asked), lookup)

    async def results(self, calls: Sequence[tuple[str, str]], recorded: str | None = None) -> list[str]:
        """What the policy reads of each call, given as (name, arguments). They are looked up side by side, but for an
        episode that runs again, which reads what was `recorded`. Raises RetrievalError."""
        return await asyncio.gather(*(self._result(name, arguments, recorded) for name, arguments in calls))

    async def _result(self, name: str, arguments: str, recorded: str | None) -> str:
        query = query_of(name, arguments)
        if query is None:
            self.invalid_actions += 1
            return WRONG_CALL
        if recorded is not None:
            self.lookup.recall(query, recorded)
            return recorded
        return await self.lookup.find(query)

    def answer_in(self, content: str) -> str | None:
        """The answer in the words of a turn without a call: what is between its last <answer> tags, or else all of it.
        None for no words, and for a call that could not be read, which is an invalid action."""
        answer = tagged_answer(content)
        if answer and _CALL not in content:
            return answer
        self.invalid_actions += 1
        return None

    def metrics(self, answer: str | None = None) -> dict[str, float]:
        """Those of the episode so far; with its answer, also how good that is."""
        counts = self.lookup.metrics() | {"invalid_actions": float(self.invalid_actions)}
        return counts if answer is None else counts | scores(answer, self.gold)


class ChatEnvironment:
    """One episode. The reward is the exact match of the answer, in the policy's own words."""

    def __init__(self, prompt: Prompt, lookup: Lookup, format_score: float = 0.0):
        """`format_score`: the reward of a wrong answer."""
        self._dialogue, self._format_score = Dialogue.of(prompt, lookup), format_score

    async def step(self, turn: Turn, /) -> Step:
        if turn.tool_calls is None:
            raise ValueError("a ChatEnvironment reads the tool calls of a turn, which needs MultiTurn(chat=...)")
        if turn.tool_calls:
            calls = [(call.name, call.arguments) for call in turn.tool_calls]
            texts = await self._dialogue.results(calls, turn.recorded)
            results = [
                Message(role=Role.tool, content=text, call_id=call.call_id)
                for call, text in zip(turn.tool_calls, texts, strict=True)
            ]
            return Step(observation=results, metrics=self._dialogue.metrics())
        answer = self._dialogue.answer_in(turn.content)
        metrics = self._dialogue.metrics(answer)
        if answer is None:
            return Step(observation=[Message(role=Role.user, content=HINT)], metrics=metrics)
        return Step(done=True, reward=metrics["exact_match"] or self._format_score, metrics=metrics)


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
    """Arguments are those of rollout.agent_args. `retriever`: as `make_retriever` takes it. Calls are read as Hermes
    and Qwen write them. Raises ValueError."""
    check_arguments(topk, format_score)
    found = make_retriever(retriever)
    check_patience(found, step_timeout_s)
    shorten = in_tokens(tokenizer, max_document_tokens, breaker(MARKERS))
    return SearchLoop(
        lambda prompt: ChatEnvironment(prompt, Lookup(found, topk, shorten), format_score),
        tokenizer,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        step_timeout_s=step_timeout_s,
        chat=ChatTurns(tokenizer, [SPEC]),
        closes=(found.close,),
    )
