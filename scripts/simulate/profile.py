"""Profiles: how long everything takes for a job on a machine. JSON in and out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.simulate.quantiles import Quantiles


class PredictError(ValueError):
    """An argument or a run that nothing can be predicted from. The message says what was given and what is allowed."""


def _constant(value: float) -> Any:
    return field(default=Quantiles((value,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The times of a job in seconds, and its lengths in tokens. `scripts.predict.fit` takes them from a run; a file or
    the command line gives them by hand.

    Example: Profile(step_s=0.01, step_s_per_request=1e-4, turn_tokens=Quantiles.lognormal(800, 0.8, 8192))
    """

    # -- an engine
    step_s: float
    """The time of a decoding step of an engine, in which every running request gets a token, without
    `step_s_per_request`."""
    step_s_per_request: float = 0.0
    """The time that each running request adds to a step."""
    prefill_s_per_token: float = 0.0
    """Each prompt token that is in no cache delays the step in which its request begins by this."""
    kv_tokens: int = 0
    """The tokens that the KV cache of an engine holds; 0 has no bound. Where it is full, the newest requests are
    preempted: they keep their tokens, and the prefill of all of them delays the step in which they come back."""

    # -- an episode
    turns: Quantiles = _constant(1)
    """Turns of the policy in an episode."""
    turn_tokens: Quantiles
    """Tokens that the policy samples in a turn."""
    uncached_tokens: Quantiles = _constant(0)
    """Prompt tokens of a turn that are in no cache."""
    tool_s: Quantiles = _constant(0)
    """The seconds after a turn, until the next one or the end of the episode: tool, environment and the way there
    and back. They count only in episodes with tools."""
    has_tools: bool = False
    """Every episode is run by itself. Without, those of a group are one call, and keep their room until all end."""
    reward_s: Quantiles = _constant(0)
    """Reward, until the trainer may have the group."""
    dispatch_s: float = 0.0
    """The time from a claimed slot until the requests are at the replica."""
    alike: float = 0.0
    """The likeness of lengths among the trajectories of one prompt: their correlation within a group, 0 to 1."""

    # -- a step of the trainer
    train_s: float
    """A step of the optimizer, whatever its batch."""
    train_s_per_token: float = 0.0
    """Per token that it computes on one rank; n ranks are taken to share them evenly."""
    computed_per_sampled: float = 1.0
    """Tokens that the trainer computes (prompts and padding too, groups without a gradient not) over those sampled."""
    driver_s: float = 0.0
    """The time that the driver takes in a step before and after training: advantages, layout, records."""

    # -- an update of the weights
    publish_s: float = 0.0
    """The trainer waits for this."""
    stage_s: float = 0.0
    """The replicas generate meanwhile."""
    swap_s: float = 0.0
    """The replicas stand still meanwhile."""

    # -- from time to time
    checkpoint_s: float = 0.0
    """The time that the trainer waits for a checkpoint."""
    evaluation_requests: int = 0
    """Held-out prompts times samples: they are taken to be as long as the training's."""

    # -- a machine whose cores they share, as a laptop's
    cores: float = 0.0
    """The cores that engines and trainer share; 0 if everybody has its own. Where all that work ask for more than there
    are, everybody takes so many times longer."""
    engine_cores: float = 1.0
    """The cores that an engine keeps busy while it generates, with all that belongs to it."""
    rank_cores: float = 1.0
    """The cores that a train worker keeps busy while it trains."""

    assumed: tuple[str, ...] = ()
    """Sentences on what could not be measured and was taken for granted."""

    def __post_init__(self) -> None:
        """Check the values. Raises PredictError for one that cannot be."""
        for item in fields(self):
            value = getattr(self, item.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0.0 <= value < float("inf"):
                raise PredictError(f"profile.{item.name}={value}: must be at least 0, and finite")
        if self.alike > 1:
            raise PredictError(f"profile.alike={self.alike}: must be between 0 and 1")
        if self.step_s + self.step_s_per_request <= 0:
            raise PredictError(f"profile.step_s={self.step_s}: a step must take time")
        if self.turns.values[0] < 1 or self.turn_tokens.values[-1] < 1:
            raise PredictError("profile.turns and profile.turn_tokens: must be at least 1")


QUANTILES = {"turns", "turn_tokens", "uncached_tokens", "tool_s", "reward_s"}
BY_HAND = "a number, a list of quantiles, or {mean: M, sigma: S, cap: C} of a log-normal"


def to_json(profile: Profile) -> str:
    values_by_name = asdict(profile)
    for name in QUANTILES:
        values = values_by_name[name]["values"]
        values_by_name[name] = values[0] if len(values) == 1 else list(values)
    return json.dumps(values_by_name, indent=1) + "\n"


def from_fields(values: Mapping[str, Any]) -> Profile:
    """Make a profile of what `to_json` has written, or a person by hand. Raises PredictError."""
    known = {item.name: item for item in fields(Profile)}
    if unknown := sorted(set(values) - set(known)):
        raise PredictError(f"profile.{unknown[0]}: no such field; there are {', '.join(known)}")
    if missing := sorted({"step_s", "turn_tokens", "train_s"} - set(values)):
        raise PredictError(f"profile.{missing[0]} is missing: a profile needs step_s, turn_tokens and train_s")
    return Profile(**{name: _value(name, value) for name, value in values.items()})


def read_profile(path: Path) -> Profile:
    """Read a file of JSON or YAML. Raises PredictError and OSError."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError:
        raise
    except Exception as error:  # of the parser
        raise PredictError(f"profile={path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PredictError(f"profile={path}: must be a mapping of fields to values")
    return from_fields({str(name): value for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    if name in QUANTILES:
        return _quantiles(name, value)
    if name == "assumed":
        return tuple(map(str, value))
    wanted = bool if name == "has_tools" else (int, float)
    if not isinstance(value, wanted) or (name != "has_tools" and isinstance(value, bool)):
        raise PredictError(f"profile.{name}={value!r}: must be {'true or false' if wanted is bool else 'a number'}")
    return value


def _quantiles(name: str, value: Any) -> Quantiles:
    try:
        match value:
            case bool() | str():
                pass
            case int() | float():
                return Quantiles((float(value),))
            case [*values]:
                return Quantiles(tuple(map(float, values)))
            case {"mean": mean, "sigma": sigma, "cap": cap, **rest} if not rest:
                return Quantiles.lognormal(float(mean), float(sigma), float(cap))
    except (TypeError, ValueError) as error:
        raise PredictError(f"profile.{name}={value!r}: {error}") from error
    raise PredictError(f"profile.{name}={value!r}: must be {BY_HAND}")
