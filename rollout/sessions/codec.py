"""The translation between messages and tokens for sessions: a renderer, a parser, and the thread that runs them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs.rollout import OnMismatch, ReasoningHistory, SessionsConfig
from rollout.agents.chat_turns import make_parser
from rollout.agents.threads import OneThread
from rollout.chat.messages import ChatRequest, Finish, Message, Role
from rollout.chat.parsing import AnswerParser, leaves_reasoning_open
from rollout.chat.render import Parent, Renderer
from rollout.chat.verification import Cause, is_check_due
from rollout.sessions.errors import BadRequestError
from rollout.sessions.length import TokenBound, texts_of
from rollout.sessions.tree.attachment import Attachment
from rollout.sessions.tree.generation import Generation
from rollout.sessions.tree.transcript import Transcript
from rollout.types import Completion

PROMPT_END = 16
"""The last tokens of a prompt, which show whether it has begun the reasoning of the answer."""
CHECK_UP_TO_TOKENS = 8192
"""Bridged prompts up to this length are compared with a render of their whole history, longer ones each time that their
length doubles: a render of everything in every turn would cost O(T^2) in a session of T turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCodec:
    """Renders prompts and parses answers. Neither may run twice at once, since tokenizers are not thread-safe: a single
    thread does all of it, away from the event loop."""

    renderer: Renderer
    parser: AnswerParser
    in_thread: Callable[..., Awaitable[Any]]
    """(function, *arguments) -> the result of the function."""
    bound: TokenBound
    forks_on_mismatch: bool = True
    """True if a history in which the harness changed the policy's words begins a new sequence."""
    follows_template: bool = False
    """True if a history that the template renders in another way than before begins a new sequence."""

    def least_tokens(self, request: ChatRequest) -> int:
        """Return a number of tokens that the prompt of a request has at least. It takes no thread, and no time."""
        if isinstance(request.prompt, tuple):
            return len(request.prompt)
        return self.bound.least(texts_of(request) if request.prompt is None else [request.prompt])

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def prompt(self, transcript: Transcript, attachment: Attachment) -> tuple[Sequence[int], Cause | None]:
        """Return the prompt of a request. It is the tokens of the parent with the new messages, or all messages
        rendered anew with the cause of that. Raises BadRequestError for messages that the chat template refuses."""
        try:
            return await self.in_thread(self._render, transcript, attachment)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the chat template refuses this request: {error}") from None

    def _render(self, transcript: Transcript, attachment: Attachment) -> tuple[Sequence[int], Cause | None]:
        request, cause = attachment.request, attachment.cause
        is_trusted = cause in (None, Cause.retry) or not self.forks_on_mismatch
        if attachment.parent is not None and attachment.can_bridge and is_trusted:
            parent = transcript.generation(attachment.parent)
            bridge = self.renderer.bridge(
                _parent(transcript, parent, attachment), attachment.messages, request.tools, request.template_options
            )
            if bridge is not None:
                prompt_ids = [*parent.token_ids.tolist(), *bridge]
                mismatch = self._mismatch(transcript, parent, prompt_ids, attachment)
                # The same text in other tokens is what the harness sent: a new sequence would only cost more.
                if mismatch is not Cause.template or not self.follows_template:
                    return prompt_ids, mismatch
                cause = cause or mismatch
            cause = cause or Cause.template
        return self.renderer.full(attachment.conversation, request.tools, request.template_options), cause

    def _mismatch(
        self, transcript: Transcript, parent: Generation, prompt_ids: list[int], attachment: Attachment
    ) -> Cause | None:
        """Return how a bridged prompt differs from a render of its whole history, where it is time to look."""
        if not is_check_due(len(parent.token_ids), len(prompt_ids), CHECK_UP_TO_TOKENS):
            return None
        sampled, ancestor = [], parent
        while True:
            start = len(ancestor.prompt_ids)
            sampled.append((start, start + ancestor.completion.num_tokens))
            if ancestor.parent is None or not ancestor.continues:
                break
            ancestor = transcript.generation(ancestor.parent)
        request = attachment.request
        return self.renderer.check(
            prompt_ids, sampled[::-1], attachment.conversation, request.tools, request.template_options
        )

    async def plain_prompt(self, prompt: str | tuple[int, ...], request: ChatRequest) -> tuple[list[int], ChatRequest]:
        """Return the ids of a prompt without a template, and the request as one of messages, which stands for it in the
        transcript."""
        ids = await self.in_thread(self.renderer.plain, prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self.renderer.vocab_size
        if not ids or max(ids) >= vocab_size:
            what = f"{len(ids)} token ids up to {max(ids, default=-1)}"
            raise BadRequestError(f"prompt has {what}: allowed is one or more below {vocab_size}", param="prompt")
        text = prompt if isinstance(prompt, str) else await self.in_thread(self.renderer.text, ids)
        return ids, replace(request, prompt=None, messages=(Message(role=Role.user, content=text),))

    # -- answers -------------------------------------------------------------------------------------------------------

    async def answer(
        self, transcript: Transcript, number: int, completion: Completion, request: ChatRequest
    ) -> tuple[Message, str | None]:
        """Return the message of a completion, and the stop string that ended it."""
        return await self.in_thread(self._parse, transcript, number, completion, request)

    def _parse(
        self, transcript: Transcript, number: int, completion: Completion, request: ChatRequest
    ) -> tuple[Message, str | None]:
        text, stop = self._text(completion, request)
        prompt_end = self.renderer.text(transcript.generation(number).prompt_ids[-PROMPT_END:].tolist())
        message = self.parser.parse(
            text,
            lambda index: transcript.names.call_id(number, index),
            tools=request.tools,
            options=request.template_options,
            reasoning_open=leaves_reasoning_open(prompt_end),
        )
        return message, stop

    async def plain_answer(self, completion: Completion, request: ChatRequest) -> tuple[Message, str | None]:
        """Return the completion of a prompt without a template, and the stop string that ended it. Tags of reasoning
        and calls are words of the text, in which its harness looks for them."""
        text, stop = await self.in_thread(self._text, completion, request)
        return Message(role=Role.assistant, content=text), stop

    def _text(self, completion: Completion, request: ChatRequest) -> tuple[str, str | None]:
        """Return the text of a completion before the first of the stop strings, and this stop string."""
        text = self.renderer.answer_text(completion.token_ids.tolist())
        places = [(text.find(stop), stop) for stop in request.stop if stop in text]
        if not places:
            return text, None
        end, stop = min(places)
        return text[:end], stop


def make_codec(sessions: SessionsConfig, tokenizer: Any) -> ChatCodec:
    """Return the codec of a model. Raises ValueError when its tokenizer has no chat template, or vLLM no such
    parser."""
    return ChatCodec(
        renderer=Renderer(tokenizer, history=sessions.reasoning),
        parser=make_parser(tokenizer, tool_parser=sessions.tool_parser, reasoning_parser=sessions.reasoning_parser),
        in_thread=OneThread("chat-codec"),
        bound=TokenBound.of(tokenizer),
        forks_on_mismatch=sessions.on_mismatch is OnMismatch.fork,
        follows_template=sessions.reasoning is ReasoningHistory.strip,
    )


def _parent(transcript: Transcript, parent: Generation, attachment: Attachment) -> Parent:
    assert parent.answer is not None
    sent = attachment.conversation[: len(attachment.conversation) - len(attachment.messages)]
    num_read = _num_with_reasoning(transcript.history(parent.number))
    return Parent(
        token_ids=parent.token_ids.tolist(),
        ended=parent.finish is not Finish.length,
        calls=parent.answer.tool_calls,
        has_reasoning=num_read > 0,
        reasoning_sent=_num_with_reasoning(sent) >= num_read,  # not every answer has reasoning that could be sent
    )


def _num_with_reasoning(messages: Sequence[Message]) -> int:
    return sum(bool(message.reasoning) for message in messages)
