"""Turns Hydra's composed config into one frozen, checked `Config`, and lists the keys for `--help`."""

import ast
import difflib
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path

from hydra.conf import HelpConf
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from configs.checks.sections import TRAIN_AND_VAL
from configs.schema import Config
from configs.validate import ConfigError, check

HELP_TEMPLATE = """slipstream: fully-async reinforcement learning of language models

  make train ARGS="recipe=arithmetic trainer.lr=1e-4 rollout.num_replicas=2"
  slipstream-train recipe=gsm8k dry_run=true

Override a key with key=value, choose a recipe or a model with recipe=NAME or model=NAME.
--cfg job prints the whole config that a command line resolves to.

== Choices ==
$APP_CONFIG_GROUPS
== Keys (the schema's defaults in brackets) ==
"""


def load(composed: DictConfig, needed_files: Sequence[str] = TRAIN_AND_VAL) -> Config:
    """Raises ConfigError for values that cannot work. `needed_files`: see `check`."""
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    check(config, needed_files)
    return config


def without_token(composed: DictConfig) -> DictConfig:
    """A copy to write into files, without the value of serve.token."""
    shown = composed.copy()
    if shown.serve.token is not None:
        OmegaConf.update(shown, "serve.token", "(not shown)")
    return shown


@cache
def key_docs() -> Mapping[str, tuple[str, str]]:
    """Maps the dotted name of every key to (its default as YAML, its documentation)."""
    return dict(_section_docs(Config, OmegaConf.structured(Config), ""))


def _section_docs(section: type, defaults: DictConfig, prefix: str) -> Iterator[tuple[str, tuple[str, str]]]:
    docs = literal_docs(section)
    for name, field in section.__dataclass_fields__.items():
        default = defaults[name]
        if OmegaConf.is_dict(default):
            yield from _section_docs(field.type, default, f"{name}.")
        else:
            shown = default.value if isinstance(default, Enum) else json.dumps(default)
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


def check_overrides(arguments: list[str]) -> None:
    """Raises ConfigError, with suggestions, for a `key=value` argument whose key does not exist."""
    docs = key_docs()
    groups = {path.parent.name for path in Path(__file__).parent.glob("*/*.yaml")}
    for argument in arguments:
        key, is_override, value = argument.partition("=")
        key = key.lstrip("+~")
        if argument.startswith("-") or not is_override or key in docs or key in groups or key.startswith("hydra"):
            continue
        near = difflib.get_close_matches(key, [*docs, *groups], n=3, cutoff=0.5)
        near += [known for known in docs if known.split(".")[-1] == key.split(".")[-1] and known not in near]
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists the keys"
        raise ConfigError(f"{key}={value}: there is no such key; {hint}")


@cache
def register() -> None:
    """Registers the schema and the help text in Hydra's store, which is global: once per process is enough."""
    store = ConfigStore.instance()
    store.store(name="schema", node=_writable(OmegaConf.structured(Config)))
    lines = [f"{key} [{default}]\n    {doc}" for key, (default, doc) in key_docs().items()]
    # Hydra fills $NAME in the template, and OmegaConf interpolates ${...}.
    escaped = "\n".join(lines).replace("$", "$$").replace("${", "\\${")
    store.store(
        group="hydra/help",
        name="slipstream",
        node=HelpConf(app_name="slipstream", header="", footer="", template=HELP_TEMPLATE + escaped + "\n"),
    )


def _writable(node: DictConfig) -> DictConfig:
    """OmegaConf makes read-only nodes from frozen dataclasses, and Hydra could not merge a recipe into those."""
    OmegaConf.set_readonly(node, False)
    for key in node:
        if OmegaConf.is_dict(node[key]):
            _writable(node[key])
    return node
