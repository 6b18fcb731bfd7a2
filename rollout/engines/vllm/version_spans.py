"""The version spans of a request's tokens, from the engine core's own labels or from token counts at updates.

Nothing here needs vLLM.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rollout.types import VersionSpan


def labelled_spans(labels: Iterable[Any] | None) -> tuple[VersionSpan, ...]:
    """Return the spans that vLLM's engine core has labelled.

    Args:
        labels: Spans of tokens [start, end) of the type `vllm.outputs.WeightVersionSpan`, whose `version` is the text
            that `update_weight_version` was called with. None: nothing was sampled.
    """
    return _not_empty(VersionSpan(label.start, label.end, int(label.version)) for label in labels or ())


def counted_spans(boundaries: Sequence[tuple[int, int]], num_tokens: int, live: int) -> tuple[VersionSpan, ...]:
    """Return spans from (tokens that there were, version from there on) at each update; `live` where there was none."""
    starts = boundaries or [(0, live)]
    ends = [start for start, _ in starts[1:]] + [num_tokens]
    return _not_empty(VersionSpan(start, end, version) for (start, version), end in zip(starts, ends, strict=True))


def _not_empty(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(span for span in spans if span.end > span.start)
