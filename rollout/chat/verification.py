"""The proof of a bridge: a prompt that grew turn by turn is compared with a render of its whole history."""

from collections.abc import Callable, Sequence
from enum import Enum

from rollout.types import IntArray

TokenIds = Sequence[int] | IntArray


class Cause(Enum):
    """The reason why a request is not simply the conversation so far with new messages."""

    template = "template"
    """The chat template renders the history in another way than before, such as without old reasoning."""
    retoken = "retoken"
    """The same text has other token ids when it is tokenized as a whole."""
    edit = "edit"
    """The harness changed the history, or put words into the policy's mouth."""
    compaction = "compaction"
    """The harness shortened the history."""
    retry = "retry"
    """The client sent a request again that had no whole answer."""
    length = "length"
    """The answer before it was cut off, so that nothing can be appended to its tokens."""
    tools = "tools"
    """The harness offers other tools than before, as another agent does that takes over: the policy must read them."""


def mismatch(
    token_ids: TokenIds,
    sampled: Sequence[tuple[int, int]],
    rendered: TokenIds,
    decode: Callable[[list[int]], str],
) -> Cause | None:
    """Return how a prompt differs from the render of its history, outside the tokens that were sampled: by `template`,
    or by `retoken` where the texts are equal and their token ids are not.

    The runs of tokens between the sampled spans must come in `rendered` in the same order, the first at its start and
    the last at its end. It makes no difference how the template would write the answers.

    Args:
        token_ids: A prompt, with the answers before it.
        sampled: The spans [start, end) of the answers, ascending, which do not reach the end of the prompt.
        rendered: The whole history with a generation prompt.
        decode: The function from token ids to text, special tokens included.
    """
    runs = _runs_between(token_ids, sampled)
    if _are_in_place([_as_string(run) for run in runs], _as_string(rendered)):
        return None
    return Cause.retoken if _are_in_place([decode(run) for run in runs], decode(list(rendered))) else Cause.template


def is_check_due(parent_tokens: int, tokens: int, every_turn_up_to: int) -> bool:
    """Return whether a prompt that grew from `parent_tokens` to `tokens` tokens is compared with its render now.

    Every turn is up to a length, then the first turn at or over twice, four times, ... that length. A render costs as
    much as the history is long, so all renders of a session together cost at most `every_turn_up_to` tokens for each
    of its first turns and three times its length after that: linear, not quadratic. A difference in between is found
    at the next check, which compares the whole history.

    For 128 turns of 790 tokens with a limit of 8,192 the checks encode 0.17 million tokens, where checks of every turn
    would encode 6.5 million. There a bridge took 0.5 ms at turn 8 and at turn 128, a check 8 ms and 126 ms (one core).

    `every_turn_up_to` must be positive.

    Example: is_check_due(15_900, 16_100, 8_000) is true, is_check_due(16_100, 30_000, 8_000) is not.
    """
    if tokens <= every_turn_up_to:
        return True
    return (tokens // every_turn_up_to).bit_length() > (parent_tokens // every_turn_up_to).bit_length()


def _runs_between(token_ids: TokenIds, sampled: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the runs of `token_ids` around the spans."""
    edges = [0, *(edge for span in sampled for edge in span), len(token_ids)]
    if edges != sorted(edges):
        raise ValueError(f"sampled={list(sampled)} do not ascend within {len(token_ids)} tokens")
    return [list(token_ids[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _as_string(ids: TokenIds) -> str:
    """Return one character per token id, because Python searches strings fast."""
    return "".join(map(chr, ids))


def _are_in_place(runs: Sequence[str], whole: str) -> bool:
    """Return whether `whole` begins with the first run and ends with the last, with the others between in order."""
    if len(runs) == 1:
        return runs[0] == whole
    first, *middle, last = runs
    if not whole.startswith(first):
        return False
    position = len(first)
    for run in middle:
        if (start := whole.find(run, position)) < 0:
            return False
        position = start + len(run)
    return whole.endswith(last) and len(whole) - len(last) >= position
