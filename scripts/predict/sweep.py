"""Other configurations than the one of the run: which is how fast, and what one more replica or rank is worth."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from scripts.predict.profile import PredictError, Profile
from scripts.predict.setup import KEYS, Setup
from scripts.predict.simulate import Prediction, simulate

STALENESS = (0, 1, 2, 4, 8)
POLICIES = ("wait", "mask", "drop")


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration with its prediction."""

    change: Mapping[str, Any]
    """Field of `Setup` -> value, where it differs from the base."""
    prediction: Prediction

    @property
    def name(self) -> str:
        """As overrides of a command line."""
        return " ".join(f"{KEYS[field]}={value}" for field, value in self.change.items()) or "as it is"


def around(base: Setup) -> list[dict[str, Any]]:
    """One change at a time: half and twice of most, and all that is usual of the others."""
    changes: list[dict[str, Any]] = [{"max_staleness": value} for value in STALENESS if value != base.max_staleness]
    for field in ("num_replicas", "num_ranks", "max_num_seqs", "group_size"):
        value = getattr(base, field)
        changes += [{field: other} for other in (value // 2, 2 * value) if other >= 1]
    total, parts = base.num_replicas + base.num_ranks, range(1, base.num_replicas + base.num_ranks)
    changes += [
        {"num_replicas": replicas, "num_ranks": total - replicas}
        for replicas in (base.num_replicas - 1, base.num_replicas + 1)
        if replicas in parts
    ]
    is_whole = base.steps % (2 * base.interval) == 0
    changes.append({"interval": 2 * base.interval, "steps": base.steps if is_whole else 2 * base.steps})
    changes += [{"stale_policy": policy} for policy in POLICIES if policy != base.stale_policy]
    return changes


def of_axes(base: Setup, axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, by field of `Setup`."""
    changes = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if not changes:
        raise PredictError("nothing to sweep")
    return changes


def sweep(profile: Profile, base: Setup, changes: Sequence[Mapping[str, Any]]) -> Iterator[Choice]:
    """All draw the same episodes for the same prompts, so that differences are those of the configurations."""
    setups = [replace(base, **change) for change in changes]  # a value that cannot be is an error before it starts
    for change, setup in zip(changes, setups, strict=True):
        yield Choice(change, simulate(profile, setup))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal:
    """Samples per second that come with one more of each."""

    base: float
    replica: float
    rank: float


def marginal(profile: Profile, base: Prediction) -> Marginal:
    setup = base.setup
    more_replicas = simulate(profile, replace(setup, num_replicas=setup.num_replicas + 1))
    more_ranks = simulate(profile, replace(setup, num_ranks=setup.num_ranks + 1))
    return Marginal(
        base=base.samples_per_s,
        replica=more_replicas.samples_per_s - base.samples_per_s,
        rank=more_ranks.samples_per_s - base.samples_per_s,
    )
