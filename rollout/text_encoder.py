"""Text to token ids, as environments and sessions need it for every turn."""

from collections.abc import Callable
from typing import Any


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function that encodes one text, without the tokens that the tokenizer puts around a prompt.

    It gives the ids of `tokenizer(text, add_special_tokens=False)`, in half of its time for long texts and a tenth for
    short ones: it neither looks where in the text a token is, nor makes a dictionary.

    `tokenizer`: of transformers. Truncation and padding, which a call of it leaves turned on, are turned off.
    """
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode
