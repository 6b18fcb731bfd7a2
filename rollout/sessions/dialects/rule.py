"""The rule for what a request asks for and sessions do not do. Every dialect follows it.

*Refused*, with the field named, is what would change what the policy reads or what it may say, and an answer in a form
that nobody can give here. *Left out* is all else: tools that only a provider can run, hints, and fields that are
unknown. What is left out is counted in `agent/ignored_fields`, and said once by each process that has sessions.

Some fields would change what the policy may say and are hints all the same, because real agents send them by default:
`tool_choice`, `strict`, the grammar of a tool, and budgets of thinking. Answers are sampled freely, because what is
trained must be what was sampled. And some fields say nothing about the answer at all: `BOOKKEEPING`.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

logger = logging.getLogger(__name__)

REFUSED: Mapping[str, tuple[Any, ...]] = {
    # what the policy reads
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "conversation": (),
    "documents": ([],),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "input": (),
    "instructions": (),
    "messages": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "system": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    # what the policy may say
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "beam_width": (1,),
    "best_of": (1,),
    "ebnf": (),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "min_tokens": (0,),
    "n": (1,),
    "regex": (),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "top_a": (0, 0.0),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    # the form of the answer
    "background": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prompt_logprobs": (0,),
    "top_logprobs": (0,),
}
"""Fields of any dialect and of vLLM that are refused where the dialect of a request does not read them, with the values
that change nothing."""
HINTS: Mapping[str, tuple[Any, ...]] = {
    "include": ([], ["reasoning.encrypted_content"]),
    "models": (),
    "parallel_tool_calls": (True,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Hints, with the values that ask for nothing and are not counted. Any other hint is simply unknown, unless its name
looks like a known one that is misspelled."""
BOOKKEEPING = frozenset(
    {
        "cache_control",
        "cache_salt",
        "client_metadata",
        "diagnostics",
        "inference_geo",
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "session_id",
        "speed",
        "store",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""Fields for an operator or a cache, which nobody misses."""
CLOSE = 0.88
"""The likeness from which on an unknown field is taken for a known one that is misspelled: one letter in eight."""
MAX_NAMES = 1000
"""The different fields that are counted of one session, and said by one process."""
MAX_NAME = 120
"""The characters of a field's name that are kept."""


class LeftOut:
    """The fields of one request that were left out, in the order in which they were read."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def add(self, path: str, value: str | None = None) -> None:
        """Note a field by its path, without the places in lists. `value` is there where only this value is left out.

        Example: add("tools[3].type", "web_search") notes 'tools[].type = "web_search"'
        """
        name = re.sub(r"\[\d+\]", "[]", path)
        name = name if value is None else f'{name} = "{value}"'
        self._names[ascii(name)[1:-1][:MAX_NAME]] = None


class LeftOutLog:
    """Says each field that was left out once, however many sessions send it."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._said and len(self._said) < MAX_NAMES:
                self._said.add(name)
                logger.warning(
                    "requests of harnesses have %s, which is left out: docs/agents.md says what is read", name
                )


def misspelled(name: str, known: Collection[str]) -> str | None:
    """Return the known field that an unknown one most likely is.

    Example: misspelled("max_token", ["model", "max_tokens"]) == "max_tokens"
    """
    return next(iter(get_close_matches(name, known, 1, CLOSE)), None)
