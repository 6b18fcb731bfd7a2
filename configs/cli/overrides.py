"""Refuses overrides of keys that do not exist, or that would do nothing, and says what was meant."""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from hydra.core.override_parser.types import Override

from configs import load
from configs.checks.secrets import NOT_SHOWN, secret_in_argument
from configs.cli.arguments import parsed
from configs.cli.peers import Equivalent, equivalents
from configs.validate import ConfigError

RENAMED_VALUES = {("trainer.layout", "shared_prompt"): "tree", ("trainer.layout", "padded"): "packed"}
"""(key, former value) -> what it is called now."""


FREE = ("rollout.engine_args.", "rollout.agent_args.", "data.loader_args.")
"""Sections with keys of other programs, which `configs.validate` checks with their values."""


@cache
def groups() -> frozenset[str]:
    """Choices of several keys at once, such as `recipe`."""
    return frozenset(path.parent.name for path in Path(load.__file__).parent.glob("*/*.yaml"))


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError for one whose key does not exist, with suggestions, that deletes a key, or that holds a
    secret, before Hydra writes it into a file."""
    for given in overrides:
        key, _, value = given.partition("=")
        if (why := secret_in_argument(key := key.lstrip("+~"), value, key in load.key_docs())) is not None:
            raise ConfigError(f"{key}={NOT_SHOWN}: {why}")
    for override in parsed(overrides):
        key = override.key_or_group
        if key.startswith("hydra") or key in groups():
            continue
        if key.startswith(FREE):
            continue
        if override.is_delete():
            raise ConfigError(f"~{key}: keys cannot be deleted; set {_instead(key)}")
        if key not in load.key_docs():
            raise ConfigError(f"{key}={_value(override)}: there is no such key; {hint(key)}")


def hint(key: str) -> str:
    """What to say of a key that does not exist: whose it is, or what it resembles."""
    if theirs := list(dict.fromkeys(_translated(*found) for found in equivalents(key))):
        return "; ".join(theirs)
    docs = load.key_docs()
    near = difflib.get_close_matches(key, [*docs, *groups()], n=3, cutoff=0.5)
    near += [known for known in docs if known.split(".")[-1] == key.split(".")[-1] and known not in near]
    return f"did you mean {' or '.join(near)}?" if near else "--help lists the sections, --help SECTION their keys"


def _translated(equivalent: Equivalent, framework: str, theirs: str) -> str:
    if equivalent.is_sentence:
        return f"of {framework}'s {theirs} there is no equivalent: {equivalent.here}"
    differs = f" ({equivalent.differs})" if equivalent.differs else ""
    return f"{framework}'s {theirs} is {equivalent.here} here{differs}"


def _instead(key: str) -> str:
    if key == "wandb":
        return "wandb.mode=disabled to turn it off"
    return f"{key} to another value" if key in load.key_docs() else f"the keys of {key} one by one"


def _value(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]
