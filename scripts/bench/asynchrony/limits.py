"""A simulated job, and how much faster asynchrony can make it at most: arithmetic over the lengths of its responses.

B groups are trained per step, S is max_staleness, A(k) is when version k is live (A(0) = 0), and longest(k) is how long
the longest response of groups kB .. (k+1)B - 1 takes.

- Synchronous (S = 0): A(k+1) = A(k) + longest(k) + train_s.
- Window: a step frees B slots, so the groups that step k trains are claimed at A(k-S) at the earliest, and none of them
  may be trained later: A(k+1) >= max(A(k), A(k-S) + longest(k)) + train_s. S + 1 batches overlap, so that the ratio is
  about S + 1 at most while the longest response dominates.
- Engines: sum(lengths) * token_s / seats, and the last step comes after that.
- Trainer: train_s per step; already part of the recurrence.

The limit is the synchronous time over the largest of the other bounds. Without a bound on S only throughput is left.
"""

from dataclasses import dataclass
from functools import cache

from scripts.bench.common import LengthOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job. The defaults keep every seat busy for two seconds per step, and the trainer as long."""

    length_of: LengthOf
    num_steps: int = 40
    prompts_per_step: int = 16
    group_size: int = 8
    num_replicas: int = 2
    max_num_seqs: int = 64
    token_s: float = 0.01
    """Seconds per token of every running response, however many run."""
    train_s: float = 2.0
    swap_s: float = 0.02
    """Every update pauses a replica for this long, after its current token."""

    @property
    def num_trajectories(self) -> int:
        return self.num_steps * self.prompts_per_step * self.group_size


@cache
def group_lengths(job: Job) -> list[list[int]]:
    """Response lengths in tokens: [num_steps * prompts_per_step][group_size]."""
    return [
        [job.length_of(ordinal, index) for index in range(job.group_size)]
        for ordinal in range(job.num_steps * job.prompts_per_step)
    ]


def window_seconds(job: Job, max_staleness: int) -> float:
    """Lower bound of the job's time that the window sets, with a seat for every response."""
    batch_size = job.prompts_per_step
    group_s = [max(lengths) * job.token_s for lengths in group_lengths(job)]
    ready: list[float] = []
    live = [0.0]
    for step in range(job.num_steps):
        claimed = group_s[len(ready) : batch_size * (step + max_staleness + 1)]
        ready += [live[step] + seconds for seconds in claimed]
        trained = batch_size * (step + 1)
        if step < max_staleness:
            start = sorted(ready)[trained - 1]  # the first groups of all may be trained in any order
        else:
            start = max(ready[:trained])
        live.append(max(live[step], start) + job.train_s)
    return live[-1]


def throughput_seconds(job: Job) -> float:
    """Lower bound of the job's time without a window: every seat is always taken, or the trainer always trains."""
    lengths = group_lengths(job)
    generating = sum(map(sum, lengths)) * job.token_s / (job.num_replicas * job.max_num_seqs)
    first = min(max(group) for group in lengths) * job.token_s
    return max(generating + job.train_s, first + job.num_steps * job.train_s)


def limit_ratio(job: Job, max_staleness: int | None) -> float:
    """Upper bound of asynchronous over synchronous samples per second. None: without a bound on staleness."""
    bound = throughput_seconds(job)
    if max_staleness is not None:
        bound = max(bound, window_seconds(job, max_staleness))
    return window_seconds(job, 0) / bound
