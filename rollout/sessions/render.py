"""From messages to token ids: a whole conversation, or what comes after an answer that was sampled."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from configs.rollout import ReasoningHistory
from rollout.sessions.control_tokens import ControlTokens
from rollout.sessions.messages import Message, Role, ToolCall, ToolSpec
from rollout.sessions.template import ChatTemplate, Rendered, TemplateRefusalError
from rollout.sessions.verification import Mismatch, TokenIds, compare
from rollout.text_encoder import text_encoder

_ANSWER = "The answer between."
_REASONING = "The reasoning between."
_USER = Message(role=Role.user, content="The question before.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """An answer that a conversation goes on from, and all that came before it."""

    token_ids: TokenIds
    """Prompt and response. Only the last one is looked at."""
    ended: bool
    """Whether the response came to its end: an end token, or a stop string. Not where it was cut (length, abort)."""
    calls: tuple[ToolCall, ...] = ()
    """Of the answer: tool results are rendered with the names of their calls."""
    has_reasoning: bool = False
    """Whether an answer in the sequence has any."""
    reasoning_sent: bool = True
    """Whether the harness sent all of it back."""


class Renderer:
    """Renders conversations with the chat template of a transformers tokenizer.

    Tokenizers are not thread-safe, and rendering blocks: all calls belong into one thread that is not the event loop's,
    such as a `ThreadPoolExecutor(max_workers=1)` for each tokenizer.

    Example:
        prompt = renderer.full([user])                              # <user>2 + 2?<end><assistant>
        parent = Parent(token_ids=[*prompt, *sampled], ended=True)  # ... + 4<end>
        prompt = [*parent.token_ids, *renderer.bridge(parent, [another_user])]
    """

    def __init__(
        self, tokenizer: Any, *, history: ReasoningHistory = ReasoningHistory.keep, stop_token_ids: Sequence[int] = ()
    ):
        """`stop_token_ids`: more end tokens, such as those of the model's generation config.

        Raises:
            ValueError: the tokenizer has no special tokens, or no chat template for text; or a stop token is an
                ordinary token.
        """
        if not isinstance(tokenizer.chat_template, str):
            given = "none" if tokenizer.chat_template is None else f"several: {sorted(tokenizer.chat_template)}"
            raise ValueError(f"sessions need a tokenizer with one chat template, this one has {given}")
        self._tokenizer = tokenizer
        self._encode = text_encoder(tokenizer)
        self._history = history
        self._control_tokens = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, self._control_tokens)
        if _USER.content not in self._template.render([_USER], generation_prompt=True).text:
            raise ValueError("the chat template does not show a user's message whose content is a string")
        ends = {} if tokenizer.eos_token is None else {tokenizer.eos_token_id: tokenizer.eos_token}
        ends |= {token_id: _added_token(tokenizer, token_id) for token_id in stop_token_ids}
        self._ends: dict[int, str] = ends | {self._control_tokens.ids[text]: text for text in self._template_ends()}

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn, ascending: end of sequence, and what the template writes after an answer.

        They are the stop tokens of sampling. Where the template writes no end token (GLM), the token of the next role
        ends a turn.
        """
        return tuple(sorted(self._ends))

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return len(self._tokenizer)

    def full(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a whole conversation with a generation prompt: the first prompt of a sequence.

        Raises:
            TemplateRefusalError, ValueError: as `ChatTemplate.render` does.
        """
        rendered = self._template.render(messages, tools, options, generation_prompt=True)
        return self._control_tokens.encode(rendered.text, rendered.mark)

    def answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids with which the model would say the last of the messages, an assistant's, after a prompt of those
        before it: what the template writes of it, up to the token that ends its turn, or with the one that would.

        Raises:
            TemplateRefusalError: the template does not write the message after its generation prompt, leaves out its
                calls, or writes nothing that would end it.
            ValueError: as `ChatTemplate.render` does.
        """
        *before, message = messages
        asked = self._template.render(before, tools, options, generation_prompt=True)
        told = self._template.render(messages, tools, options, generation_prompt=False)
        prompt = asked.text.replace(asked.mark, told.mark) if asked.mark else asked.text
        if not told.text.startswith(prompt):
            raise TemplateRefusalError(
                "the chat template does not write the assistant's message after its generation prompt"
            )
        said = told.text[len(prompt) :]
        if any(call.name not in said for call in message.tool_calls):
            raise TemplateRefusalError("the chat template does not write the calls of the assistant's message")
        following = Message(role=Role.tool, call_id=message.tool_calls[0].call_id) if message.tool_calls else _USER
        if (end := self._end_before(following, message.tool_calls) or self._control_tokens.last(said)) is None:
            raise TemplateRefusalError("the chat template writes no token that ends the assistant's message")
        said = said[: said.rindex(end)] if end in said else said
        return self._control_tokens.encode_after(end, said, told.mark) + [self._control_tokens.ids[end]]

    def bridge(
        self,
        parent: Parent,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """Token ids that follow the parent's: the rest of its turn, the new messages, a generation prompt.

        They are what the template writes after the end token of an answer, in a short conversation of a question, an
        answer with reasoning, and the new messages. So the work does not grow with the history.

        Returns:
            None where the parent cannot be extended: it did not come to its end, it ended on a token that the template
            does not write there (gpt-oss: `<|return|>` before a user's turn), the template does not render the messages
            after an answer, or reasoning would have to go (`ReasoningHistory.strip`). The conversation is then rendered
            in `full`.

        Raises:
            ValueError: as `ChatTemplate.render` does for options.
        """
        if not parent.ended or len(parent.token_ids) == 0:
            return None
        neighbours = self._neighbours(parent.calls, messages, tools, options)
        if neighbours is None or (
            self._history is ReasoningHistory.strip
            and parent.has_reasoning
            and not (parent.reasoning_sent and neighbours.shows_reasoning)
        ):
            return None
        end, mark = self._ends.get(parent.token_ids[-1]), neighbours.mark
        if end is None:  # a stop string: the turn has to be ended
            missing = self._control_tokens.last(neighbours.turn_end)
            start = neighbours.turn_end.rindex(missing) if missing else len(neighbours.turn_end)
            return self._control_tokens.encode(neighbours.after_answer[start:], mark)
        if end in neighbours.turn_end:
            start = neighbours.turn_end.rindex(end)
        elif neighbours.next_turn.startswith(end):
            start = len(neighbours.turn_end)
        else:
            return None
        return self._control_tokens.encode_after(end, neighbours.after_answer[start + len(end) :], mark)

    def extend(self, prompt_ids: TokenIds, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Token ids of a prompt with more messages before its generation prompt, where nothing was sampled yet.

        As in `bridge` the messages are rendered after a short question, whatever the prompt is.

        Raises:
            ValueError: the prompt does not end with the template's generation prompt, or the template does not write
                the messages after what a user said.
        """
        alone = self._template.render([_USER], tools, generation_prompt=False).text
        asked = self._template.render([_USER], tools, generation_prompt=True).text
        both = self._template.render([_USER, *messages], tools, generation_prompt=True)
        following = both.text.removeprefix(alone)
        if following == both.text or self._control_tokens.at_start(following) is None:
            roles = [message.role.value for message in messages]
            raise ValueError(f"the chat template does not add messages of {roles} to a user's")
        before, generation_prompt = list(prompt_ids), self._control_tokens.encode(asked.removeprefix(alone))
        end = len(before) - len(generation_prompt)
        if before[end:] != generation_prompt:
            raise ValueError(
                "the prompt does not end with the generation prompt of the chat template, which messages come before; "
                "set data.chat_template=true"
            )
        return [*before[:end], *self._control_tokens.encode(following, both.mark)]

    def shows_reasoning(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether the template shows the reasoning of an answer that these messages follow."""
        neighbours = self._neighbours((), messages, tools, options)
        return neighbours is not None and neighbours.shows_reasoning

    def check(
        self,
        token_ids: TokenIds,
        sampled: Sequence[tuple[int, int]],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Mismatch | None:
        """Compare a prompt that was bridged with a render of all its messages, outside the `sampled` spans.

        The cost grows with the history: `is_check_due` says when it is worth it.

        Raises:
            TemplateRefusalError, ValueError: as `ChatTemplate.render` does.
        """
        return compare(token_ids, sampled, self.full(messages, tools, options), self.text)

    def plain(self, text: str) -> list[int]:
        """Token ids of a text with no template around it, as of a prompt for plain completion. Control tokens count."""
        return self._encode(text)

    def text(self, token_ids: TokenIds) -> str:
        """What the tokens say, special tokens included."""
        return self._tokenizer.decode(
            list(map(int, token_ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def answer_text(self, response_ids: TokenIds) -> str:
        """What a response says without the token that ended it: the text that parsers read."""
        ended = len(response_ids) > 0 and response_ids[-1] in self._ends
        return self.text(response_ids[:-1] if ended else response_ids)

    def _neighbours(
        self,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> "_Neighbours | None":
        """A short conversation with the messages and without them; None if the template does not render that."""
        answer = Message(
            role=Role.assistant,
            content=_ANSWER,
            reasoning=_REASONING,
            tool_calls=tuple(_calls_before(messages, calls)),
        )
        try:
            alone = self._template.render([_USER, answer], tools, options, generation_prompt=False)
            both = self._template.render([_USER, answer, *messages], tools, options, generation_prompt=True)
        except TemplateRefusalError:
            return None
        return self._compared(alone.text, both)

    def _compared(self, alone: str, both: Rendered) -> "_Neighbours | None":
        """From the texts without and with the messages. None if the answer is not found in both."""
        last = alone.count(_ANSWER)
        before, *others = both.text.split(_ANSWER, last)
        if not last or len(others) < last:
            return None
        expected, after_answer = alone.rpartition(_ANSWER)[2], others[-1]
        turn_end = expected
        if end_depends := not after_answer.startswith(expected):
            same = commonprefix([expected, after_answer])
            control_token = self._control_tokens.last(same)
            turn_end = "".join(same.rpartition(control_token)[:2]) if control_token else ""
        return _Neighbours(
            turn_end=turn_end,
            next_turn=after_answer.removeprefix(turn_end),
            end_depends=end_depends,
            mark=both.mark,
            shows_reasoning=_REASONING in before,
        )

    def _template_ends(self) -> Iterator[str]:
        """The control tokens that end an answer before a user's turn and before a tool's."""
        for role in (Role.user, Role.tool):
            message = Message(role=role, content="What comes next.", call_id="call" if role is Role.tool else None)
            end = self._end_before(message)
            if end is not None:
                yield end

    def _end_before(self, message: Message, calls: Sequence[ToolCall] = ()) -> str | None:
        """The control token that ends an answer, with these calls, before the message; None where that depends."""
        neighbours = self._neighbours(calls, [message])
        if neighbours is None or neighbours.end_depends:
            return None
        written, following = neighbours.turn_end, neighbours.next_turn
        return self._control_tokens.last(written) or self._control_tokens.at_start(following)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Neighbours:
    """What a template writes around new messages that follow an answer."""

    turn_end: str
    """After the answer's own text: an end token with a separator, say."""
    next_turn: str
    """After that: the new messages and the generation prompt."""
    end_depends: bool
    """Whether the last answer of a conversation ends differently. `turn_end` then has what is always written: Phi-3
    appends the end of the sequence, Gemma 4 goes on with the results of tools in the same turn."""
    mark: str
    """What breaks the control tokens in the contents of `next_turn`."""
    shows_reasoning: bool
    """Whether the answer is rendered with its reasoning."""

    @property
    def after_answer(self) -> str:
        return self.turn_end + self.next_turn


def _added_token(tokenizer: Any, token_id: int) -> str:
    added = tokenizer.added_tokens_decoder
    if token_id not in added:
        raise ValueError(f"stop_token_ids has {token_id}, which is none of the added tokens {sorted(added)}")
    return added[token_id].content


def _calls_before(messages: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
    """The calls whose results the messages begin with. Their arguments end with the text that is looked for."""
    names = {call.call_id: call.name for call in calls}
    for result in takewhile(lambda message: message.role is Role.tool, messages):
        call_id = result.call_id or ""
        yield ToolCall(call_id=call_id, name=names.get(call_id, "tool"), arguments=f'{{"value": "{_ANSWER}"}}')
