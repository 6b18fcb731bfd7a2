"""What one training of the benchmark came to, simulated or real."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from configs.schema import RolloutConfig

DEFAULT_STALENESS = RolloutConfig().max_staleness
"""The figures of the last line are for this bound."""
HEADER = ["responses, max_staleness", "samples/s", "async/sync", "trainer idle", "replica idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    samples_per_s: float
    """Trajectories trained per second."""
    trainer_idle: float
    """Share of the run in which the trainer does not train."""
    replica_idle: float
    """Share of the run in which a replica has no request at all, averaged over replicas."""
    seats_used: float = float("nan")
    """Tokens sampled over those that the engines could have sampled with every seat taken."""

    def row(self, name: str, async_over_sync: float) -> list[str]:
        shares = [f"{self.trainer_idle:.0%}", f"{self.replica_idle:.0%}"]
        return [name, f"{self.samples_per_s:.1f}", f"{async_over_sync:.2f}", *shares]


def median_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Median of each field."""
    fields = [asdict(outcome) for outcome in outcomes]
    return Outcome(**{key: median(values[key] for values in fields) for key in fields[0]})
