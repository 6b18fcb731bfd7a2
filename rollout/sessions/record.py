"""What is kept of a session that nobody trains: a file of JSON that says what was asked, answered and sampled."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from rollout.sessions.generation import Generation
from rollout.sessions.messages import Message, ToolSpec
from rollout.sessions.sequences import rows
from rollout.sessions.session import Session
from rollout.types import FloatArray, TokenSequence


class Ending(Enum):
    finished = "finished"
    """Its harness said so."""
    aborted = "aborted"
    """Its harness said so, or a client of the control routes aborted an answer of it."""
    timed_out = "timed_out"
    """Its harness took too long, or went away: sessions.timeout_s, sessions.idle_timeout_s."""
    unfinished = "unfinished"
    """The server ended before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One answer of the policy. Those before it are found by `parent`."""

    id: str
    """As clients get it, without the prefix of their dialect."""
    parent: str | None
    """The answer that it goes on from; null begins a conversation."""
    messages: list[dict[str, Any]]
    """What came since the parent's answer, in the form of OpenAI's chat."""
    answer: dict[str, Any] | None
    """Null where there is none: its client went away, or the session ended before it."""
    state: str
    """finished, cancelled or running."""
    finish: str | None
    """stop, length, tool_calls or abort."""
    cause: str | None
    """Why it is not simply the conversation so far with new messages: template, retoken, edit, compaction, retry,
    length or tools."""
    delivery: str
    """read, pending or lost: whether its client read it to the end."""
    sampling: dict[str, float]
    """What the request asked for, in place of the `sampling` of the session."""
    prompt_tokens: int
    sampled_tokens: int
    reward: float | None
    """Its own, beside that of the session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    """Tokens as the model read and sampled them: one sequence for a linear conversation, one more for every branch.
    Each sampled token is in the response of one of them."""

    messages: list[dict[str, Any]]
    """The conversation that it is, with its last answer, in the form of OpenAI's chat."""
    tools: list[dict[str, Any]]
    prompt_ids: list[int]
    response_ids: list[int]
    """Answers, and between them what the model read."""
    loss_mask: list[int]
    """Per token of the response: 1 where the policy sampled it."""
    rollout_logprobs: list[float]
    """Per token of the response: of the distribution that it was sampled from, 0 where it was not sampled."""
    versions: list[tuple[int, int, int]]
    """[start, end, global_steps] of the sampled response tokens."""
    turn_rewards: list[tuple[int, float, int]]
    """[end, reward, number] of the answers, where any has a reward of its own; `number` rewarded ones precede it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    id: str
    ending: str
    """finished, aborted, timed_out or unfinished."""
    task: Mapping[str, Any]
    """What it was opened with."""
    model: str
    sampling: Mapping[str, Any]
    """Where requests asked for nothing else."""
    began: float
    """In seconds since the epoch, as `ended`."""
    ended: float
    reward: float | None
    """All that was posted, those of answers included; null if nothing was."""
    metrics: Mapping[str, float]
    """Posted with rewards."""
    limit: str | None
    """The limit that it reached."""
    answers: list[RecordedAnswer]
    """In the order in which they began."""
    sequences: list[RecordedSequence]
    """Of the finished answers."""

    def to_json(self) -> bytes:
        """A line for each field. Half of a surrogate pair, which UTF-8 cannot hold, is written as JSON's own escape."""
        values = asdict(self)
        lines = (f"{json.dumps(one.name)}: {_json(values[one.name])}" for one in fields(self))
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8", "backslashreplace")


def recorded_answers(session: Session) -> list[RecordedAnswer]:
    transcript = session.transcript
    return [
        RecordedAnswer(
            id=transcript.names.answer_id(one.number),
            parent=None if one.parent is None else transcript.names.answer_id(one.parent),
            messages=[chat_message(message) for message in one.messages],
            answer=None if one.answer is None else chat_message(one.answer),
            state=one.state.value,
            finish=None if one.finish is None else one.finish.value,
            cause=None if one.cause is None else one.cause.value,
            delivery=one.delivery.value,
            sampling=dict(one.sampling),
            prompt_tokens=len(one.prompt_ids),
            sampled_tokens=one.completion.num_tokens,
            reward=transcript.rewards.turns.get(one.number),
        )
        for one in transcript.generations
    ]


def recorded_sequences(session: Session) -> list[RecordedSequence]:
    transcript = session.transcript
    both = zip(rows(transcript.generations), transcript.sequences(), strict=True)
    return [_sequence(session, row, sequence) for row, sequence in both]


def _sequence(session: Session, row: list[Generation], sequence: TokenSequence) -> RecordedSequence:
    return RecordedSequence(
        messages=[chat_message(message) for message in session.transcript.history(row[-1].number)],
        tools=[_tool(tool) for tool in row[-1].tools],
        prompt_ids=sequence.prompt_ids.tolist(),
        response_ids=sequence.response_ids.tolist(),
        loss_mask=[int(each) for each in sequence.loss_mask],
        rollout_logprobs=_shortest(sequence.rollout_logprobs),
        versions=[(span.start, span.end, span.global_steps) for span in sequence.spans],
        turn_rewards=[(turn.end, turn.reward, turn.number) for turn in sequence.turn_rewards],
    )


def chat_message(message: Message) -> dict[str, Any]:
    """As OpenAI's chat has it, and with `reasoning_content` as most servers do."""
    found: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    return found


def _tool(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _shortest(numbers: FloatArray) -> list[float]:
    """With as few digits as tell each float32 from the next."""
    return [float(str(number)) for number in numbers]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=dict)
