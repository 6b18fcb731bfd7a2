"""Conversations as token sequences that a policy could have sampled: what supervised fine-tuning learns from.

Who said a token decides whether it is learned. The answers are what the chat template writes of the assistant's
messages, encoded by themselves; all else comes from the renderer of sessions, so that a policy that has learned the
sequences reads the same tokens in a rollout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from configs.data import HiddenReasoning
from configs.rollout import ReasoningHistory
from rollout.chat.messages import Message, Role, ToolSpec
from rollout.chat.render import Parent, Renderer, WrittenAnswer
from rollout.chat.template import TemplateRefusalError
from rollout.data.conversations import Conversation
from rollout.data.sources import DataError
from rollout.types import Prompt, TokenSequence, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """The conversations as training data."""

    groups: list[TrajectoryGroup]
    """One for each conversation, of one trajectory, whose loss mask is true where a token is learned. Their ordinals
    are the numbers of the conversations."""
    num_too_long: int
    num_without_reasoning: int = 0
    """The answers whose reasoning is not learned, because the chat template does not show it."""
    num_trimmed: int = 0
    """The answers that are learned without white space at their ends, which the chat template leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrated:
    """The sequences in which a conversation's answers are learned, each answer in one of them."""

    sequences: tuple[TokenSequence, ...]
    num_without_reasoning: int
    num_trimmed: int


def demonstrations(
    tokenizer: Any,
    conversations: Sequence[Conversation],
    history: ReasoningHistory,
    max_tokens: int,
    hidden_reasoning: HiddenReasoning = HiddenReasoning.refuse,
) -> Demonstrations:
    """Turn conversations into demonstrations. One with a sequence of more than `max_tokens` tokens is left out, whole.

    Args:
        tokenizer: of transformers.
        hidden_reasoning: the treatment of reasoning that the chat template does not show.

    Raises:
        ValueError: the tokenizer has no chat template that sessions could use.
        DataError: a conversation that the template does not render; it names its place.
    """
    renderer = Renderer(tokenizer, history=history)
    groups: list[TrajectoryGroup] = []
    num_too_long = num_without_reasoning = num_trimmed = 0
    for number, conversation in enumerate(conversations):
        try:
            learned = demonstrated(renderer, conversation, hidden_reasoning)
        except ValueError as error:
            raise DataError(f"{conversation.place}: {error}") from error
        num_without_reasoning += learned.num_without_reasoning
        num_trimmed += learned.num_trimmed
        if max(len(sequence.token_ids) for sequence in learned.sequences) > max_tokens:
            num_too_long += 1
        else:
            groups.append(_group(number, learned.sequences, conversation.place))
    return Demonstrations(
        groups=groups, num_too_long=num_too_long, num_without_reasoning=num_without_reasoning, num_trimmed=num_trimmed
    )


def demonstrated(
    renderer: Renderer, conversation: Conversation, hidden_reasoning: HiddenReasoning = HiddenReasoning.refuse
) -> Demonstrated:
    """Return the sequences in which the conversation's answers are learned.

    One sequence while what follows an answer can be appended to it. Where the template writes the history anew, as
    Qwen3's does without the reasoning of earlier turns under `ReasoningHistory.strip`, the next answer begins another.
    So does the answer after one that is not learned and that the template writes only as history, such as DeepSeek's
    one without reasoning.

    Raises:
        ValueError: the template does not render it, or leaves out what it says.
    """
    messages, tools = list(conversation.messages), conversation.tools
    renderer.refuse_hidden(messages, tools)
    sequences: list[_Growing] = []
    prompt_start, has_reasoning, goes_on = 0, False, False
    num_without_reasoning = num_trimmed = 0
    for number, message in enumerate(conversation.messages):
        if message.role is not Role.assistant:
            continue
        is_learned = number in conversation.learned
        try:
            written, messages[number] = _written(renderer, messages[: number + 1], tools, hidden_reasoning)
        except TemplateRefusalError:
            if is_learned or not renderer.is_shown(messages[: number + 1], tools):
                raise
            goes_on = False  # the policy reads it, and never said it so: the next answer begins a sequence
            continue
        num_without_reasoning += is_learned and messages[number] != message
        num_trimmed += is_learned and written.is_trimmed
        between = None
        if goes_on:
            calls = messages[prompt_start - 1].tool_calls
            parent = Parent(token_ids=sequences[-1].token_ids, ended=True, calls=calls, has_reasoning=has_reasoning)
            between = renderer.bridge(parent, messages[prompt_start:number], tools)
        if between is None:
            sequences.append(_Growing(renderer.full(messages[:number], tools)))
        else:
            sequences[-1].add(between, is_learned=False)
        sequences[-1].add(written.token_ids, is_learned=is_learned)
        prompt_start, has_reasoning, goes_on = number + 1, has_reasoning or bool(messages[number].reasoning), True
    return Demonstrated(
        sequences=tuple(growing.sequence() for growing in sequences if any(growing.is_learned)),
        num_without_reasoning=num_without_reasoning,
        num_trimmed=num_trimmed,
    )


def _written(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec], hidden_reasoning: HiddenReasoning
) -> tuple[WrittenAnswer, Message]:
    """Return the last message, an assistant's, as the template writes it, and as much of it as that says."""
    *before, message = messages
    try:
        return renderer.answer(messages, tools), message
    except TemplateRefusalError as error:
        if not message.reasoning:
            raise
        rest = replace(message, reasoning=None)
        try:
            written = renderer.answer([*before, rest], tools)
        except TemplateRefusalError:
            raise error from None  # the reasoning is not what it is about
        if hidden_reasoning is HiddenReasoning.refuse:
            raise TemplateRefusalError(
                f"{error}; it writes the message without its reasoning, which sft.hidden_reasoning=drop learns"
            ) from error
        return written, rest


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
        """Return the sequence up to the last token that is learned."""
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
