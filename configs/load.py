"""Turns Hydra's composed config into one frozen, checked `Config`, and knows what each key means."""

import ast
import inspect
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from configs.checkpoint import UnreadableConfigError, read_config
from configs.checks.problem import values
from configs.checks.sections import TRAIN_AND_VAL
from configs.data import NO_FILES, DataConfig
from configs.harbor import expanded
from configs.mixture import LISTED, writable
from configs.schema import Config, RayConfig, Transport, WeightSyncConfig
from configs.validate import ConfigError, check
from configs.weight_sync import VLLM_PREFIX

SEARCH_PATH = "Config search path:"
DETAILS = ("full_key:", "reference_type", "object_type", "See https:")
"""Beginnings of the lines in errors of Hydra and OmegaConf that tell a user nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenData(DataConfig):
    """The data as YAML and the command line may give it: files also as a list, as verl takes them, and numbers, which
    some loaders take."""

    train_files: Any = None
    val_files: Any = None
    harbor: Any = None

    def normal(self) -> DataConfig:
        fields: dict[str, Any] = {name: getattr(self, name) for name in DataConfig.__dataclass_fields__}
        files = {name: _joined(f"data.{name}", fields[name]) for name in LISTED}
        return DataConfig(**{**fields, **files})


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenWeightSync(WeightSyncConfig):
    """The weight updates as YAML and the command line may give them: a backend of vLLM as vllm:NAME."""

    transport: Any = Transport.shared_memory

    def normal(self) -> WeightSyncConfig:
        fields: dict[str, Any] = {name: getattr(self, name) for name in WeightSyncConfig.__dataclass_fields__}
        written = self.transport.value if isinstance(self.transport, Transport) else str(self.transport)
        if written.startswith(VLLM_PREFIX):
            fields["vllm_backend"], written = written.removeprefix(VLLM_PREFIX), Transport.vllm.value
        names = [transport.value for transport in Transport]
        if written not in names:
            allowed = ", ".join(name for name in names if name != Transport.vllm.value)
            raise ConfigError(f"weight_sync.transport={written}: must be one of {allowed}, or vllm:NAME")
        return WeightSyncConfig(**{**fields, "transport": Transport(written)})


def _joined(key: str, files: Any) -> str | None:
    names = files if isinstance(files, list) else [files]
    if not names:
        none = f", or be {NO_FILES}: then nothing is held out" if key == "data.val_files" else ""
        raise ConfigError(f"{key}=[]: must name a file{none}")
    if files is None or all(isinstance(name, str | int | float) and not isinstance(name, bool) for name in names):
        return None if files is None else ",".join(map(str, names))
    raise ConfigError(f"{key}={files}: must be text or a number, or a list of these")


def load(composed: DictConfig, needed_files: Sequence[str] = TRAIN_AND_VAL, overrides: Sequence[str] = ()) -> Config:
    """Raises ConfigError for values that cannot work. `needed_files` and `overrides`: see `check`."""
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:  # ??? and interpolations that lead nowhere
        raise ConfigError(one_line(error)) from error
    assert isinstance(config, Config) and isinstance(config.data, _GivenData)
    assert isinstance(config.weight_sync, _GivenWeightSync)
    normal = {"data": config.data.normal(), "weight_sync": config.weight_sync.normal()}
    config = replace(config, **normal, ray=_with_address(config.ray))
    for key, value in values(config):
        if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{key}={value}: must be a list of texts")  # OmegaConf takes lists for texts there
    config = expanded(config, overrides)
    check(config, needed_files, overrides)
    return config


def _with_address(ray: RayConfig) -> RayConfig:
    """Return the section with the cluster that this process is on. Ray names it in RAY_ADDRESS when it starts a job;
    the address of a job server there (http://...) is for `ray job submit`, and no cluster that a run can join."""
    named = os.environ.get("RAY_ADDRESS", "")
    address = ray.address or ("" if named.startswith("http") else named)
    return replace(ray, address=None if address in ("", "local") else address)


def load_saved(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a run by its config.yaml, with `key=value` over it. Keys that are newer than the run have
    their defaults. The data need not be there any more.

    Raises:
        ConfigError: the file cannot be read, or its values cannot work in this version.
    """
    register()
    try:
        schema: Any = ConfigStore.instance().load("schema.yaml").node
        changes = OmegaConf.from_dotlist(list(overrides))
        return load(DictConfig(OmegaConf.merge(schema, read_config(path), changes)), needed_files=())
    except (UnreadableConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """Put an error of Hydra or OmegaConf on one line that begins with the key or the override at fault."""
    lines = [line.strip() for cause in (error, error.__cause__) if cause for line in str(cause).splitlines()]
    keys = [line.removeprefix("full_key: ") for line in lines if line.startswith("full_key: ")]
    message_lines = itertools.takewhile(lambda line: not line.startswith(SEARCH_PATH), lines)
    head, *rest = (line for line in message_lines if line and not line.startswith(DETAILS))
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
    """Return the string literal under each field of a dataclass, or member of an enum, by the name of the field."""
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
    given = Config(data=_GivenData(), weight_sync=_GivenWeightSync())
    store.store(name="schema", node=writable(OmegaConf.structured(given)))
