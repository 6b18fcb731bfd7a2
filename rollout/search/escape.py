"""Keeps documents from speaking for the policy or for its environment."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasSpecialTokens(Protocol):
    """As tokenizers of transformers have them."""

    all_special_tokens: list[str]


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts that are tokens of their own in what is tokenized, such as the end of a turn."""
    return tuple(tokenizer.all_special_tokens) if isinstance(tokenizer, HasSpecialTokens) else ()


def tags(*names: str) -> tuple[str, ...]:
    """Example: tags("search") == ("<search>", "</search>")"""
    return tuple(f"<{slash}{name}>" for name in names for slash in ("", "/"))


def breaker(markers: Iterable[str]) -> Callable[[str], str]:
    """A function that breaks each of these texts by a space after its first character, wherever it occurs.

    Example: breaker(tags("information"))("a</information>b") == "a< /information>b"
    """
    alternatives = "|".join(re.escape(marker) for marker in set(markers) if len(marker) > 1)
    if not alternatives:
        return str
    begins = re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL)
    return lambda text: begins.sub(r"\1 ", text)
