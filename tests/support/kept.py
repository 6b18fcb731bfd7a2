"""The tokens that sampling left to draw from, as lists, and what they make of logprobs."""

from collections.abc import Sequence

import numpy as np

from rollout.types import UNKNOWN, Completion, FloatArray, KeptTokens


def kept_of(rows: Sequence[Sequence[int] | None]) -> KeptTokens:
    """Return the rows in their compact form. An empty one is the whole vocabulary, and None unknown."""
    counts = [UNKNOWN if row is None else len(row) for row in rows]
    token_ids = [token_id for row in rows for token_id in row or ()]
    return KeptTokens(counts=np.array(counts, np.int32), token_ids=np.array(token_ids, np.int32))


def rows_of(kept: KeptTokens) -> list[list[int]]:
    """Return the rows as lists; that of the whole vocabulary, and of what is unknown, is empty."""
    ends = kept.offsets().tolist()
    return [kept.token_ids[start:end].tolist() for start, end in zip(ends[:-1], ends[1:], strict=True)]


def normalized(logprobs: FloatArray, completion: Completion) -> FloatArray:
    """[T, V] -> [T]: the logprob of each token over what it was drawn from."""
    assert completion.kept is not None
    totals = [np.logaddexp.reduce(row[ids]) for row, ids in zip(logprobs, rows_of(completion.kept), strict=True)]
    return np.take_along_axis(logprobs, completion.token_ids[:, None], 1)[:, 0] - totals
