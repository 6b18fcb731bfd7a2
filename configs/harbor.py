"""The short form for tasks in Harbor's format: data.harbor=FOLDER stands for the keys that such tasks need.

In a source of data.sources it stands for keys of that source. `expanded` sets them when a config is loaded, and
`written_out` in what is written into config.yaml, so nothing else knows of two forms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, open_dict, read_write

from configs.data import NO_FILES
from configs.schema import Config
from configs.validate import ConfigError

LOADER = "rollout.environments.sandbox.harbor:rows"
AGENT_LOOP = "rollout.environments.sandbox.tools:agent_loop"
KEY = "data.harbor"
Keys = dict[str, dict[str, Any]]
"""Keys by section."""


def fixed_keys(folders: str) -> Keys:
    """Return the keys without which the tasks cannot be read, shown, done or rewarded."""
    return {
        "data": {
            "train_files": folders,
            "loader": LOADER,
            "loader_args": {},
            "prompt_key": "question",
            "answer_key": "answer",
            "chat_template": True,
        },
        "rollout": {
            "agent": None,
            "agent_command": None,
            "agent_loop": AGENT_LOOP,
            "reward": "rollout.environments.sandbox.hidden_tests:hidden_tests",
        },
    }


def free_keys(val_share: float | None) -> Keys:
    """Return the keys that may be set beside data.harbor, with the values that they have otherwise."""
    held_out = {"val_files": NO_FILES} if val_share is None else {}
    return {"data": {"prompt_template": "{question}", **held_out}}


def expanded(config: Config, overrides: Sequence[str] = ()) -> Config:
    """Return the config with what data.harbor stands for, in the run and in each source. `overrides`: the command line,
    whose keys are set even where they have the values of defaults.

    Raises:
        ConfigError: data.harbor is set beside keys that contradict it, or beside data.sources.
    """
    if config.data.sources and config.data.harbor is not None:
        raise ConfigError(f"{KEY}={config.data.harbor}: with data.sources, set data.sources.NAME.{KEY} instead")
    if config.data.harbor is not None:
        words = {word.partition("=")[0].lstrip("+~") for word in overrides}
        keys = _merged("", _set_keys(config, words), config.data.harbor, config.data.val_share)
        config = replace(config, **{name: replace(getattr(config, name), **values) for name, values in keys.items()})
    sources = {name: _expanded_source(name, entry, config) for name, entry in config.data.sources.items()}
    return replace(config, data=replace(config.data, sources=sources))


def written_out(composed: DictConfig, config: Config) -> DictConfig:
    """Return the composed values with what data.harbor stands for, for config.yaml: whatever reads that file knows the
    long form only. `config`: the same values, expanded."""
    names = {} if config.data.harbor is None else _names()
    if not names and all("harbor" not in entry.get("data", {}) for entry in config.data.sources.values()):
        return composed
    copy = composed.copy()
    with read_write(copy), open_dict(copy):
        copy.data.sources = config.data.sources
        for section in names:
            for name in names[section]:
                copy[section][name] = getattr(getattr(config, section), name)
    return copy


def _names() -> dict[str, tuple[str, ...]]:
    """Return the names of the keys that data.harbor stands for, by section."""
    return {section: (*keys, *free_keys(None).get(section, ())) for section, keys in fixed_keys("").items()}


def _set_keys(config: Config, words: set[str]) -> Keys:
    """Return those of the keys that a user or a recipe has set."""
    default = Config()
    return {
        section: {
            name: value
            for name in names
            if (value := getattr(getattr(config, section), name)) != getattr(getattr(default, section), name)
            or f"{section}.{name}" in words
        }
        for section, names in _names().items()
    }


def _expanded_source(name: str, entry: Any, config: Config) -> Any:
    """Return the entry of a source in the long form. One that is malformed stays as it is: `source_problems` names
    it."""
    if not isinstance(entry, Mapping):
        return entry
    data, rollout = entry.get("data", {}), entry.get("rollout", {})
    if not isinstance(data, Mapping) or not isinstance(rollout, Mapping) or data.get("harbor") is None:
        return entry
    val_share = data.get("val_share", config.data.val_share)
    return {**entry, **_merged(f"data.sources.{name}.", entry, data["harbor"], val_share)}


def _merged(prefix: str, keys: Mapping[str, Any], folders: Any, val_share: float | None) -> Keys:
    """Return the keys that were set, with those over them that data.harbor stands for. Raises ConfigError for keys that
    contradict it."""
    fixed, free = fixed_keys(folders), free_keys(val_share)
    contradictions = [
        f"{prefix}{section}.{name}={keys[section][name]}: {prefix}{KEY}={folders} stands for {section}.{name}="
        f"{value}: leave out one of them"
        for section, values in fixed.items()
        for name, value in values.items()
        if name in keys.get(section, {}) and keys[section][name] != value
    ]
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    return {section: {**free.get(section, {}), **keys.get(section, {}), **fixed[section]} for section in fixed}
