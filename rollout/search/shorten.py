"""Cuts documents to a number of tokens or characters."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rollout.text_encoder import text_encoder

MAX_CHARS_PER_TOKEN = 32
"""Of a longer document the rest is not even tokenized: one may have megabytes."""
KEPT = 4096


def in_tokens(tokenizer: Any, max_tokens: int, escape: Callable[[str], str] = str) -> Callable[[str], str]:
    """A function that cuts a text to its first `max_tokens` tokens, and remembers the last few thousand. `escape`: of
    `breaker`, what is done with the text before. Raises ValueError for fewer than one."""
    if max_tokens < 1:
        raise ValueError(f"max_document_tokens={max_tokens}: must be at least 1")

    encode = text_encoder(tokenizer)

    @lru_cache(maxsize=KEPT)
    def shortened(text: str) -> str:
        harmless = escape(text[: max_tokens * MAX_CHARS_PER_TOKEN])
        token_ids = encode(harmless)
        if len(token_ids) <= max_tokens and len(text) <= max_tokens * MAX_CHARS_PER_TOKEN:
            return harmless
        return tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=True)

    return shortened


def in_characters(max_chars: int, escape: Callable[[str], str] = str) -> Callable[[str], str]:
    """As `in_tokens`, for whoever has no tokenizer. Raises ValueError for fewer than one."""
    if max_chars < 1:
        raise ValueError(f"max_document_chars={max_chars}: must be at least 1")
    return lambda text: escape(text[:max_chars])
