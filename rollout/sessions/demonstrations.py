"""Conversations as token sequences that a policy could have sampled: what supervised fine-tuning learns from.

Who said a token decides whether it is learned. The answers are what the chat template writes of the assistant's
messages, encoded by themselves; all else comes from the renderer of sessions, so that a policy that has learned the
sequences reads the same tokens in a rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from configs.rollout import ReasoningHistory
from rollout.data.conversations import Conversation
from rollout.data.sources import DataError
from rollout.sessions.messages import Role
from rollout.sessions.render import Parent, Renderer
from rollout.types import Prompt, TokenSequence, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What is learned, and what was left out."""

    groups: list[TrajectoryGroup]
    """One for each conversation, of one trajectory, whose loss mask is true where a token is learned. Their ordinals
    are the numbers of the conversations."""
    num_too_long: int


def demonstrations(
    tokenizer: Any, conversations: Sequence[Conversation], history: ReasoningHistory, max_tokens: int
) -> Demonstrations:
    """Turn conversations into demonstrations. One with a sequence of more than `max_tokens` tokens is left out, whole.

    Args:
        tokenizer: of transformers.

    Raises:
        ValueError: the tokenizer has no chat template that sessions could use.
        DataError: a conversation that the template does not render; it names its place.
    """
    renderer = Renderer(tokenizer, history=history)
    groups: list[TrajectoryGroup] = []
    num_too_long = 0
    for number, conversation in enumerate(conversations):
        try:
            sequences = demonstrated(renderer, conversation)
        except ValueError as error:
            raise DataError(f"{conversation.place}: {error}") from error
        if max(len(sequence.token_ids) for sequence in sequences) > max_tokens:
            num_too_long += 1
        else:
            groups.append(_group(number, sequences, conversation.place))
    return Demonstrations(groups=groups, num_too_long=num_too_long)


def demonstrated(renderer: Renderer, conversation: Conversation) -> tuple[TokenSequence, ...]:
    """Return the sequences in which the conversation's answers are learned, each answer in one of them.

    One sequence while what follows an answer can be appended to it. Where the template writes the history anew, as
    Qwen3's does without the reasoning of earlier turns under `ReasoningHistory.strip`, the next answer begins another.

    Raises:
        ValueError: the template does not render it.
    """
    messages, tools = conversation.messages, conversation.tools
    found: list[_Growing] = []
    asked_from, has_reasoning = 0, False
    for number, message in enumerate(messages):
        if message.role is not Role.assistant:
            continue
        between = None
        if found:
            calls = messages[asked_from - 1].tool_calls
            parent = Parent(token_ids=found[-1].token_ids, ended=True, calls=calls, has_reasoning=has_reasoning)
            between = renderer.bridge(parent, messages[asked_from:number], tools)
        if between is None:
            found.append(_Growing(renderer.full(messages[:number], tools)))
        else:
            found[-1].add(between, is_learned=False)
        found[-1].add(renderer.answer(messages[: number + 1], tools), is_learned=number in conversation.learned)
        asked_from, has_reasoning = number + 1, has_reasoning or message.reasoning is not None
    return tuple(growing.sequence() for growing in found if any(growing.is_learned))


@dataclass
class _Growing:
    """A sequence to which turns are appended."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    is_learned: list[bool] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.response]

    def add(self, token_ids: Sequence[int], *, is_learned: bool) -> None:
        self.response += token_ids
        self.is_learned += [is_learned] * len(token_ids)

    def sequence(self) -> TokenSequence:
        """Without what follows the last token that is learned."""
        end = len(self.is_learned) - self.is_learned[::-1].index(True)
        return TokenSequence(
            prompt_ids=np.array(self.prompt, np.int32),
            response_ids=np.array(self.response[:end], np.int32),
            loss_mask=np.array(self.is_learned[:end], np.bool_),
            rollout_logprobs=np.zeros(end, np.float32),
            spans=(),
        )


def _group(number: int, sequences: tuple[TokenSequence, ...], place: str) -> TrajectoryGroup:
    prompt = Prompt(ordinal=number, text="", token_ids=(), ground_truth="", extra={"place": place})
    return TrajectoryGroup(
        prompt=prompt,
        trajectories=(Trajectory(sequences=sequences, reward=0.0, finish_reason="stop", text="", replica=""),),
    )
