"""Keys of rollout.* about replicas that die, hang or slow down, and groups that fail."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    min_replicas: int = 1
    """The run ends when fewer replicas than this can serve and none is on its way to replace one."""
    max_replacements: int = 8
    """Replicas that are lost and replaced by new ones, in all; 0: none. A resumed run counts anew."""
    progress_interval_s: float = 1.0
    """Every so often each replica is asked how it is, and for the tokens of what it is generating: the most that its
    death costs."""
    replica_timeout_s: float = 60.0
    """A replica is lost that gives no answer for so long, or no token although it has requests and is not paused."""
    max_group_retries: int = 1
    """How often a group is tried again whose agent loop raised, took longer than group_timeout_s, or ended the process
    that ran it alone."""
    max_failed_groups: float = 0.01
    """Share of the run's groups that may fail for good: other prompts take their places. One more ends the run."""
    slow_factor: float | None = 8.0
    """A replica is lost whose requests are slower than the others' median by more than this, in tokens/s, and that has
    less than half of their tokens/s in all; at least 2, null: never."""
