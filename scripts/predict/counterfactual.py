"""What a step waits for, by counterfactual: the same run without it, and the difference.

What overlaps with something as long costs nothing, however long it takes; a stopwatch on it would blame it all the
same. So the parts need not add up to the wait: what two of them cause together, neither costs alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scripts.predict.profile import Profile
from scripts.predict.quantiles import Quantiles
from scripts.predict.setup import Setup
from scripts.predict.simulate import Prediction, simulate

LONGEST = 0.9
"""Without stragglers, lengths beyond this quantile are cut off at it."""
NONE = Quantiles((0.0,))


@dataclass(frozen=True, slots=True)
class World:
    """All that a simulation is made of."""

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
"""What is taken away, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one thing costs."""

    of: str
    step_s: float
    """Seconds per step, the mean over steps; below 0 where it helps."""
    wait_s: float
    """Of them, what the trainer waits for its batch less without it."""
    of_steps: tuple[float, ...]
    """Seconds by step."""


def costs(profile: Profile, base: Prediction) -> list[Cost]:
    """Of all that the run has, the dearest first."""
    world = World(profile, base.setup)
    found = [
        _cost(name, base, without)
        for name, take_away in WITHOUT.items()
        if (without := take_away(world)) != world and _differs(name, world)
    ]
    return sorted(found, key=lambda cost: -cost.step_s)


def _differs(name: str, world: World) -> bool:
    """Whether the run has any of it."""
    profile = world.profile
    if name == "stragglers":
        return any(one.at(1.0) > one.at(LONGEST) for one in (profile.turn_tokens, profile.turns))
    if name == "evaluations":
        return world.setup.eval_every > 0
    return name != "checkpoints" or profile.checkpoint_s > 0


def _cost(name: str, base: Prediction, without: World) -> Cost:
    other = simulate(without.profile, without.setup, longest=without.longest)
    steps = len(base.step_s)
    return Cost(
        of=name,
        step_s=(base.seconds - other.seconds) / steps,
        wait_s=(sum(base.wait_s) - sum(other.wait_s)) / steps,
        of_steps=tuple(one - another for one, another in zip(base.step_s, other.step_s, strict=True)),
    )
