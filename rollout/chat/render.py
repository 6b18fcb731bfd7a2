"""Rendering: messages become token ids, as a whole conversation or as what comes after an answer that was sampled.

What a template writes around a turn is found out by rendering short conversations with it. So every template will do,
also one that a checkpoint was trained with in place of its base model's.

The library `renderers` (tried: 0.1.12) is not used. It has the templates of some 25 families rewritten in Python, and
chooses one by the exact name of a model on the hub: for a model in a folder it falls back to a renderer that never
bridges, so all of this would be needed beside it. Chosen by hand, its renderers do not read the checkpoint's own
template (Llama 3.2's date differs), and they let contents write control tokens. It requires openai-harmony, which
downloads gpt-oss's vocabulary, and would overwrite the module that vLLM installs as oss-harmony.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from os.path import commonprefix
from typing import Any

from configs.rollout import ReasoningHistory
from rollout.chat.control_tokens import ControlTokens
from rollout.chat.generation_config import configured_end_ids
from rollout.chat.messages import Message, Role, ToolCall, ToolSpec
from rollout.chat.parsing import leaves_reasoning_open
from rollout.chat.shown import hidden_context, hidden_parts
from rollout.chat.template import ChatTemplate, TemplateRefusalError
from rollout.chat.text_encoder import text_encoder
from rollout.chat.verification import Cause, TokenIds, mismatch

_ANSWER = "The answer between."
_REASONING = "The reasoning between."
_LAST = "What was said last."
_USER = Message(role=Role.user, content="The question before.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """An answer that a conversation goes on from, and all that came before it."""

    token_ids: TokenIds
    """Prompt and response. Only the last token is looked at."""
    ended: bool
    """True where the response came to its end, by an end token or a stop string; false where it was cut."""
    calls: tuple[ToolCall, ...] = ()
    """The answer's calls: templates show the results of tools with the names of their calls."""
    has_reasoning: bool = False
    """True where any answer in the sequence has reasoning."""
    reasoning_sent: bool = True
    """True where the harness sent all of the reasoning back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """An assistant's message as the template writes it."""

    token_ids: list[int]
    """The last of them ends the turn, and no other does."""
    text: str
    is_trimmed: bool
    """True where the template leaves out white space at the ends of the content."""


class Renderer:
    """Renders conversations with the chat template of a transformers tokenizer.

    Tokenizers are not thread-safe, and rendering blocks: make all calls in one thread that is not the event loop's,
    such as a `ThreadPoolExecutor(max_workers=1)` for each tokenizer.

    Example:
        prompt = renderer.full([user])                              # <user>2 + 2?<end><assistant>
        parent = Parent(token_ids=[*prompt, *sampled], ended=True)  # ... + 4<end>
        prompt = [*parent.token_ids, *renderer.bridge(parent, [another_user])]
    """

    def __init__(self, tokenizer: Any, *, history: ReasoningHistory = ReasoningHistory.keep):
        """Try the template on a few short conversations.

        Args:
            tokenizer: A tokenizer of transformers.
            history: What happens to old reasoning that the harness or the template drops.

        Raises:
            ValueError: The tokenizer has no special tokens, or no chat template for text; or the generation config
                beside it names end tokens that are none.
        """
        if not isinstance(tokenizer.chat_template, str):
            have = "none" if tokenizer.chat_template is None else f"several: {sorted(tokenizer.chat_template)}"
            raise ValueError(f"sessions need a tokenizer with one chat template, this one has {have}")
        self._tokenizer = tokenizer
        self._history = history
        self._control_tokens = ControlTokens(tokenizer)
        self._template = ChatTemplate(tokenizer, self._control_tokens)
        if _USER.content not in self._template.render([_USER], generation_prompt=True).text:
            raise ValueError("the chat template does not show a user's message whose content is a string")
        texts = {token_id: text for text, token_id in self._control_tokens.ids.items()}
        ends = [*configured_end_ids(tokenizer), *(self._control_tokens.ids[text] for text in self._template_ends())]
        self._ends: dict[int, str | None] = {token_id: texts.get(token_id) for token_id in ends}
        self.end_token_ids = tuple(sorted(self._ends))
        """The tokens that end a turn: those of the tokenizer and of the generation config, and what the template writes
        after an answer.

        They are the stop tokens of sampling. Where the template writes no end token (GLM's), the token of the next role
        ends a turn.
        """
        self.vocab_size = len(tokenizer)
        """The number that every token id is below."""
        self.plain = text_encoder(tokenizer)
        """The encoding of a text without the template, as of a prompt for plain completion. Control tokens count."""

    def full(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of a whole conversation with a generation prompt: the first prompt of a sequence.

        Raises:
            TemplateRefusalError, ValueError: As `ChatTemplate.render`.
        """
        rendered = self._template.render(messages, tools, options, generation_prompt=True)
        return self._control_tokens.encode(rendered.text, rendered.mark)

    def answer(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> "WrittenAnswer":
        """Return the token ids with which the model would say the last message, an assistant's, after the others.

        They are what the template writes after its generation prompt, up to and with the first token that ends a turn.

        Raises:
            TemplateRefusalError: The template does not write the message after its generation prompt, leaves out or
                changes a part of it, or writes nothing that would end it.
            ValueError: As `ChatTemplate.render`.
        """
        answer, mark = self._answer_text(messages, tools)
        message = messages[-1]
        text = answer.replace(mark, "") if mark else answer
        if hidden := hidden_parts(message, text):
            parts = " and the ".join(hidden)
            raise TemplateRefusalError(
                f"the chat template leaves out or changes the {parts} of the assistant's message"
            )
        answer, end = self._cut_at_end(answer, message.tool_calls)
        token_ids = self._control_tokens.encode_after(end, answer, mark) + [self._control_tokens.ids[end]]
        return WrittenAnswer(token_ids=token_ids, text=text, is_trimmed=message.content not in text)

    def refuse_hidden(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> None:
        """Refuse a conversation of which the template leaves out what others than the assistant say, or the tools.

        Raises:
            TemplateRefusalError: The template leaves something out, or does not render the messages.
        """
        rendered = self._template.render(messages, tools, generation_prompt=False)
        if hidden := hidden_context(messages, tools, rendered.plain):
            raise TemplateRefusalError(
                f"the chat template leaves out or changes {hidden[0]}: the policy would not read it"
            )

    def is_shown(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
        """Return whether the template shows all that the last message, an assistant's, says, also where it does not
        write it after its generation prompt.

        Raises:
            TemplateRefusalError: The template does not render the messages.
        """
        return not hidden_parts(messages[-1], self._template.render(messages, tools, generation_prompt=False).plain)

    def _answer_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[str, str]:
        """Return the text that the template writes for the last message after its generation prompt, and the mark in
        it."""
        *before, message = messages
        prompt = self._template.render(before, tools, generation_prompt=True)
        whole = self._template.render(messages, tools, generation_prompt=False)
        text = prompt.text.replace(prompt.mark, whole.mark) if prompt.mark else prompt.text
        if whole.text.startswith(text):
            return whole.text[len(text) :], whole.mark
        if (answer := self._after_other_history(messages, tools)) is None:
            raise TemplateRefusalError(_not_after(text, whole.text, message))
        return answer

    def _after_other_history(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[str, str] | None:
        """Return the same where the message changes how the template writes those before it.

        Without its reasoning gpt-oss's shows a call as soon as an answer without calls follows. The message is then
        what stands after the generation prompt behind the last of the others, at the place up to which it makes no
        difference what the message says.
        """
        *earlier, last, message = messages if len(messages) > 1 else [_USER, *messages]
        before = [*earlier, replace(last, content=_LAST)]
        other = replace(message, content=_ANSWER, reasoning=None)
        ends = [self._template.render(before, tools, generation_prompt=flag).text for flag in (False, True)]
        whole, changed = (
            self._template.render([*before, end], tools, generation_prompt=False) for end in (message, other)
        )
        generation_prompt = ends[1].removeprefix(ends[0])
        same = commonprefix([whole.text, changed.text])
        start = same.rfind(generation_prompt)
        if not generation_prompt or generation_prompt == ends[1] or start < same.rfind(_LAST) or _LAST not in same:
            return None
        return whole.text[start + len(generation_prompt) :], whole.mark

    def _cut_at_end(self, answer: str, calls: Sequence[ToolCall]) -> tuple[str, str]:
        """Return an answer up to the first token that ends a turn, and this token."""
        ends = {text for text in self._ends.values() if text is not None}
        for start, token in self._control_tokens.at_end(answer):
            if token in ends:
                return answer[:start], token
        following = Message(role=Role.tool, call_id=calls[0].call_id) if calls else _USER
        if (end := self._end_before(following, calls)) is None:
            raise TemplateRefusalError("the chat template writes no token that ends the assistant's message")
        return answer, end

    def bridge(
        self,
        parent: Parent,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int] | None:
        """Return the token ids that follow the parent's: the rest of its turn, the new messages, a generation prompt.

        They are what the template writes after the end token of an answer, in a short conversation of a question, an
        answer with reasoning, and the new messages. So the work does not grow with the history.

        Returns:
            None where the parent cannot be extended: it did not come to its end, it ended on a token that the template
            does not write there (gpt-oss: `<|return|>` before a user's turn), the template does not render the messages
            after an answer, or reasoning would have to go (`ReasoningHistory.strip`). The conversation is then rendered
            in `full`.

        Raises:
            ValueError: As `ChatTemplate.render` for options.
        """
        if not parent.ended or len(parent.token_ids) == 0:
            return None
        border = self._border(parent.calls, messages, tools, options)
        if border is None:
            return None
        if self._history is ReasoningHistory.strip:
            stays = not parent.has_reasoning or (parent.reasoning_sent and border.shows_reasoning)
            if not stays or any(text in self.text(parent.token_ids) for text in self._fading(messages, tools, options)):
                return None
        end = self._ends.get(parent.token_ids[-1], "")
        if end is None:  # an ordinary token, which the model's files name as an end: the template does not write it
            return None
        if not end:  # a stop string: the turn has to be ended
            missing = self._control_tokens.last(border.turn_end)
            start = border.turn_end.rindex(missing) if missing else len(border.turn_end)
            return self._control_tokens.encode(border.text[start:], border.mark)
        if end in border.turn_end:
            start = border.turn_end.rindex(end)
        elif border.next_turn.startswith(end):
            start = len(border.turn_end)
        else:
            return None
        return self._control_tokens.encode_after(end, border.text[start + len(end) :], border.mark)

    def extend(self, prompt_ids: TokenIds, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the token ids of a prompt with more messages before its generation prompt, with nothing sampled yet.

        As in `bridge` the messages are rendered after a short question, whatever the prompt is.

        Raises:
            ValueError: The prompt does not end with the template's generation prompt, or the template does not write
                the messages after what a user said.
        """
        alone = self._template.render([_USER], tools, generation_prompt=False).text
        prompt = self._template.render([_USER], tools, generation_prompt=True).text
        both = self._template.render([_USER, *messages], tools, generation_prompt=True)
        following = both.text.removeprefix(alone)
        if following == both.text or self._control_tokens.at_start(following) is None:
            roles = [message.role.value for message in messages]
            raise ValueError(f"the chat template does not add messages of {roles} to a user's")
        before, generation_prompt = list(prompt_ids), self._control_tokens.encode(prompt.removeprefix(alone))
        end = len(before) - len(generation_prompt)
        if before[end:] != generation_prompt:
            raise ValueError(
                "the prompt does not end with the generation prompt of the chat template, which messages come before; "
                "set data.chat_template=true"
            )
        return [*before[:end], *self._control_tokens.encode(following, both.mark)]

    def shows_reasoning(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
        """Return whether the template shows the reasoning of an answer that these messages follow."""
        border = self._border((), messages, tools)
        return border is not None and border.shows_reasoning

    def check(
        self,
        token_ids: TokenIds,
        sampled: Sequence[tuple[int, int]],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Cause | None:
        """Return how a prompt that was bridged differs from a render of all its messages, outside the `sampled` spans.

        The cost grows with the history: `is_check_due` says when it is worth it.

        Raises:
            TemplateRefusalError, ValueError: As `ChatTemplate.render`.
        """
        return mismatch(token_ids, sampled, self.full(messages, tools, options), self.text)

    def text(self, token_ids: TokenIds) -> str:
        """Return the text of tokens, special tokens included."""
        return self._tokenizer.decode(
            list(map(int, token_ids)), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def answer_text(self, response_ids: TokenIds) -> str:
        """Return the text of a response without the token that ended it: what parsers read."""
        ended = len(response_ids) > 0 and response_ids[-1] in self._ends
        return self.text(response_ids[:-1] if ended else response_ids)

    def _border(
        self,
        calls: Sequence[ToolCall],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        options: Mapping[str, Any] | None = None,
    ) -> "_Border | None":
        """Render a short conversation with the messages and without them, and find what comes after the answer.

        Returns:
            None if the template refuses the conversation or leaves out the answer.
        """
        calls_before = tuple(_calls_before(messages, calls))
        answer = Message(role=Role.assistant, content=_ANSWER, reasoning=_REASONING, tool_calls=calls_before)
        try:
            alone = self._template.render([_USER, answer], tools, options, generation_prompt=False)
            both = self._template.render([_USER, answer, *messages], tools, options, generation_prompt=True)
        except TemplateRefusalError:
            return None
        # The answer's text is its content and in the arguments of each of its calls: the last occurrence counts.
        occurrences = alone.text.count(_ANSWER)
        before, *others = both.text.split(_ANSWER, occurrences)
        if not occurrences or len(others) < occurrences:
            return None
        end_alone, text = alone.text.rpartition(_ANSWER)[2], others[-1]
        turn_end = end_alone
        if end_depends := not text.startswith(end_alone):
            same = commonprefix([end_alone, text])
            control_token = self._control_tokens.last(same)
            turn_end = "".join(same.rpartition(control_token)[:2]) if control_token else ""
        return _Border(
            text=text,
            end_alone=end_alone,
            turn_end=turn_end,
            end_depends=end_depends,
            mark=both.mark,
            shows_reasoning=_REASONING in before,
        )

    def _fading(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: Mapping[str, Any] | None
    ) -> set[str]:
        """Return the texts that the template adds to an answer without reasoning only until these messages follow.

        Qwen3's writes `<think>\n\n</think>` there, or it is the end of its generation prompt.
        """
        answer = Message(role=Role.assistant, content=_ANSWER, tool_calls=tuple(_calls_before(messages, ())))
        try:
            prompt = self._template.render([_USER], tools, options, generation_prompt=True).text
            alone = self._template.render([_USER, answer], tools, options, generation_prompt=False).text
            both = self._template.render([_USER, answer, *messages], tools, options, generation_prompt=True).text
        except TemplateRefusalError:
            return set()
        earlier = both.partition(_ANSWER)[0]
        fading = {text[len(commonprefix([text, earlier])) :].strip() for text in (prompt, alone.partition(_ANSWER)[0])}
        return fading - {""}

    def _template_ends(self) -> Iterator[str]:
        """Yield the control tokens that end an answer before a user's turn and before a tool's, or the last answer."""
        for role in (Role.user, Role.tool):
            message = Message(role=role, content="What comes next.", call_id="call" if role is Role.tool else None)
            if (end := self._end_before(message)) is not None:
                yield end

    def _end_before(self, message: Message, calls: Sequence[ToolCall] = ()) -> str | None:
        """Return the control token that ends an answer with these calls before the message.

        Where the last answer of a conversation ends differently, it is what the template always writes after an
        answer's text (Phi-3: `<|end|>`), or else what ends the last one (gpt-oss: `<|return|>`).
        """
        border = self._border(calls, [message])
        if border is None:
            return None
        if not border.end_depends:
            return self._control_tokens.last(border.turn_end) or self._control_tokens.at_start(border.next_turn)
        after_text = border.turn_end if message.role is not Role.tool else ""  # after a call, it may end the call only
        return self._control_tokens.last(after_text) or self._control_tokens.last(border.end_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Border:
    """The text that a template writes after an answer's own text when messages follow."""

    text: str
    """The end of the answer's turn, the new messages and the generation prompt."""
    end_alone: str
    """The end of the answer's turn where nothing follows."""
    turn_end: str
    """The part of `text` that ends the turn: an end token with a separator, say."""
    end_depends: bool
    """True where the last answer of a conversation ends differently. `turn_end` is then what is always written: Phi-3
    appends the end of the sequence, Gemma 4 goes on with the results of tools in the same turn."""
    mark: str
    """The character that breaks the control tokens in the contents of `text`."""
    shows_reasoning: bool
    """True where the answer is rendered with its reasoning."""

    @property
    def next_turn(self) -> str:
        return self.text[len(self.turn_end) :]


def _not_after(prompt: str, whole: str, message: Message) -> str:
    """Return why a message cannot be learned that the template does not write after its generation prompt."""
    start = max(len(commonprefix([prompt, whole])) - 20, 0)
    texts = f"which ends with {prompt[start:][-80:]!r} where the message goes on with {whole[start:][:80]!r}"
    hint = "use a chat template that begins its messages as its generation prompt does"
    if leaves_reasoning_open(prompt) and not message.reasoning:
        hint = "it begins the reasoning: give the message `reasoning`, or use a chat template that does not begin it"
    return f"the chat template does not write the assistant's message after its generation prompt, {texts}; {hint}"


def _calls_before(messages: Sequence[Message], calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
    """Yield the calls whose results the messages begin with. Their arguments end with the text that is looked for."""
    names = {call.call_id: call.name for call in calls}
    for result in takewhile(lambda message: message.role is Role.tool, messages):
        call_id = result.call_id or ""
        yield ToolCall(call_id=call_id, name=names.get(call_id, "tool"), arguments=f'{{"value": "{_ANSWER}"}}')
