"""A tokenizer for tests that need no words."""

from collections.abc import Iterable

EOS = 0
"""A token that says nothing."""


class Characters:
    """A tokenizer with one token per character."""

    is_fast, added_tokens_decoder, special_tokens_map = False, {}, {}

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [*map(ord, text)]}

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token) for token in token_ids if token != EOS)
