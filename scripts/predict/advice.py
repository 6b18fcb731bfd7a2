"""Advise what to change in a run, in one sentence with its numbers.

What a change would give is the predictor's to say (`advise_from_predictions`). Rules say what the predictor cannot
know: what failed, what teaches nothing, and who waits for whom while there are too few steps to predict from. `advise`
chooses between the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the page uses the rules alone, and need not load the simulator
    from scripts.predict.sweep import Cost
    from scripts.simulate.simulate import Prediction

# -- from predictions --------------------------------------------------------------------------------------------------

GAIN = 0.05
"""The predicted gain in throughput from which on a change is proposed, and the share of a step from which on a cost is
told."""
ALIKE = 0.02
"""The difference in gain below which two changes count as alike. Of these, the first that was tried is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change, and the throughput that was predicted for it."""

    change: str
    """The change as overrides, for example "rollout.max_staleness=4"."""
    samples_per_s: float
    is_free: bool = True
    """True if it needs no more replicas and ranks than there are."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and what following it would give."""

    text: str
    gain: float
    """The gain of the free change that it proposes; 0 if it proposes none."""


def advise_from_predictions(now: "Prediction", options: Sequence[Option], costs: "Sequence[Cost]" = ()) -> Advice:
    """Return advice that follows from the predictions. `costs` are what things cost a step, the dearest first."""
    step_s, wait_s = now.seconds / len(now.step_s), sum(now.wait_s) / len(now.wait_s)
    text = (
        f"A step of {step_s:.2f} s waits {wait_s:.2f} s ({wait_s / step_s:.0%}) for rollouts, and replicas have no "
        f"requests {now.replica_idle:.0%} of the time"
    )
    dear = [cost for cost in costs if cost.step_s >= GAIN * step_s][:2]
    if dear:
        text += "; " + ", ".join(f"without {cost.name} it would take {cost.step_s:.2f} s less" for cost in dear)
    free, dearer = _best(now, options, is_free=True), _best(now, options, is_free=False)
    proposals: list[str] = []
    if free is not None and free[1] >= GAIN:
        proposals.append(f"{free[0].change} gives {free[1]:+.0%} samples/s on the same machines")
    elif free is not None:
        proposals.append(f"no change that was tried gives {GAIN:.0%} more samples/s on the same machines")
    if dearer is not None and dearer[1] >= GAIN:
        proposals.append(f"{dearer[0].change} gives {dearer[1]:+.0%}")
    gain = free[1] if free is not None and free[1] >= GAIN else 0.0
    return Advice(f"{text}: {', '.join(proposals)}." if proposals else f"{text}.", gain)


def _best(now: "Prediction", options: Sequence[Option], *, is_free: bool) -> tuple[Option, float] | None:
    gains = [(option, option.samples_per_s / now.samples_per_s - 1) for option in options if option.is_free is is_free]
    most = max((gain for _, gain in gains), default=0.0)
    return next((pair for pair in gains if pair[1] >= most - ALIKE), None)


# -- from rules --------------------------------------------------------------------------------------------------------

PREDICTED = "prediction"
LATEST_STEPS = 20
"""The number of steps that the rules are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The means over the latest steps, None for what was not recorded. Shares are in [0, 1]."""

    steps: int
    trainer_idle: float | None = None
    replica_idle: float | None = None
    free_slots: float | None = None
    step_s: float | None = None
    pause_s: float | None = None
    zero_variance: float | None = None
    cut: float | None = None
    ess: float | None = None
    ce_loss: float | None = None
    waiting: float | None = None
    """The requests that wait for a seat in an engine, the mean of all replicas."""
    kv_usage: float | None = None
    skipped: float = 0.0
    """The steps that were skipped among these; the next three count the same way."""
    failed_rewards: float = 0.0
    failed_groups: float = 0.0
    replicas_lost: float = 0.0
    accuracy: float | None = None
    """The latest held-out accuracy."""
    solve_all: float | None = None
    """The share of groups whose answers are all right, and next that of groups with none."""
    solve_none: float | None = None
    steps_done: int = 0
    """The number of the last step."""
    failure: str = ""
    """The reason why the run broke off, or "" if it did not."""
    phase: str = ""
    """A sentence on a run without a step."""
    max_staleness: Any = None
    """The value of rollout.max_staleness; the next two are of the keys of their names."""
    max_num_seqs: Any = None
    num_replicas: Any = None


Said = tuple[str, str]
"""The name of a rule that applies, and its sentence."""


def advise(numbers: Numbers, predicted: str | None = None, gain: float = 0.0) -> Said:
    """Return the name and the sentence of the first rule that applies.

    `predicted` is what the predictor says. With a `gain` it speaks in the place of the rules of speed; without one,
    which means that it knows no change worth making, it comes last.
    """
    said = _failure(numbers) or _lesson(numbers)
    if said is None and predicted is not None and gain > 0:
        return PREDICTED, predicted
    if said is None and predicted is None:
        said = _bottleneck(numbers)
    said = said or _tokens(numbers)
    if said is not None:
        return said
    if predicted is not None:
        return PREDICTED, predicted
    if numbers.trainer_idle is not None:
        return "balanced", (
            f"Balanced: the trainer waits for rollouts {share(numbers.trainer_idle)} of the time, "
            f"and replicas are idle {share(numbers.replica_idle)} of it."
        )
    return "nothing", f"{numbers.phase} No step has been recorded yet.".strip()


def _failure(n: Numbers) -> Said | None:
    """Return what failed, or that a run is supervised, of which nothing else is known."""
    latest = f"in the last {n.steps} steps"
    if n.failure:
        when = f"after {count(n.steps_done, 'step')}" if n.steps_done else "before its first step"
        return "failed", f"The run failed {when}: {n.failure}. See Config and logs."
    if n.skipped:
        remedy = "lower trainer.lr, or look into bad_batches/"
        return "skipped", f"{n.skipped:.0f} of the last {n.steps} steps gave NaN or infinity: {remedy}."
    if n.ce_loss is not None and n.replica_idle is None:
        mean = f"the mean loss over the last {n.steps} steps is {n.ce_loss:.4f}"
        return "supervised", f"Supervised: {mean}, at {n.step_s:.2f} s per step."
    if n.failed_rewards:
        return "failed_rewards", f"{count(n.failed_rewards, 'reward')} failed {latest}: see Groups with failures."
    if n.failed_groups:
        return "failed_groups", f"{count(n.failed_groups, 'group')} given up {latest}: see Fleet for the reasons."
    if n.replicas_lost:
        return "replicas_lost", f"{count(n.replicas_lost, 'replica')} lost {latest}: see Fleet for the reasons."
    return None


def _lesson(n: Numbers) -> Said | None:
    """Return why little is learned."""
    if not over(n.zero_variance, 0.5):
        return None
    equal = f"{share(n.zero_variance)} of the groups have equal rewards"
    accuracy = "" if n.accuracy is None else f" (held-out accuracy {n.accuracy:.3f})"
    if over(n.solve_all, 0.5):
        right = f"in {share(n.solve_all)} every answer is right{accuracy}"
        remedy = "The task is solved: use harder prompts, or end the run."
        return "solved", f"Little is still being learned: {equal}, and {right}. {remedy}"
    if over(n.solve_none, 0.5):
        wrong = f"in {share(n.solve_none)} no answer is right{accuracy}"
        remedy = "Use easier prompts, or look into Groups: the reward may not recognise right answers."
        return "too_hard", f"Little is being learned: {equal}, and {wrong}. {remedy}"
    remedy = "set algorithm.filter_groups=true, or use other prompts"
    return "equal_rewards", f"{equal} and teach nothing{accuracy}: {remedy}."


def _bottleneck(n: Numbers) -> Said | None:
    """Return who waits for whom: the rules of speed."""
    waits, idle = f"The trainer waits for rollouts {share(n.trainer_idle)} of the time", share(n.replica_idle)
    trainer_waits, replicas_wait = over(n.trainer_idle, 0.2), over(n.replica_idle, 0.2)
    if trainer_waits and replicas_wait and under(n.free_slots, 0.5):
        remedy = f"raise rollout.max_staleness (now {n.max_staleness})"
        return "slots", f"{waits} while replicas are idle {idle} of it and no slot is free: {remedy}."
    if trainer_waits and n.waiting is not None and n.waiting >= 1 and under(n.kv_usage, 0.6):
        queue = f"{n.waiting:.0f} requests queue at a replica with its KV cache {share(n.kv_usage)} full"
        return "seats", f"{waits}; {queue}: raise rollout.max_num_seqs (now {n.max_num_seqs})."
    if trainer_waits:
        remedy = f"add replicas (rollout.num_replicas, now {n.num_replicas})"
        return "replicas", f"{waits}, and replicas are idle {idle} of it: {remedy}."
    if replicas_wait:
        return "ranks", (
            f"Replicas are idle {idle} of the time and the trainer waits {share(n.trainer_idle)} of it: the trainer is "
            "the slower side. Add ranks (trainer.num_ranks), or take a replica away."
        )
    if n.pause_s is not None and n.step_s is not None and n.pause_s > 0.05 * n.step_s > 0:
        return "pauses", (
            f"Updates freeze replicas for {1000 * n.pause_s:.0f} ms in each step of {n.step_s:.2f} s "
            f"({share(n.pause_s / n.step_s)}): raise weight_sync.interval, or see docs/weight-sync.md."
        )
    return None


def _tokens(n: Numbers) -> Said | None:
    """Return what is wrong with the tokens that are trained."""
    if over(n.cut, 0.3):
        return "cut", f"{share(n.cut)} of the responses are cut off: raise rollout.max_response_tokens."
    if under(n.ess, 0.5):
        return "off_policy", (
            f"The effective sample size is {share(n.ess)}: tokens are too far off-policy; "
            f"lower rollout.max_staleness (now {n.max_staleness}) or trainer.lr."
        )
    return None


def share(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def count(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def over(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit


def under(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def gather(
    rows: Sequence[Mapping[str, float]], config: Mapping[str, Any], loads: Sequence[Mapping[str, Any]] = ()
) -> Numbers:
    """Return the numbers of the latest steps.

    Args:
        rows: the finite metrics of steps, oldest first.
        config: the values by key, such as "rollout.max_staleness".
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
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return Numbers(
        steps=len(latest),
        trainer_idle=mean("perf/trainer_idle"),
        replica_idle=mean("perf/replica_idle"),
        free_slots=mean("rollout/free_slots"),
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
        accuracy=accuracies[-1] if accuracies else None,
        solve_all=mean("rollout/solve_all"),
        solve_none=mean("rollout/solve_none"),
        steps_done=int(steps[-1].get("step", len(steps))) if steps else 0,
        max_staleness=config.get("rollout.max_staleness"),
        max_num_seqs=config.get("rollout.max_num_seqs"),
        num_replicas=config.get("rollout.num_replicas"),
    )
