"""Keys and values of Python as the overrides of a command line."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from configs.cli.arguments import quoted
from configs.cli.overrides import FREE
from configs.load import key_docs
from configs.rewards import parse_reward
from configs.validate import ConfigError
from rollout.rewards.base import number_text
from scripts.api import functions
from scripts.api.functions import reference, refuse

Reward = str | Callable[..., Any] | tuple[float, Any] | Sequence[Any]
"""A reward: a function, a name of rollout.reward, one of them with its weight, or a list of these, which are added."""


def words(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the overrides of keys, which may be dotted, nested or both.

    Example: words({"trainer.lr": 1e-4, "rollout": {"max_staleness": 1}}) ==
        ["trainer.lr=0.0001", "rollout.max_staleness=1"]
    """
    return [f"{key}={text}" for name, value in overrides.items() for key, text in _pairs(f"{prefix}{name}", value)]


def _pairs(key: str, value: Any) -> Iterator[tuple[str, str]]:
    is_section = key not in key_docs() or f"{key}." in FREE
    is_empty_entry = value == {} and key.lstrip("+").startswith(FREE)  # a source that differs in nothing is one, too
    if isinstance(value, Mapping) and is_section and not is_empty_entry:
        for name, inner in value.items():
            yield from _pairs(f"{key}.{name}", inner)
    else:
        yield key, text(key, value)


def text(key: str, value: Any) -> str:
    """Return a value in Hydra's grammar. Raises ConfigError for one that no config can hold."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return text(key, value.value)
        case np.generic():  # np.float64 is a float, too, whose repr is no number
            return text(key, value.item())
        case int() | float():
            return repr(value)
        case str() | Path():
            return quoted(str(value))
        case Mapping():
            return "{" + ",".join(f"{_dict_key(key, name)}:{text(key, inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(text(key, entry) for entry in value) + "]"
    if callable(value):
        return quoted(reference(key, value))
    raise ConfigError(f"{key}={value!r:.100}: is of type {type(value).__name__}, which no config holds")


def _dict_key(key: str, name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"{key}: its entries are named by plain words, not by {name!r}")
    return name


def reward_text(reward: Reward) -> str:
    """Return the value of rollout.reward. A weight of several counts for each of them.

    Example: reward_text([my_reward, (0.1, "format")]) == "my_module:my_reward+0.1*format"
    """
    match reward:
        case str():
            return reward
        case list():
            return "+".join(map(reward_text, reward))
        case (int() | float() | np.number() as weight, term):
            try:
                terms = parse_reward(reward_text(term))
                return "+".join(f"{number_text(float(weight) * each.weight)}*{each.path}" for each in terms)
            except ValueError as error:
                raise ConfigError(str(error)) from error
    if callable(reward):
        refuse("rollout.reward", functions.reward, reward)
        return reference("rollout.reward", reward)
    raise ConfigError(
        f"rollout.reward={reward!r:.100}: must be a function, a name, (weight, reward) or a list of these"
    )
