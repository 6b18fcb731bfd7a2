"""The fast way from text to token ids, which environments and sessions take every turn."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

LONG_TEXT = 500
"""The characters from which on a text is worth a thread: many of them at once would hold the event loop for
milliseconds."""


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that encodes a text without the tokens that the tokenizer puts around a prompt.

    The ids are those of `tokenizer(text, add_special_tokens=False)`, in half the time for long texts and a tenth for
    short ones: no offsets are looked up, and no dictionary is made. The function may be called in any thread, and
    nothing that an environment does with the tokenizer meanwhile, such as truncating, changes what it returns.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    backend = _copied_backend(tokenizer)
    return lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


@lru_cache(maxsize=4)
def _copied_backend(tokenizer: Any) -> Any:
    """Copy the tokenizer of the Rust library, because truncation and padding are a state of it."""
    backend = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    return backend
