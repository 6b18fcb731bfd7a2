"""What the predictor knows of a job and a machine: how long everything takes. JSON in and out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.predict.quantiles import Quantiles


class PredictError(ValueError):
    """The message says what was given, and what is allowed."""


def _constant(value: float) -> Any:
    return field(default=Quantiles((value,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds and tokens. `fit.py` takes them from a run; a file or command line gives them by hand.

    Example: Profile(step_s=0.01, step_s_per_request=1e-4, turn_tokens=Quantiles.lognormal(800, 0.8, 8192))
    """

    # -- an engine
    step_s: float
    """One decoding step of an engine: every running request gets a token. To this comes `step_s_per_request`."""
    step_s_per_request: float = 0.0
    """So much longer does a step take with each running request."""
    prefill_s_per_token: float = 0.0
    """Each prompt token that is in no cache delays the step in which its request begins by this."""

    # -- an episode
    turns: Quantiles = _constant(1)
    """Turns of the policy in an episode."""
    turn_tokens: Quantiles
    """Tokens that the policy samples in a turn."""
    uncached_tokens: Quantiles = _constant(0)
    """Prompt tokens of a turn that are in no cache."""
    tool_s: Quantiles = _constant(0)
    """After a turn, until the next one or the end of the episode: tool, environment and the way there and back. It
    counts in episodes with tools only."""
    has_tools: bool = False
    """Every episode is run by itself. Without, those of a group are one call, and keep their room until all end."""
    reward_s: Quantiles = _constant(0)
    """Reward, until the trainer may have the group."""
    dispatch_s: float = 0.0
    """From a claimed slot until the requests are at the replica."""
    alike: float = 0.0
    """How alike lengths are among trajectories of one prompt: correlation within a group, 0 to 1."""

    # -- a step of the trainer
    train_s: float
    """A step of the optimizer, whatever its batch."""
    train_s_per_token: float = 0.0
    """Per token that it computes on one rank; n ranks are taken to share them evenly."""
    computed_per_sampled: float = 1.0
    """Tokens that the trainer computes (prompts and padding too, groups without a gradient not) over those sampled."""
    driver_s: float = 0.0
    """What the driver does in a step before and after: advantages, layout, records."""

    # -- an update of the weights
    publish_s: float = 0.0
    """The trainer waits for this."""
    stage_s: float = 0.0
    """The replicas generate meanwhile."""
    swap_s: float = 0.0
    """They stand still."""

    # -- from time to time
    checkpoint_s: float = 0.0
    """What the trainer waits for a checkpoint."""
    evaluation_requests: int = 0
    """Held-out prompts times samples: they are taken to be as long as the training's."""

    # -- a machine whose cores they share, as a laptop's
    cores: float = 0.0
    """That engines and trainer share; 0: everybody has its own. Where all that work ask for more than there are,
    everybody takes so many times longer."""
    engine_cores: float = 1.0
    """Of them, those that an engine keeps busy while it generates, with all that belongs to it."""
    rank_cores: float = 1.0
    """And those of a train worker while it trains."""

    assumed: tuple[str, ...] = ()
    """What could not be measured and was taken for granted, in sentences."""

    def __post_init__(self) -> None:
        """Raises PredictError for a value that cannot be."""
        for one in fields(self):
            value = getattr(self, one.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not 0.0 <= value < float("inf"):
                raise PredictError(f"profile.{one.name}={value}: must be at least 0, and finite")
        if self.alike > 1:
            raise PredictError(f"profile.alike={self.alike}: must be between 0 and 1")
        if self.step_s + self.step_s_per_request <= 0:
            raise PredictError(f"profile.step_s={self.step_s}: a step must take time")
        if self.turns.values[0] < 1 or self.turn_tokens.values[-1] < 1:
            raise PredictError("profile.turns and profile.turn_tokens: must be at least 1")

    @property
    def tokens_per_trajectory(self) -> float:
        return self.turns.mean * self.turn_tokens.mean


QUANTILES = {"turns", "turn_tokens", "uncached_tokens", "tool_s", "reward_s"}
BY_HAND = "a number, a list of quantiles, or {mean: M, sigma: S, cap: C} of a log-normal"


def to_json(profile: Profile) -> str:
    fields_of = asdict(profile)
    for name in QUANTILES:
        values = fields_of[name]["values"]
        fields_of[name] = values[0] if len(values) == 1 else list(values)
    return json.dumps(fields_of, indent=1) + "\n"


def from_fields(given: Mapping[str, Any]) -> Profile:
    """The reverse of `to_json`, and what is written by hand. Raises PredictError."""
    known = {one.name: one for one in fields(Profile)}
    if unknown := sorted(set(given) - set(known)):
        raise PredictError(f"profile.{unknown[0]}: no such field; there are {', '.join(known)}")
    if missing := sorted({"step_s", "turn_tokens", "train_s"} - set(given)):
        raise PredictError(f"profile.{missing[0]} is missing: a profile needs step_s, turn_tokens and train_s")
    return Profile(**{name: _value(name, value) for name, value in given.items()})


def read_profile(path: Path) -> Profile:
    """Of a file of JSON or YAML. Raises PredictError and OSError."""
    try:
        given: Any = OmegaConf.to_container(OmegaConf.load(path))
    except OSError:
        raise
    except Exception as error:  # of the parser
        raise PredictError(f"profile={path}: cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise PredictError(f"profile={path}: must be a mapping of fields to values")
    return from_fields({str(name): value for name, value in given.items()})


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
