"""Turns Hydra's composed config into one frozen, checked `Config`, and knows what each key means."""

import ast
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from configs.checks.sections import TRAIN_AND_VAL
from configs.data import DataConfig
from configs.schema import Config
from configs.validate import ConfigError, check

SEARCH_PATH = "Config search path:"
DETAILS = ("full_key:", "reference_type", "object_type", "See https:")
"""How lines of Hydra's and OmegaConf's errors begin that say nothing to a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenData(DataConfig):
    """The data as YAML and the command line may give it: files also as a list, as verl takes them."""

    train_files: Any = None
    val_files: Any = None

    def normal(self) -> DataConfig:
        values: dict[str, Any] = {name: getattr(self, name) for name in DataConfig.__dataclass_fields__}
        files = {name: _joined(f"data.{name}", values[name]) for name in TRAIN_AND_VAL}
        return DataConfig(**{**values, **files})


def _joined(key: str, files: Any) -> str | None:
    names = files if isinstance(files, list) else [files]
    if files is None or all(isinstance(name, str) for name in names):
        return None if files is None else ",".join(names)
    raise ConfigError(f"{key}={files}: must be text, or a list of texts")


def load(composed: DictConfig, needed_files: Sequence[str] = TRAIN_AND_VAL) -> Config:
    """Raises ConfigError for values that cannot work. `needed_files`: see `check`."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:  # ??? and interpolations that lead nowhere
        raise ConfigError(one_line(error)) from error
    assert isinstance(config, Config) and isinstance(config.data, _GivenData)
    config = replace(config, data=config.data.normal())
    check(config, needed_files)
    return config


def one_line(error: Exception) -> str:
    """What Hydra or OmegaConf says over several lines, beginning with the key or the override that it is about."""
    lines = [line.strip() for cause in (error, error.__cause__) if cause for line in str(cause).splitlines()]
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    told = itertools.takewhile(lambda line: not line.startswith(SEARCH_PATH), lines)
    head, *rest = (line for line in told if line and not line.startswith(DETAILS))
    head = head.removeprefix("Error merging override ").rstrip(":.")
    if isinstance(error, MissingMandatoryValue):
        head, rest = "has no value (???): give it one", []
    is_named = not keys or keys[0] in head
    return ": ".join(filter(None, ["" if is_named else keys[0], head, " ".join(rest)]))


@cache
def key_docs() -> Mapping[str, tuple[str, str]]:
    """Maps the dotted name of every key to (its default as YAML, its documentation)."""
    return dict(_section_docs(Config, OmegaConf.structured(Config), ""))


def _section_docs(section: type, defaults: DictConfig, prefix: str) -> Iterator[tuple[str, tuple[str, str]]]:
    docs = literal_docs(section)
    for name, field in section.__dataclass_fields__.items():
        default = defaults[name]
        if OmegaConf.is_dict(default) and default:  # not a free one, such as rollout.engine_args
            yield from _section_docs(field.type, default, f"{prefix}{name}.")
        else:
            plain = OmegaConf.to_container(default, enum_to_str=True) if OmegaConf.is_config(default) else default
            shown = plain.value if isinstance(plain, Enum) else json.dumps(plain)
            yield prefix + name, (shown, docs.get(name, ""))


def literal_docs(section: type) -> dict[str, str]:
    """Maps each field of a dataclass, or member of an enum, to the string literal under it, where there is one."""
    docs: dict[str, str] = {}
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    for statement, following in itertools.pairwise(node.body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(following, ast.Expr):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            docs[ast.unparse(target)] = " ".join(ast.literal_eval(following.value).split())
    return docs


@cache
def register() -> None:
    """Registers the schema in Hydra's store, which is global: once per process is enough."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_writable(OmegaConf.structured(Config(data=_GivenData()))))


def _writable(node: DictConfig) -> DictConfig:
    """OmegaConf makes read-only nodes from frozen dataclasses, and Hydra could not merge a recipe into those."""
    OmegaConf.set_readonly(node, False)
    if not node:
        OmegaConf.set_struct(node, False)  # its keys are the user's
    for key in node:
        if OmegaConf.is_dict(node[key]):
            _writable(node[key])
    return node
