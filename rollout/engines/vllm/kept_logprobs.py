"""The tokens that truncated sampling left to draw from, read from vLLM's logprobs.

Facts this rests on (vLLM 0.26 to 0.33, both model runners):
- With logprobs_mode=processed_logprobs, logprobs are of the distribution that is sampled from: minus infinity for the
  tokens that top-p, top-k and min-p leave out.
- A request with logprobs=k gets the logprob of the sampled token first, and then those of the k most likely ones, in
  descending order. It gets more of them beside a request that asked for more.
- top-k leaves every token that is as likely as the k-th, which in half precision are often several.

`return_sampling_mask` says the same in fewer bytes, but an engine that has it refuses every greedy request, and every
one without top-k: evaluations, scoring and the comparison of replicas with the trainer.
"""

import math
from array import array
from collections.abc import Iterable
from itertools import takewhile

import numpy as np
from vllm.logprobs import FlatLogprobs

from rollout.types import UNKNOWN, KeptTokens

TOLERANCE = 1e-4
"""The largest distance from 1 of the probabilities of what was left, added up. Beyond it some are missing."""


class KeptLogprobs(FlatLogprobs):
    """The logprobs of a request whose sampling leaves tokens out: of its sampled tokens, with what each was drawn from.
    Vastly fewer objects than FlatLogprobs makes of all that come from the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = array("i")
        self._token_ids = array("i")

    def append_fast(
        self, token_ids: list[int], logprobs: list[float], ranks: Iterable[int], decoded_tokens: Iterable[str | None]
    ) -> None:
        """Add a token. The first id and logprob are its own, the others those of the most likely tokens."""
        super().append_fast(token_ids[:1], logprobs[:1], ranks, decoded_tokens)  # pyright: ignore[reportArgumentType]
        kept = list(takewhile(math.isfinite, logprobs[1:]))
        own = token_ids[1 : len(kept) + 1]
        is_known = abs(math.fsum(map(math.exp, kept)) - 1) < TOLERANCE and token_ids[0] in own
        self._counts.append(len(kept) if is_known else UNKNOWN)
        self._token_ids.extend(sorted(own) if is_known else ())

    def kept(self, start: int = 0) -> KeptTokens:
        """Return what the tokens from `start` on were drawn from."""
        counts = np.array(self._counts[start:], np.int32)
        first = len(self._token_ids) - int(counts[counts > 0].sum())
        return KeptTokens(counts=counts, token_ids=np.array(self._token_ids[first:], np.int32))
