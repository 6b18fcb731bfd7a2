"""Search as a harness over the SDK of OpenAI: the chat form, for a run whose episodes go through sessions.

rollout.agent=rollout.search.harness:agent
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rollout.rewards.base import RewardResult
from rollout.search.chat import HINT, MARKERS, SPEC, Dialogue
from rollout.search.documents import Retriever
from rollout.search.episodes import NOTHING_YET, check_arguments
from rollout.search.escape import breaker
from rollout.search.lookup import Lookup
from rollout.search.shared import shared_retriever
from rollout.search.shorten import in_characters
from rollout.sessions.harness import HarnessTask

TOOL = {"type": "function", "function": asdict(SPEC)}


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
    `max_turns`, or whose answer a limit has cut off, has reward 0. Raises RetrievalError, for which it has none, and
    ValueError for an argument that is wrong.

    `client`: an openai.AsyncOpenAI of this episode. The other arguments are those of rollout.agent_args; a `retriever`
    is made once for all episodes.
    """
    check_arguments(topk, format_score)
    shorten = in_characters(max_document_chars, breaker(MARKERS))
    dialogue = Dialogue.of(task, Lookup(await shared_retriever(retriever), topk, shorten))
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for _ in range(max_turns):
        response = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        choice = response.choices[0]
        if choice.finish_reason == "length":
            break
        said = choice.message
        messages.append(said)
        if said.tool_calls:
            calls = [(call.function.name, call.function.arguments) for call in said.tool_calls]
            texts = await dialogue.results(calls)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": text}
                for call, text in zip(said.tool_calls, texts, strict=True)
            ]
        elif (answer := dialogue.answer_in(said.content or "")) is None:
            messages.append({"role": "user", "content": HINT})
        else:
            return _result(dialogue, answer, format_score)
    return _result(dialogue, None, 0.0)


def _result(dialogue: Dialogue, answer: str | None, at_least: float) -> RewardResult:
    metrics = NOTHING_YET | dialogue.metrics(answer)
    match = metrics["exact_match"]
    return RewardResult(reward=match or at_least, accuracy=match, answer=answer, metrics=metrics)
