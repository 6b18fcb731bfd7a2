"""One sentence that says what to change, with its numbers. It imports nothing that simulates: a page may ask it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WAITS = 0.15
"""Share of the time from which a wait is worth a word."""
GAIN = 0.05
"""Predicted gain in throughput below which nothing is proposed."""
LATEST = 20
"""Steps that count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change with what was predicted for it."""

    change: str
    """For example "rollout.max_staleness=4"."""
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the time of the latest steps."""

    waits: float
    """The trainer waits for a batch."""
    updates: float
    """It waits for a weight update, or publishes."""
    trains: float
    replica_idle: float
    """Replicas have no request."""

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, float]]) -> "Shares | None":
        """Of records of metrics.jsonl; those of other things than steps are passed over. None if there is no step."""
        latest = [step for step in steps if "timing_s/step" in step][-LATEST:]
        seconds = sum(step["timing_s/step"] for step in latest)
        if seconds <= 0:
            return None
        idle = [step["perf/replica_idle"] * step["timing_s/step"] for step in latest if "perf/replica_idle" in step]
        return cls(
            waits=sum(step["timing_s/wait_batch"] for step in latest) / seconds,
            updates=sum(step["timing_s/update_weights"] for step in latest) / seconds,
            trains=sum(step["timing_s/train_step"] for step in latest) / seconds,
            replica_idle=sum(idle) / seconds,
        )


def advice_of_metrics(steps: Sequence[Mapping[str, float]], max_staleness: int) -> str:
    """What the latest steps say alone, without a prediction. `steps`: records of metrics.jsonl."""
    shares = Shares.of(steps)
    if shares is None:
        return "No step yet."
    waits, idle = f"{shares.waits:.0%}", f"{shares.replica_idle:.0%}"
    if shares.waits >= WAITS and shares.replica_idle >= WAITS:
        return (
            f"The trainer waits {waits} of the time for rollouts while replicas have no request {idle} of it: they "
            f"wait for one another; raise rollout.max_staleness (now {max_staleness})."
        )
    if shares.waits >= WAITS:
        return (
            f"The trainer waits {waits} of the time for rollouts and replicas have no request {idle} of it: generation "
            "is the limit; another replica would help, another rank would not."
        )
    if shares.updates >= WAITS:
        return (
            f"The trainer waits {shares.updates:.0%} of the time for weight updates: raise weight_sync.interval, or "
            "use a faster weight_sync.transport."
        )
    if shares.replica_idle >= WAITS:
        return (
            f"Replicas have no request {idle} of the time and the trainer trains {shares.trains:.0%} of it: training "
            "is the limit; another rank would help, another replica would not."
        )
    return f"Balanced: the trainer waits {waits} of the time for rollouts, replicas have no request {idle} of it."


def advice(samples_per_s: float, trainer_idle: float, replica_idle: float, options: Sequence[Option]) -> str:
    """What predictions say. `options`: changes that could be made; they need not cost the same."""
    now = (
        f"{samples_per_s:.1f} samples/s, the trainer idle {trainer_idle:.0%}, replicas without a request "
        f"{replica_idle:.0%} of the time"
    )
    if not options:
        return f"Predicted {now}."
    best = max(options, key=lambda option: option.samples_per_s)
    if best.samples_per_s < samples_per_s * (1 + GAIN):
        return f"Predicted {now}: no change that was tried gives {GAIN:.0%} more."
    gain = best.samples_per_s / samples_per_s - 1
    return f"Predicted {now}: {best.change} gives {best.samples_per_s:.1f} samples/s, {gain:+.0%}."
