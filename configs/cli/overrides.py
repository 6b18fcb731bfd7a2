"""Refuses overrides of keys that do not exist, or that would do nothing, and says what was meant."""

import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override, ValueType

from configs import load
from configs.checks.secrets import NOT_SHOWN, secret_in_argument
from configs.cli.arguments import parsed
from configs.cli.peers import Equivalent, equivalents
from configs.validate import ConfigError

HYDRA_OPTIONS = {
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
}
RENAMED_VALUES = {("trainer.layout", "shared_prompt"): "tree", ("trainer.layout", "padded"): "packed"}
"""(key, former value) -> what it is called now."""


MAIN_SECTIONS = ("trainer", "rollout", "algorithm")
"""The sections that a bare name such as `lr` means first."""
FREE = ("rollout.engine_args.", "rollout.agent_args.", "data.loader_args.", "data.sources.")
"""Sections with keys of other programs, which `configs.validate` checks with their values."""


@cache
def groups() -> frozenset[str]:
    """Choices of several keys at once, such as `recipe`."""
    return frozenset(path.parent.name for path in Path(load.__file__).parent.glob("*/*.yaml"))


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises ConfigError for one whose key does not exist, with suggestions, that deletes a key, or that holds a
    secret, before Hydra writes it into a file."""
    for override in overrides:
        key, _, value = override.partition("=")
        if (why := secret_in_argument(key := key.lstrip("+~"), value, key in load.key_docs())) is not None:
            raise ConfigError(f"{key}={NOT_SHOWN}: {why}")
    for override in parsed(overrides):
        key = override.key_or_group
        if key == "model" and "/" in (name := _value(override)):
            raise ConfigError(f"model={name}: a model of the hub or of a folder is model=hf model.path={name}")
        if key.startswith(("hydra", *FREE)) or key in groups():
            continue
        if override.is_delete():
            raise ConfigError(f"~{key}: keys cannot be deleted; set {_instead(key)}")
        if _lacks_brackets(override):
            raise ConfigError(f"{key}={_value(override)}: is a list: {key}=[{_value(override)}]")
        if key not in load.key_docs():
            raise ConfigError(f"{key}={_value(override)}: there is no such key; {hint(key)}")
        if load.key_docs()[key][0] in ("true", "false") and _has_another_number(override.value()):
            raise ConfigError(f"{key}={_value(override)}: must be true or false")


def _has_another_number(value: Any) -> bool:
    """Return whether the value, or one of those of a sweep, is a whole number other than 0 and 1, which OmegaConf takes
    for true."""
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    return any(isinstance(each, int) and each not in (0, 1) for each in values)


def hint(key: str) -> str:
    """Return a hint for a key that does not exist: what another framework means by it, or which keys it resembles."""
    if theirs := list(dict.fromkeys(_translated(*equivalent) for equivalent in equivalents(key))):
        return "; ".join(theirs)
    docs = load.key_docs()
    near = [known for known in docs if known.split(".")[-1] == key.split(".")[-1]]
    near.sort(key=lambda known: known.partition(".")[0] not in MAIN_SECTIONS)
    near += [like for like in difflib.get_close_matches(key, [*docs, *groups()], n=3, cutoff=0.5) if like not in near]
    return f"did you mean {' or '.join(near)}?" if near else "--help lists the sections, --help SECTION their keys"


def check_options(options: Sequence[str]) -> None:
    """Raises ConfigError for an option that neither this project nor Hydra has. Other frameworks take their keys as
    options."""
    for option in options:
        name, _, value = option.lstrip("-").partition("=")
        if option.startswith("--") and f"--{name}" not in HYDRA_OPTIONS:
            said = f"keys are given as {name}={value or 'VALUE'}" if name in load.key_docs() else hint(name)
            raise ConfigError(f"--{name}: there is no such option; {said}")


def _lacks_brackets(override: Override) -> bool:
    """Return whether one value is given to a key that takes a list."""
    default = load.key_docs().get(override.key_or_group, ("", ""))[0]
    return default.startswith("[") and override.value_type is ValueType.ELEMENT and isinstance(override.value(), str)


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
