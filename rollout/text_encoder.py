"""Text to token ids, as environments and sessions need it for every turn."""

from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from typing import Any

LONG_TEXT = 500
"""Characters that are worth a thread: as some come at once, the event loop would stand still for milliseconds."""


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function that encodes one text, without the tokens that the tokenizer puts around a prompt.

    It gives the ids of `tokenizer(text, add_special_tokens=False)`, in half of its time for long texts and a tenth for
    short ones: it neither looks where in the text a token is, nor makes a dictionary. It may be called in any thread,
    and whatever an environment does with the tokenizer meanwhile, such as to truncate, changes nothing here.

    `tokenizer`: of transformers.
    """
    if not tokenizer.is_fast:
        return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    backend = _own_backend(tokenizer)
    return lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


@lru_cache(maxsize=4)
def _own_backend(tokenizer: Any) -> Any:
    """A copy, without truncation and padding, which are a state of the backend."""
    backend = deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    return backend
