"""Search by tags, as in Search-R1 (Jin et al. 2025, arXiv 2503.09516). It works with base models.

The policy writes <think>, then <search>query</search> or <answer>...</answer>. The documents come back within
<information>: as text that goes on where the policy stopped, or as a message of the user's.

rollout.agent_loop=rollout.environments.search.tags:agent_loop
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Observation, Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role
from rollout.environments.search.answers import gold_answers, scores
from rollout.environments.search.documents import Retriever
from rollout.environments.search.lookup import STEP_TIMEOUT_S, Form, Lookup, search_loop, special_tokens, tags
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
    """The first whole tag of a turn."""

    kind: str
    """The kind of action: search or answer."""
    text: str


def parse_action(turn: str) -> Action | None:
    """Return what a turn asks for; None where it has no whole tag, or an empty one.

    Example: parse_action("<think>Hm</think> <search>Faust author</search>") == Action("search", "Faust author")
    """
    tag = _ACTION.search(turn)
    return Action(tag[1], tag[2].strip()) if tag is not None and tag[2].strip() else None


def information(documents: str) -> str:
    """Return what the policy reads after a search."""
    return f"\n\n<information>{documents}</information>\n\n"


class TagEnvironment:
    """One episode. The reward is the exact match of the answer in the policy's own words: what documents say between
    <answer> and </answer> is never read as one."""

    def __init__(self, prompt: Prompt, lookup: Lookup, format_score: float = 0.0, *, in_messages: bool = False):
        """`format_score`: the reward of a wrong answer in the right form."""
        self._gold = gold_answers(prompt.ground_truth, prompt.extra)
        self._lookup, self._format_score, self._in_messages = lookup, format_score, in_messages

    async def step(self, turn: Turn, /) -> Step:
        action = parse_action(turn)
        if action is None:
            return Step(observation=self._shown(HINT), counts={"invalid_actions": 1.0})
        if action.kind == "answer":
            scored = scores(action.text, self._gold)
            reward = scored["exact_match"] or self._format_score
            return Step(done=True, reward=reward, metrics=self._lookup.metrics() | scored)
        if turn.recorded is None:
            observation = information(await self._lookup.find(action.text))
        else:
            observation = turn.recorded
            self._lookup.recall(action.text, observation)
        return Step(observation=self._shown(observation), metrics=self._lookup.metrics())

    def _shown(self, text: str) -> Observation:
        return [Message(role=Role.user, content=text)] if self._in_messages else text


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
    documents_as: str = "text",
) -> MultiTurn:
    """Make the agent loop of rollout.agent_args.

    Args:
        tokenizer: The tokenizer of transformers, for `documents_as=message` with a chat template.
        retriever: A retriever, or what `make_retriever` makes one of.
        step_timeout_s: The deadline of each step, which includes the wait for a retriever that is down.
        documents_as: "text", which goes on in the assistant's own text, or "message", a message of the user's by the
            chat template, as SkyRL's fully asynchronous recipe has it.

    Raises:
        ValueError: An argument is wrong.
    """
    if documents_as not in ("text", "message"):
        raise ValueError(f"documents_as={documents_as}: must be text or message")
    in_messages = documents_as == "message"
    form = Form(
        make_environment=lambda prompt, lookup: TagEnvironment(prompt, lookup, format_score, in_messages=in_messages),
        markers=(*TAGS, *special_tokens(tokenizer)),
        stop=STOP,
        chat=ChatTurns(tokenizer) if in_messages else None,
    )
    return search_loop(
        tokenizer,
        form,
        retriever=retriever,
        topk=topk,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
        max_document_tokens=max_document_tokens,
        format_score=format_score,
        step_timeout_s=step_timeout_s,
    )
