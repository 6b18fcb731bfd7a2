"""One sentence that says what to change, with its numbers, from predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.predict.counterfactual import Cost
from scripts.predict.simulate import Prediction

GAIN = 0.05
"""Predicted gain in throughput below which nothing is proposed, and share of a step below which no cost is told."""
ALIKE = 0.02
"""Of changes whose gains differ by less, the first that was tried is proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change with what was predicted for it."""

    change: str
    """For example "rollout.max_staleness=4"."""
    samples_per_s: float
    is_free: bool = True
    """It needs no more replicas and ranks than there are."""


@dataclass(frozen=True, slots=True)
class Advice:
    text: str
    gain: float
    """Of the free change that it proposes; 0 where it proposes none."""


def advice(now: Prediction, options: Sequence[Option], costs: Sequence[Cost] = ()) -> Advice:
    """What predictions say. `costs`: what things cost a step, the dearest first."""
    step_s, wait_s = now.seconds / len(now.step_s), sum(now.wait_s) / len(now.wait_s)
    text = (
        f"A step of {step_s:.2f} s waits {wait_s:.2f} s ({wait_s / step_s:.0%}) for rollouts, and replicas have no "
        f"request {now.replica_idle:.0%} of the time"
    )
    dear = [cost for cost in costs if cost.step_s >= GAIN * step_s][:2]
    if dear:
        text += "; " + ", ".join(f"without {cost.of} it would take {cost.step_s:.2f} s less" for cost in dear)
    free, dearer = _best(now, options, is_free=True), _best(now, options, is_free=False)
    found: list[str] = []
    if free is not None and free[1] >= GAIN:
        found.append(f"{free[0].change} gives {free[1]:+.0%} samples/s on the same machines")
    elif free is not None:
        found.append(f"no change that was tried gives {GAIN:.0%} more samples/s on the same machines")
    if dearer is not None and dearer[1] >= GAIN:
        found.append(f"{dearer[0].change} gives {dearer[1]:+.0%}")
    gain = free[1] if free is not None and free[1] >= GAIN else 0.0
    return Advice(f"{text}: {', '.join(found)}." if found else f"{text}.", gain)


def _best(now: Prediction, options: Sequence[Option], *, is_free: bool) -> tuple[Option, float] | None:
    gains = [(one, one.samples_per_s / now.samples_per_s - 1) for one in options if one.is_free is is_free]
    most = max((gain for _, gain in gains), default=0.0)
    return next((pair for pair in gains if pair[1] >= most - ALIKE), None)
