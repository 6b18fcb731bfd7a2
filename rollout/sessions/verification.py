"""Compares the token ids of a conversation with what the chat template makes of the whole history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.sessions.generation import Cause
from rollout.types import IntArray

TokenIds = Sequence[int] | IntArray
EXCERPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    cause: Cause
    """`template`, or `retoken` where the texts are equal and their token ids are not."""
    segment: int
    """Which run of tokens that nobody sampled differs, from 0, the prompt."""
    expected: str
    """The run's text, its first 200 characters."""


def compare(
    token_ids: TokenIds,
    sampled: Sequence[tuple[int, int]],
    rendered: TokenIds,
    decode: Callable[[list[int]], str],
) -> Mismatch | None:
    """Compare a prompt with the render of its history, outside what was sampled.

    The runs of tokens between the sampled ones have to come in `rendered` in the same order, the first at its start and
    the last at its end. What the template makes of the sampled spans is not looked at.

    Args:
        token_ids: Of a prompt, with the answers before it.
        sampled: Spans [start, end) of the answers, ascending, without the last tokens of the prompt.
        rendered: The whole history with a generation prompt.
        decode: Token ids to text, special tokens included.
    """
    runs = _between(token_ids, sampled)
    missing = _first_missing([_as_text(run) for run in runs], _as_text(rendered))
    if missing is None:
        return None
    texts = [decode(run) for run in runs]
    text_missing = _first_missing(texts, decode(list(rendered)))
    cause, segment = (Cause.retoken, missing) if text_missing is None else (Cause.template, text_missing)
    return Mismatch(cause=cause, segment=segment, expected=texts[segment][:EXCERPT])


def is_check_due(parent_tokens: int, tokens: int, every_turn_up_to: int) -> bool:
    """Whether a prompt of `tokens` tokens, grown from `parent_tokens`, is compared with a render of its history.

    Every turn is, up to a length; after that the first turn at or over twice, four times, ... that length. A render
    costs as much as the history is long, so all renders of a session together cost at most `every_turn_up_to` tokens
    for each of its first turns and three times its length after that: linear. What differs in between is found at the
    next check, which compares the whole history.

    For 128 turns of 790 tokens with a limit of 8,192 the checks encode 0.17 million tokens, where checks of every turn
    would encode 6.5 million. There a bridge took 0.5 ms at turn 8 and at turn 128, a check 8 ms and 126 ms (one core).

    Example: is_check_due(15_900, 16_100, 8_000) is true, is_check_due(16_100, 30_000, 8_000) is not.
    """
    if tokens <= every_turn_up_to:
        return True
    if every_turn_up_to <= 0:
        return False
    return (tokens // every_turn_up_to).bit_length() > (parent_tokens // every_turn_up_to).bit_length()


def _between(token_ids: TokenIds, sampled: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The runs of `token_ids` around the spans."""
    edges = [0, *(edge for span in sampled for edge in span), len(token_ids)]
    if edges != sorted(edges):
        raise ValueError(f"sampled={list(sampled)} do not ascend within {len(token_ids)} tokens")
    return [list(token_ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _as_text(ids: TokenIds) -> str:
    """One character per token id, because the search in strings is fast."""
    return "".join(map(chr, ids))


def _first_missing(runs: Sequence[str], whole: str) -> int | None:
    """The first run that is not in its place, or None."""
    if len(runs) == 1:
        return None if runs[0] == whole else 0
    first, *middle, last = runs
    if not whole.startswith(first):
        return 0
    position = len(first)
    for index, run in enumerate(middle, start=1):
        found = whole.find(run, position)
        if found < 0:
            return index
        position = found + len(run)
    return None if whole.endswith(last) and len(whole) - len(last) >= position else len(runs) - 1
