"""One set of end tokens for a model and its chat template: rollouts stop at them, and checkpoints name them."""

import logging
from typing import Any

from rollout.chat.generation_config import configured_end_ids
from rollout.chat.render import Renderer

logger = logging.getLogger(__name__)


def end_token_ids(tokenizer: Any, *, chat: bool) -> tuple[int, ...]:
    """Return the tokens that end a turn: those of the tokenizer and of the generation config beside it.

    Args:
        tokenizer: A tokenizer of transformers.
        chat: Add what the chat template writes after an answer. Prompts without the template know nothing of that.

    Raises:
        ValueError: The generation config names end tokens that are none.
    """
    configured = configured_end_ids(tokenizer)
    if not chat or tokenizer.chat_template is None:
        return configured
    try:
        return Renderer(tokenizer).end_token_ids
    except ValueError as error:  # a template that shows prompts need not be one that sessions can use
        logger.warning("turns end with the tokens %s only, not with those of the chat template: %s", configured, error)
        return configured
