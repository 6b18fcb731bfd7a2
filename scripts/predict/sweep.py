"""Simulate other configurations and other worlds: which is how fast, and what does a step wait for?

What something costs is told by a counterfactual: the same run without it, and the difference. What overlaps with
something as long costs nothing, however long it takes; a stopwatch would blame it all the same. So the costs need not
add up to the wait: what two things cause together, neither costs alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from scripts.simulate.profile import Profile
from scripts.simulate.quantiles import Quantiles
from scripts.simulate.setup import KEYS, Setup
from scripts.simulate.simulate import Prediction, simulate

STALENESS = (0, 1, 2, 4, 8)
POLICIES = ("wait", "mask", "drop")


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration, and what was predicted for it."""

    change: Mapping[str, Any]
    """The fields of `Setup` that differ from the base, with their values."""
    prediction: Prediction

    @property
    def name(self) -> str:
        """The change as overrides of a command line."""
        return " ".join(f"{KEYS[field]}={value}" for field, value in self.change.items()) or "as it is"


def around(base: Setup) -> list[dict[str, Any]]:
    """Return changes of one thing at a time: half and twice of most, and the usual values of the others."""
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


def cross_axes(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the values, by field of `Setup`."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def sweep(profile: Profile, base: Setup, changes: Sequence[Mapping[str, Any]]) -> Iterator[Choice]:
    """Simulate every change. All draw the same episodes for a prompt, so that only the configurations differ."""
    # Made before the first simulation, so that a value that cannot be is an error at once.
    setups = [replace(base, **change) for change in changes]
    for change, setup in zip(changes, setups, strict=True):
        yield Choice(change, simulate(profile, setup))


@dataclass(frozen=True, slots=True, kw_only=True)
class Marginal:
    """The samples per second that one more replica and one more rank would add."""

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


# -- counterfactuals ---------------------------------------------------------------------------------------------------

LONGEST = 0.9
"""The quantile at which lengths are cut off in a world without stragglers."""
NONE = Quantiles((0.0,))


@dataclass(frozen=True, slots=True)
class World:
    """A world: everything that a simulation is made of."""

    profile: Profile
    setup: Setup
    longest: float = 1.0


WITHOUT: Mapping[str, Callable[[World], World]] = {
    "stragglers": lambda world: replace(world, longest=LONGEST),
    "updates": lambda world: replace(world, profile=replace(world.profile, publish_s=0.0, stage_s=0.0, swap_s=0.0)),
    "tools": lambda world: replace(world, profile=replace(world.profile, tool_s=NONE)),
    "rewards": lambda world: replace(world, profile=replace(world.profile, reward_s=NONE)),
    "evaluations": lambda world: replace(world, profile=replace(world.profile, evaluation_requests=0)),
    "checkpoints": lambda world: replace(world, setup=replace(world.setup, checkpoint_every=0)),
    "shared cores": lambda world: replace(world, profile=replace(world.profile, cores=0.0)),
}
"""The things that can be taken away from a world, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one thing for a step."""

    name: str
    step_s: float
    """The seconds of a step that it costs, the mean over the steps; below 0 if it helps."""
    wait_s: float
    """The part of these seconds in which the trainer waits for its batch."""


def costs(profile: Profile, base: Prediction) -> list[Cost]:
    """Return what everything in the run costs, the dearest first."""
    world, steps, costs = World(profile, base.setup), len(base.step_s), list[Cost]()
    for name, take_away in WITHOUT.items():
        without = take_away(world)
        if without != world and _differs(name, world):
            other = simulate(without.profile, without.setup, longest=without.longest)
            wait_s = (sum(base.wait_s) - sum(other.wait_s)) / steps
            costs.append(Cost(name=name, step_s=(base.seconds - other.seconds) / steps, wait_s=wait_s))
    return sorted(costs, key=lambda cost: -cost.step_s)


def _differs(name: str, world: World) -> bool:
    """Return whether the run has any of it."""
    profile = world.profile
    if name == "stragglers":
        return any(values.at(1.0) > values.at(LONGEST) for values in (profile.turn_tokens, profile.turns))
    if name == "evaluations":
        return world.setup.eval_every > 0
    return name != "checkpoints" or profile.checkpoint_s > 0
