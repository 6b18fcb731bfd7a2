"""One sentence of advice with its numbers. What a change would give is the predictor's to say; the rules are one table
for what it cannot: what failed, what teaches nothing, and who waits for whom while there are few steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREDICTED = "prediction"
LATEST_STEPS = 20
"""Steps that the advice is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Means over the latest steps; None for what was not recorded. Shares are in [0, 1]."""

    steps: int
    trainer_idle: float | None = None
    replica_idle: float | None = None
    free_slots: float | None = None
    ready_groups: float | None = None
    step_s: float | None = None
    pause_s: float | None = None
    zero_variance: float | None = None
    cut: float | None = None
    ess: float | None = None
    ce_loss: float | None = None
    waiting: float | None = None
    """Requests that wait for a seat in an engine, the mean of all replicas."""
    kv_usage: float | None = None
    skipped: float = 0.0
    """In these steps, as the next ones."""
    failed_rewards: float = 0.0
    failed_groups: float = 0.0
    replicas_lost: float = 0.0
    max_staleness: Any = None
    """Keys of the config: rollout.max_staleness, rollout.max_num_seqs and rollout.num_replicas."""
    max_num_seqs: Any = None
    num_replicas: Any = None


@dataclass(frozen=True, slots=True)
class Rule:
    """Says `text(numbers)` where `applies(numbers)`."""

    name: str
    applies: Callable[[Numbers], bool]
    text: Callable[[Numbers], str]
    is_of_speed: bool = False
    """Silent where there is a prediction."""


def share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def over(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


def under(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


RULES: tuple[Rule, ...] = (
    Rule(
        "skipped",
        lambda n: n.skipped > 0,
        lambda n: (
            f"{n.skipped:.0f} of the last {n.steps} steps broke with NaN or infinity: lower trainer.lr, "
            "or look into bad_batches/."
        ),
    ),
    Rule(
        "supervised",
        lambda n: n.ce_loss is not None and n.replica_idle is None,
        lambda n: (
            f"Supervised: the mean loss of the last {n.steps} steps is {n.ce_loss:.4f}, at {n.step_s:.2f} s a step."
        ),
    ),
    Rule(
        "failed_rewards",
        lambda n: n.failed_rewards > 0,
        lambda n: f"{n.failed_rewards:.0f} rewards failed in the last {n.steps} steps: see Groups, failed ones only.",
    ),
    Rule(
        "failed_groups",
        lambda n: n.failed_groups > 0,
        lambda n: f"{n.failed_groups:.0f} groups were given up in the last {n.steps} steps: see Fleet for the reasons.",
    ),
    Rule(
        "replicas_lost",
        lambda n: n.replicas_lost > 0,
        lambda n: f"{n.replicas_lost:.0f} replicas were lost in the last {n.steps} steps: see Fleet for the reasons.",
    ),
    Rule(
        "slots",
        lambda n: over(n.trainer_idle, 0.2) and over(n.replica_idle, 0.2) and under(n.free_slots, 0.5),
        lambda n: (
            f"The trainer waits {share(n.trainer_idle)} for rollouts while replicas are idle "
            f"{share(n.replica_idle)} and no slot is free: raise rollout.max_staleness (now {n.max_staleness})."
        ),
        is_of_speed=True,
    ),
    Rule(
        "seats",
        lambda n: over(n.trainer_idle, 0.2) and over(n.waiting, 1) and under(n.kv_usage, 0.6),
        lambda n: (
            f"The trainer waits {share(n.trainer_idle)} for rollouts; {n.waiting:.0f} requests queue at a "
            f"replica with its KV cache {share(n.kv_usage)} full: raise rollout.max_num_seqs (now {n.max_num_seqs})."
        ),
        is_of_speed=True,
    ),
    Rule(
        "replicas",
        lambda n: over(n.trainer_idle, 0.2),
        lambda n: (
            f"The trainer waits {share(n.trainer_idle)} for rollouts and replicas are idle "
            f"{share(n.replica_idle)}: add replicas (rollout.num_replicas, now {n.num_replicas})."
        ),
        is_of_speed=True,
    ),
    Rule(
        "ranks",
        lambda n: over(n.replica_idle, 0.2),
        lambda n: (
            f"Replicas are idle {share(n.replica_idle)} and the trainer waits {share(n.trainer_idle)}: the "
            "trainer is the slower side, add ranks (trainer.num_ranks) or take a replica away."
        ),
        is_of_speed=True,
    ),
    Rule(
        "pauses",
        lambda n: n.pause_s is not None and n.step_s is not None and n.pause_s > 0.05 * n.step_s > 0,
        lambda n: (
            f"Updates freeze replicas {1000 * (n.pause_s or 0):.0f} ms in each step of {n.step_s:.2f} s "
            f"({share((n.pause_s or 0) / (n.step_s or 1))}): raise weight_sync.interval, or see docs/weight-sync.md."
        ),
        is_of_speed=True,
    ),
    Rule(
        "equal_rewards",
        lambda n: over(n.zero_variance, 0.5),
        lambda n: (
            f"{share(n.zero_variance)} of the groups have equal rewards and teach nothing: "
            "algorithm.filter_groups=true, or other prompts."
        ),
    ),
    Rule(
        "cut",
        lambda n: over(n.cut, 0.3),
        lambda n: f"{share(n.cut)} of the responses are cut off: raise rollout.max_response_tokens.",
    ),
    Rule(
        "off_policy",
        lambda n: under(n.ess, 0.5),
        lambda n: (
            f"The effective sample size is {share(n.ess)}: tokens are too far off-policy, "
            f"lower rollout.max_staleness (now {n.max_staleness}) or trainer.lr."
        ),
    ),
    Rule(
        "balanced",
        lambda n: n.trainer_idle is not None,
        lambda n: (
            f"Balanced: the trainer waits {share(n.trainer_idle)} for rollouts, "
            f"replicas are idle {share(n.replica_idle)}."
        ),
        is_of_speed=True,
    ),
)


def advise(numbers: Numbers, predicted: str | None = None, gain: float = 0.0) -> tuple[str, str]:
    """(name of the rule, sentence): of the first rule that applies. `predicted`: what the predictor says. It speaks in
    the place of the rules of speed where it knows a change with a `gain`, and last of all where it knows none."""
    for rule in RULES:
        if rule.is_of_speed and predicted is not None:
            if gain > 0 or rule is RULES[-1]:
                return PREDICTED, predicted
        elif rule.applies(numbers):
            return rule.name, rule.text(numbers)
    return "nothing", "No step has been recorded yet."


def gather(
    rows: Sequence[Mapping[str, float]], config: Mapping[str, Any], loads: Sequence[Mapping[str, Any]] = ()
) -> Numbers:
    """`Numbers` of the latest steps.

    Args:
        rows: finite metrics of steps, oldest first.
        config: values by key, such as "rollout.max_staleness".
        loads: the latest `waiting` and `kv_usage` of each replica.
    """
    steps = [row for row in rows if "timing_s/step" in row]
    before, latest = steps[:-LATEST_STEPS], steps[-LATEST_STEPS:]

    def mean(key: str, of: Sequence[Mapping[str, Any]] = latest) -> float | None:
        values = [row[key] for row in of if row.get(key) is not None]
        return sum(values) / len(values) if values else None

    def grown(key: str) -> float:
        values = [row[key] for row in latest if key in row]
        start = before[-1].get(key, 0.0) if before else 0.0
        return max(0.0, values[-1] - start) if values else 0.0

    pause_ms = mean("weight_sync/pause_ms")
    return Numbers(
        steps=len(latest),
        trainer_idle=mean("perf/trainer_idle"),
        replica_idle=mean("perf/replica_idle"),
        free_slots=mean("rollout/free_slots"),
        ready_groups=mean("rollout/ready_groups"),
        step_s=mean("timing_s/step"),
        pause_s=None if pause_ms is None else pause_ms / 1000,
        zero_variance=mean("rollout/zero_variance_groups"),
        cut=mean("response_length/clip_ratio"),
        ess=mean("actor/ess"),
        ce_loss=mean("actor/ce_loss"),
        waiting=mean("waiting", loads),
        kv_usage=mean("kv_usage", loads),
        skipped=grown("actor/skipped_steps"),
        failed_rewards=grown("rollout/failed_rewards"),
        failed_groups=grown("rollout/failed_groups"),
        replicas_lost=grown("rollout/replicas_lost"),
        max_staleness=config.get("rollout.max_staleness"),
        max_num_seqs=config.get("rollout.max_num_seqs"),
        num_replicas=config.get("rollout.num_replicas"),
    )
