"""The environment: the other side of a conversation, or a tool."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np

from rollout.chat.messages import Message, ToolCall
from rollout.types import IntArray

Observation = str | Sequence[Message]
"""The text or messages that the policy reads next. A text is taken as it is, with everything around it that the chat
template wants; special tokens count. Messages are written by the chat template."""


class Turn(str):
    """The text that the policy wrote in one turn, decoded without control tokens, and what belongs to it.

    Example: turn == "<think>easy</think>4", turn.reasoning == "easy", turn.content == "4"
    """

    token_ids: IntArray
    """[T] as they were sampled."""
    content: str
    """The text, without reasoning and tool calls where the loop has a parser."""
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...] | None
    """None where the loop has no parser."""
    recorded: str | None = None
    """In an episode that runs again: what the policy read after this turn the first time, decoded without control
    tokens. It reads that again, whatever the step's observation: an expensive or changing lookup can be left out. The
    step's other fields count as ever."""

    @classmethod
    def of(
        cls,
        text: str,
        token_ids: IntArray | None = None,
        message: Message | None = None,
        recorded: str | None = None,
    ) -> Self:
        """Make a turn. `message` is what a parser read in it."""
        turn = cls(text)
        turn.recorded = recorded
        turn.token_ids = np.empty(0, np.int32) if token_ids is None else token_ids
        turn.content = text if message is None else message.content
        turn.reasoning = None if message is None else message.reasoning
        turn.tool_calls = None if message is None else message.tool_calls
        return turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer to one turn of the policy.

    Example: Step(observation="\\n= 12\\n"), then Step(done=True, reward=1.0)
    """

    observation: Observation = ""
    done: bool = False
    reward: float | None = None
    """Summed over the episode. If no step gives one, rollout.reward scores what the policy said."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each name in an episode is logged as agent/<name>, the mean over the trajectories of a step."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """The same, but summed over the episode."""


class Environment(Protocol):
    """The environment of one episode. It may be async, or have plain methods. These run in threads. With
    rollout.tools_run_in=process, an environment that has any is pickled before its `reset`, and lives in a process of
    its own until its episode ends; so does one that has `has_plain_methods = True`.

    It may have two more methods, async or plain:

    - `reset() -> Observation` is called before the first turn. It returns what the policy reads after its prompt; "" is
      nothing more. Messages come before the generation prompt.
    - `close()` is called at the end, however the episode ended: also when it failed, or was cancelled.
    """

    def step(self, turn: Turn, /) -> Step | Awaitable[Step]: ...
