"""The arguments of `python -m scripts.predict`: key=value, several values with commas between them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.predict.profile import PredictError, Profile, from_fields
from scripts.predict.setup import KEYS, Setup

PARTS = ("sweep", "marginal", "costs")
OWN = ("run", "profile", "save", "only")
FIELDS = {key: name for name, key in KEYS.items()}
STEPS = 20
"""That are simulated, where none are given."""
RAREST = 2
"""Evaluations that come more rarely than every so many times the steps are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    runs: tuple[Path, ...] = ()
    """That the profile is fitted to. The first one's configuration is what everything is compared with."""
    profile: Path | None = None
    save: Path | None = None
    parts: tuple[str, ...] = PARTS
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Field of `Setup` -> value."""
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field of `Setup` -> values to sweep."""
    of_profile: Mapping[str, Any] = field(default_factory=dict)
    """Field of `Profile` -> value, in place of what was measured."""

    def setup(self, of_run: Setup | None) -> Setup:
        """The configuration that everything is compared with: the run's, or else the first of all that are given.

        Its steps are whole periods of weight updates and evaluations, so that every configuration has as many of them.
        Evaluations that are rarer than that are left out.
        """
        base, first = of_run or Setup(), dict[str, Any]()
        if of_run is None:
            first = {name: values[0] for name, values in self.axes.items()}
        given = {"interval": base.interval, "steps": STEPS, **first, **self.fixed}
        checked = replace(base, **{**given, "interval": 1})
        most = RAREST * checked.steps
        periods = [*self._values("interval", base), *(one for one in self._values("eval_every", base) if one <= most)]
        period = math.lcm(*(one for one in periods if one > 0))
        return replace(
            checked,
            interval=given["interval"],
            eval_every=checked.eval_every if checked.eval_every <= most else 0,
            steps=-(-checked.steps // period) * period,
        )

    def _values(self, name: str, base: Setup) -> list[int]:
        """All that the field is to have; what it cannot be is refused later."""
        values = self.axes.get(name, (self.fixed.get(name, getattr(base, name)),))
        return [one for one in values if isinstance(one, int)]

    def changed(self, profile: Profile | None) -> Profile:
        """The profile with what was given by hand; without one, all of it is."""
        if profile is None:
            return from_fields(self.of_profile)
        if not self.of_profile:
            return profile
        required: dict[str, Any] = {"step_s": 1.0, "turn_tokens": 1.0, "train_s": 1.0}
        given = from_fields(required | dict(self.of_profile))
        return replace(profile, **{name: getattr(given, name) for name in self.of_profile})


def parse(words: Sequence[str]) -> Arguments:
    """Raises PredictError, which names the key and what is allowed."""
    own: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}
    of_profile: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise PredictError(f"{word}: must be key=value")
        if key in OWN:
            own[key] = text
        elif key.startswith("profile."):
            of_profile[key.removeprefix("profile.")] = _yaml(text)
        elif key in FIELDS:
            first, *others = [_value(one) for one in text.split(",")]
            if others:
                axes[FIELDS[key]] = (first, *others)
            else:
                fixed[FIELDS[key]] = first
        else:
            allowed = ", ".join([*OWN, *FIELDS, "profile.FIELD"])
            raise PredictError(f"{key}: is no key; there are {allowed}")
    if "run" in own and "profile" in own:
        raise PredictError("run and profile: give one of them")
    if not own.keys() & {"run", "profile"} and not of_profile:
        raise PredictError("give run=FOLDER, profile=FILE, or a profile by hand, such as profile.step_s=0.01")
    if "steps" in axes:
        raise PredictError("trainer.total_steps: one value only, the number of steps that are simulated")
    return Arguments(
        runs=tuple(map(Path, own["run"].split(","))) if "run" in own else (),
        profile=Path(own["profile"]) if "profile" in own else None,
        save=Path(own["save"]) if "save" in own else None,
        parts=_parts(own.get("only")),
        fixed=fixed,
        axes=axes,
        of_profile=of_profile,
    )


def _parts(text: str | None) -> tuple[str, ...]:
    if text is None:
        return PARTS
    chosen = tuple(text.split(","))
    if wrong := [part for part in chosen if part not in (*PARTS, "base")]:
        raise PredictError(f"only={wrong[0]}: must be of base, {', '.join(PARTS)}")
    return chosen


def _value(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _yaml(text: str) -> Any:
    try:
        given: Any = OmegaConf.to_container(OmegaConf.create(f"it: {text}"))
    except Exception as error:  # of the parser
        raise PredictError(f"{text}: is no YAML: {error}") from error
    return given["it"]
