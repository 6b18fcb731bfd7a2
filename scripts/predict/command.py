"""Parse the arguments of `python -m scripts.predict`: key=value, several values with commas between them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scripts.simulate.profile import PredictError, Profile, from_fields
from scripts.simulate.setup import KEYS, Setup

PARTS = ("sweep", "marginal", "costs")
OWN = ("run", "profile", "save", "only")
FIELDS = {key: name for name, key in KEYS.items()}
STEPS = 20
"""The number of steps that are simulated by default."""
RAREST = 2
"""Evaluations whose period is more than so many times the simulated steps are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    runs: tuple[Path, ...] = ()
    """The runs that the profile is fitted to. Everything is compared with the configuration of the first."""
    profile: Path | None = None
    save: Path | None = None
    parts: tuple[str, ...] = PARTS
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `Setup` with one value."""
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The fields of `Setup` with several values, which are swept."""
    profile_fields: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `Profile` that replace what was measured."""

    def setup(self, run_setup: Setup | None) -> Setup:
        """Return the configuration that everything is compared with: the run's, or else the first of all values.

        Its steps are whole periods of weight updates and evaluations, so that every configuration has as many of them.
        Evaluations that are too rare for that are left out.
        """
        base, first = run_setup or Setup(), dict[str, Any]()
        if run_setup is None:
            first = {name: values[0] for name, values in self.axes.items()}
        values = {"interval": base.interval, "steps": STEPS, **first, **self.fixed}
        checked = replace(base, **{**values, "interval": 1})
        most = RAREST * checked.steps
        periods = [
            *self._values("interval", base),
            *(every for every in self._values("eval_every", base) if every <= most),
        ]
        period = math.lcm(*(period for period in periods if period > 0))
        return replace(
            checked,
            interval=values["interval"],
            eval_every=checked.eval_every if checked.eval_every <= most else 0,
            steps=-(-checked.steps // period) * period,
        )

    def _values(self, name: str, base: Setup) -> list[int]:
        """Return all values that the field is to have. One that it cannot have is refused later."""
        values = self.axes.get(name, (self.fixed.get(name, getattr(base, name)),))
        return [value for value in values if isinstance(value, int)]

    def changed(self, profile: Profile | None) -> Profile:
        """Return the profile with the fields that the arguments set; without a profile, they must set all of it."""
        if profile is None:
            return from_fields(self.profile_fields)
        if not self.profile_fields:
            return profile
        required: dict[str, Any] = {"step_s": 1.0, "turn_tokens": 1.0, "train_s": 1.0}
        by_hand = from_fields(required | dict(self.profile_fields))
        return replace(profile, **{name: getattr(by_hand, name) for name in self.profile_fields})


def parse(words: Sequence[str]) -> Arguments:
    """Parse the words of the command line. Raises PredictError, which names the key and what is allowed."""
    own: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    axes: dict[str, tuple[Any, ...]] = {}
    profile_fields: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise PredictError(f"{word}: must be key=value")
        if key in OWN:
            own[key] = text
        elif key.startswith("profile."):
            profile_fields[key.removeprefix("profile.")] = _yaml(text)
        elif key in FIELDS:
            first, *rest = [_value(entry) for entry in text.split(",")]
            if rest:
                axes[FIELDS[key]] = (first, *rest)
            else:
                fixed[FIELDS[key]] = first
        else:
            allowed = ", ".join([*OWN, *FIELDS, "profile.FIELD"])
            raise PredictError(f"{key}: is no key; there are {allowed}")
    if "run" in own and "profile" in own:
        raise PredictError("run and profile: give one of them")
    if not own.keys() & {"run", "profile"} and not profile_fields:
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
        profile_fields=profile_fields,
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
        parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
    except Exception as error:  # of the parser
        raise PredictError(f"{text}: is no YAML: {error}") from error
    return parsed["value"]
