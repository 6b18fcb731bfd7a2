"""OpenAI completions: a text or token ids to continue, without messages."""

from collections.abc import Iterator, Sequence
from typing import Any

from rollout.sessions.backend import PromptRequest
from rollout.sessions.dialects.dialect import COMMENT, CUT_SHORT, Asked, event
from rollout.sessions.dialects.fields import Fields
from rollout.sessions.dialects.openai_common import (
    BOOKKEEPING,
    DONE,
    MAX_ANSWERS,
    SAMPLING,
    openai_error_event,
    openai_usage,
    prompt_ids,
    stream_options,
    token_name,
)
from rollout.sessions.errors import SessionError
from rollout.sessions.messages import Answer

PREFIX = "cmpl-"
"""Of the `id` of an answer; the id of its generation follows."""


class OpenAICompletions:
    keepalive = COMMENT

    def parse(self, body: Any, created: int) -> Asked:
        fields = Fields(body)
        model = fields.must_have_text("model")
        is_stream, with_usage = stream_options(fields)
        request = PromptRequest(
            prompt=_prompt(fields),
            max_tokens=fields.integer("max_tokens", 1),
            stop=fields.texts("stop"),
            num_answers=fields.integer("n", 1, MAX_ANSWERS) or 1,
            sampling=fields.numbers(*SAMPLING),
            wants_logprobs=fields.integer("logprobs", 0, 1) is not None,  # of the sampled token, which is all we know
            wants_token_ids=fields.flag("return_token_ids"),
        )
        fields.only("best_of", request.num_answers)
        fields.only("echo", False)
        fields.only("suffix", "")
        fields.only("logit_bias", {})
        fields.ignore(*BOOKKEEPING)
        fields.end()
        return Asked(request=request, model=model, created=created, is_stream=is_stream, with_usage=with_usage)

    def body(self, asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [_choice(asked, index, answer) for index, answer in enumerate(answers)]
        whole = _head(asked, answers) | {"choices": choices, "usage": openai_usage(answers)}
        return whole | prompt_ids(asked, answers)

    def events(self, asked: Asked, answers: Sequence[Answer]) -> Iterator[bytes]:
        head = _head(asked, answers)
        with_usage = {"usage": None} if asked.with_usage else {}
        for index, answer in enumerate(answers):
            first = prompt_ids(asked, answers) if index == 0 else {}
            yield event(head | {"choices": [_choice(asked, index, answer)]} | with_usage | first)
        if asked.with_usage:
            yield event(head | {"choices": [], "usage": openai_usage(answers)})
        yield DONE

    def error_event(self, error: SessionError) -> bytes:
        return openai_error_event(error)


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    """One prompt: a string, token ids, or a list of one of these."""
    value = fields.take("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        (value,) = value
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and 0 <= token < 2**31 for token in value):
        return tuple(value)
    raise fields.refuse("prompt", value, "one text or one list of token ids, not empty")


def _head(asked: Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    answer_id = PREFIX + answers[0].answer_id
    return {"id": answer_id, "object": "text_completion", "created": asked.created, "model": asked.model}


def _choice(asked: Asked, index: int, answer: Answer) -> dict[str, Any]:
    ids = answer.completion.token_ids.tolist()
    choice: dict[str, Any] = {
        "index": index,
        "text": answer.message.content,
        "logprobs": None,
        "finish_reason": "length" if answer.finish in CUT_SHORT else "stop",
    }
    if asked.request.wants_logprobs:
        choice["logprobs"] = {
            "tokens": [token_name(token) for token in ids],
            "token_logprobs": answer.completion.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": [],
        }
    if asked.request.wants_token_ids:
        choice["token_ids"] = ids
    if asked.request.num_answers > 1:
        choice["answer_id"] = answer.answer_id
    return choice
