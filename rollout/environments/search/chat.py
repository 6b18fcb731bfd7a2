"""Search by tool calls: the policy calls `search`, and what it says without a call is its answer.

The agent loop reads calls as Hermes and Qwen write them. The harness is the same search over the SDK of OpenAI, for a
run whose episodes go through sessions, with any parser of sessions.tool_parser.

rollout.agent_loop=rollout.environments.search.chat:agent_loop data.chat_template=true
rollout.agent=rollout.environments.search.chat:agent
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollout.agents.chat_turns import ChatTurns
from rollout.agents.environment import Step, Turn
from rollout.agents.multi_turn import MultiTurn
from rollout.chat.messages import Message, Role, ToolSpec
from rollout.environments.search.answers import gold_answers, scores
from rollout.environments.search.documents import Retriever
from rollout.environments.search.lookup import (
    NOTHING_YET,
    STEP_TIMEOUT_S,
    Form,
    Lookup,
    breaker,
    check_arguments,
    in_characters,
    search_loop,
    tags,
)
from rollout.environments.search.retrievers import shared_retriever
from rollout.rewards.base import RewardResult
from rollout.rewards.gsm8k import tagged_answer
from rollout.sessions.harness import HarnessTask
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
TOOL = {"type": "function", "function": asdict(SPEC)}
WRONG_CALL = 'Error: the only tool is search, and its arguments are {"query": "..."}, with a text that is not empty.'
HINT = "Call the tool search with a query, or give the final answer."
MARKERS = tags("tool_call", "tool_response", "think", "answer")
"""Texts that documents must not have. The special tokens of the chat template are not among them: the content of a
message never becomes one."""
_CALL = "<tool_call>"


def read_query(name: str, arguments: str) -> str | None:
    """Return the query of a call; None where it calls another tool, is malformed or is empty.

    Example: read_query("search", '{"query": "capital of France"}') == "capital of France"
    """
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    query = values.get("query") if isinstance(values, dict) else None
    return query.strip() or None if name == SPEC.name and isinstance(query, str) else None


@dataclass(slots=True)
class Dialogue:
    """The answers to the policy's turns, whoever passes them on."""

    gold: Sequence[str]
    lookup: Lookup
    invalid_actions: int = 0
    """Wrong calls, and turns with neither a call nor an answer."""

    async def results(self, calls: Sequence[tuple[str, str]], recorded: str | None = None) -> list[str]:
        """Return what the policy reads of each call, a pair of name and arguments. The calls are looked up side by
        side; an episode that runs again reads what was `recorded`. Raises RetrievalError."""
        return await asyncio.gather(*(self._result(name, arguments, recorded) for name, arguments in calls))

    async def _result(self, name: str, arguments: str, recorded: str | None) -> str:
        query = read_query(name, arguments)
        if query is None:
            self.invalid_actions += 1
            return WRONG_CALL
        if recorded is not None:
            self.lookup.recall(query, recorded)
            return recorded
        return await self.lookup.find(query)

    def answer_in(self, content: str) -> str | None:
        """Return the answer in the words of a turn without a call: what is between its last <answer> tags, or else all
        of it. None for no words, and for a call that could not be read, which is an invalid action."""
        answer = tagged_answer(content)
        if answer and _CALL not in content:
            return answer
        self.invalid_actions += 1
        return None

    def metrics(self, answer: str | None = None) -> dict[str, float]:
        """Return the metrics of the episode so far; with its answer, also how good that is."""
        counts = self.lookup.metrics() | {"invalid_actions": float(self.invalid_actions)}
        return counts if answer is None else counts | scores(answer, self.gold)


class ChatEnvironment:
    """One episode of the agent loop. The reward is the exact match of the answer, in the policy's own words."""

    def __init__(self, prompt: Prompt, lookup: Lookup, format_score: float = 0.0):
        """`format_score`: the reward of a wrong answer."""
        self._dialogue = Dialogue(gold_answers(prompt.ground_truth, prompt.extra), lookup)
        self._format_score = format_score

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
    """Make the agent loop of rollout.agent_args; the arguments are those of `tags.agent_loop`. Raises ValueError."""
    form = Form(
        make_environment=lambda prompt, lookup: ChatEnvironment(prompt, lookup, format_score),
        markers=MARKERS,
        chat=ChatTurns(tokenizer, [SPEC]),
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


async def agent(
    task: HarnessTask,
    client: Any,
    *,
    retriever: Mapping[str, Any] | Retriever,
    topk: int = 3,
    max_turns: int = 4,
    max_document_chars: int = 1000,
    format_score: float = 0.0,
) -> RewardResult:
    """Ask, search what the policy calls for, and ask again, until it answers. An episode without an answer within
    `max_turns`, or whose answer a limit has cut off, has reward 0.

    Args:
        client: The openai.AsyncOpenAI of this episode.
        retriever: As in the agent loop. It is made once for all episodes.

    Raises:
        RetrievalError: The retriever cannot answer, and the episode has no reward.
        ValueError: An argument of rollout.agent_args is wrong.
    """
    check_arguments(topk, format_score)
    lookup = Lookup(await shared_retriever(retriever), topk, in_characters(max_document_chars, breaker(MARKERS)))
    dialogue = Dialogue(gold_answers(task.ground_truth, task.extra), lookup)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(max_turns):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        choice = response.choices[0]
        if choice.finish_reason == "length":
            break
        reply = choice.message
        messages.append(reply)
        if reply.tool_calls:
            texts = await dialogue.results([(call.function.name, call.function.arguments) for call in reply.tool_calls])
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": text}
                for call, text in zip(reply.tool_calls, texts, strict=True)
            ]
        elif (answer := dialogue.answer_in(reply.content or "")) is None:
            messages.append({"role": "user", "content": HINT})
        else:
            metrics = NOTHING_YET | dialogue.metrics(answer)
            match = metrics["exact_match"]
            return RewardResult(reward=match or format_score, accuracy=match, answer=answer, metrics=metrics)
    return RewardResult(reward=0.0, accuracy=0.0, metrics=NOTHING_YET | dialogue.metrics())
