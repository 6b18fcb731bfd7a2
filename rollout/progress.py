"""What every trajectory under way has so far, told by its replica, so that it can go on elsewhere."""

from dataclasses import dataclass

from rollout.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """The next piece of one request's tokens: those after the first `start`, which were told before."""

    request_id: str
    prompt_checksum: int
    """Of the prompt's tokens: who goes on from here must have asked the same."""
    start: int
    piece: Completion
    """Tokens, logprobs and spans counted from `start`; finish_reason is "" while the request runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProgressReport:
    """What a replica says of itself every rollout.progress_interval_s."""

    tokens: int
    """Sampled since its start, by requests finished or not."""
    running: int
    """Requests inside the engine now."""
    paused: bool
    """Frozen, by a client or an update: no tokens are expected."""
    partials: tuple[Partial, ...]
