"""Settings of another framework, as they were read from its script or file. Nothing of it is run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE | re.ASCII)


class UnreadableError(ValueError):
    """A file that says nothing that could be read. The message says why."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only running the file would tell.

    Example: Unknown("$(nproc)")
    """

    text: str


@dataclass(frozen=True, slots=True)
class Unread:
    """A place of theirs that is not read, and why.

    Example: Setting("--config-name=other.yaml", Unread("no setting; its file is not read"))
    """

    why: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Example: Setting("data.train_batch_size", 1024)"""

    key: str
    value: Any
    """None, a truth value, a number, a text, a list of these, Unknown or Unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The content of a script or file."""

    framework: str
    """One of FRAMEWORKS of `configs.cli.peers`, such as "prime_rl"."""
    settings: tuple[Setting, ...]


def typed(text: str) -> Any:
    """Return the value of a text as these frameworks' command lines read it: 1e-6 is a number, True a truth value."""
    if NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    if text.lower() in ("none", "null", "~"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, bool | list) else text


def last_of_each(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return the settings without those that a later one of the same key replaces."""
    return tuple({setting.key: setting for setting in settings}.values())


def flat(tree: Any, prefix: str = "") -> list[Setting]:
    """Return the leaves of nested tables with dotted keys."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return [Setting(prefix, tree)]
    inner = [(f"{prefix}.{name}" if prefix else str(name), value) for name, value in tree.items()]
    return [setting for key, value in inner for setting in flat(value, key)]
