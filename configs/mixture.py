"""The sources of a run's prompts: the one that the sections describe or, with data.sources, several.

Each source of data.sources has a config of its own: that of the run, with the keys that the source sets over it.
Whatever reads a config (data, agent workers, rewards, evaluation) reads that of a source, and knows of no other.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checks.problem import Problem
from configs.checks.ranges import WEIGHT
from configs.data import DataConfig
from configs.rollout import SessionsConfig
from configs.schema import Config

NAME = re.compile(r"[A-Za-z][\w-]*")
NUMBERS = ("weight", "loss_coef")
"""The keys of a source that are not those of a section."""
ITS_KEYS = {
    "data": {field.name for field in fields(DataConfig)} - {"sources"},
    "rollout": {
        *("max_response_tokens", "top_p", "top_k", "min_p", "stop"),
        *("agent_loop", "agent", "agent_command", "agent_args", "agent_sandbox", "agent_sandbox_folders"),
        *("tools_run_in", "tool_processes"),
        *("reward", "reward_runs_in", "reward_processes", "reward_timeout_s", "format_pattern", "verify_timeout_s"),
    },
    "algorithm": {"group_size", "overlong_buffer_tokens", "overlong_penalty"},
    "sessions": {field.name for field in fields(SessionsConfig)} - {"host", "max_open"},
}
"""The keys that a source may set, by section. All others say how the processes work that the sources share."""
ROUNDING = 1e-9
"""The part of a group by which a share of exactly one may come out lower, since weights are floats."""
WHOLE = {"data": ("loader_args",), "rollout": ("agent_args",)}
"""Keys whose values are dicts of one user's: those of a source take the place of the run's."""
LISTED = ("train_files", "val_files", "harbor")
"""Keys of data.* whose texts, which have commas, may be lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of prompts.

    Example: Source(name="search", weight=2.0, loss_coef=1.0, config=config)
    """

    name: str
    """Empty where the run has no data.sources."""
    weight: float = 1.0
    """Its share of the trained groups, relative to the other weights."""
    loss_coef: float = 1.0
    """Factor of the loss weights of its tokens."""
    config: Config
    """The run as if it had no other source."""


def sources_of(config: Config) -> list[Source]:
    """Return the sources of a config that was checked: one without a name where it has no data.sources."""
    if not config.data.sources:
        return [Source(name="", config=config)]
    return [
        Source(
            name=name,
            weight=float(entry.get("weight", 1)),
            loss_coef=float(entry.get("loss_coef", 1)),
            config=_composed(config, entry),
        )
        for name, entry in config.data.sources.items()
    ]


def loss_coefficients(config: Config) -> dict[str, float]:
    """Return the loss coefficient of each source of data.sources by name."""
    return {name: float(entry.get("loss_coef", 1)) for name, entry in config.data.sources.items()}


def longest_source(config: Config) -> Config:
    """Return the config of the source with the longest sequences. Engines and train workers must have room for them."""
    return max((source.config for source in sources_of(config)), key=lambda its: its.context_tokens)


def longest_response(config: Config) -> int:
    """Return the largest rollout.max_response_tokens of all sources."""
    of_run = config.rollout.max_response_tokens
    sections = (entry.get("rollout") or {} for entry in config.data.sources.values())
    return max((section.get("max_response_tokens", of_run) for section in sections), default=of_run)


def source_problems(config: Config) -> Iterator[Problem]:
    """Yield what is wrong with the entries of data.sources themselves."""
    for name, entry in config.data.sources.items():
        key = f"data.sources.{name}"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            yield Problem(key, "a name must begin with a letter, and have letters, digits, - and _ only", repr(name))
        if not isinstance(entry, Mapping):
            allowed = "must be a mapping with weight, loss_coef and the sections that differ: {rollout: {reward: dapo}}"
            yield Problem(key, allowed, repr(entry))
            continue
        problems = list(_entry_problems(key, entry))
        yield from problems
        if not problems:
            yield from _type_problems(config, key, entry)


def never_trained(config: Config) -> Iterator[Problem]:
    """Yield the weights of sources whose share of all groups of the run is less than one: they may never be trained."""
    groups = config.trainer.total_steps * config.trainer.prompts_per_step
    sources = sources_of(config)
    total = sum(source.weight for source in sources)
    for source in sources:
        if (share := groups * source.weight / total) < 1 - ROUNDING:
            of_run = f"{groups} groups of the run (trainer.total_steps x trainer.prompts_per_step)"
            allowed = f"its share of the {of_run} is {share:.2g}: it must be at least one group"
            yield Problem(f"data.sources.{source.name}.weight", allowed, f"{source.weight:g}")


def unread_keys(config: Config, overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield the keys that a command line sets for the run, and that every source sets for itself."""
    entries = config.data.sources.values()
    for override in overrides:
        section, *names = override.partition("=")[0].lstrip("+").split(".")
        names = names[:1] if names and names[0] in WHOLE.get(section, ()) else names
        key = ".".join((section, *names))
        if section in ITS_KEYS and names and all(_sets(entry, (section, *names)) for entry in entries):
            yield Problem(key, f"has no effect, as every source sets its own: set data.sources.NAME.{key}")


def _sets(entry: Mapping[str, Any], path: Sequence[str]) -> bool:
    """Return whether the entry of a source has a value there."""
    value: Any = entry
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return False
        value = value[name]
    return True


def _entry_problems(key: str, entry: Mapping[Any, Any]) -> Iterator[Problem]:
    for number in NUMBERS:
        value = entry.get(number, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= WEIGHT:
            yield Problem(f"{key}.{number}", f"must be a number above 0 and at most {WEIGHT:g}", repr(value))
    for section, values in entry.items():
        if section in NUMBERS:
            continue
        if section not in ITS_KEYS:
            allowed = f"a source has {', '.join((*NUMBERS, *ITS_KEYS))}; what else there is, all sources share"
            yield Problem(f"{key}.{section}", allowed, repr(values))
        elif not isinstance(values, Mapping):
            yield Problem(f"{key}.{section}", f"must be a mapping of keys of {section}.*", repr(values))
        else:
            yield from _unknown_keys(key, section, values)


def _unknown_keys(key: str, section: str, values: Mapping[Any, Any]) -> Iterator[Problem]:
    its, of_run = ITS_KEYS[section], Config.__dataclass_fields__[section].type.__dataclass_fields__
    for name in (name for name in values if name not in its):
        shared = f"all sources share {section}.{name}: set it there" if name in of_run else "there is no such key"
        allowed = f"{shared}; a source may set {section}.*: {', '.join(sorted(its))}"
        yield Problem(f"{key}.{section}.{name}", allowed, repr(values[name]))


def _type_problems(config: Config, key: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    for section in ITS_KEYS:
        for name, value in entry.get(section, {}).items():
            path = f"{key}.{section}.{name}"
            try:
                made = getattr(getattr(_composed(config, {section: {name: value}}), section), name)
            except OmegaConfBaseException as error:
                yield Problem(path, str(error).splitlines()[0], repr(value))
                continue
            if isinstance(made, list) and not all(isinstance(entry, str) for entry in made):
                yield Problem(path, "must be a list of texts", repr(value))  # OmegaConf takes lists for texts
            if isinstance(made, bool) and isinstance(value, int) and value not in (0, 1):
                yield Problem(path, "must be true or false", repr(value))


def _composed(config: Config, entry: Mapping[str, Any]) -> Config:
    """Return the config of a source. Raises OmegaConfBaseException for a value of another type."""
    sections = {
        section: _with(getattr(config, section), entry[section], WHOLE.get(section, ()))
        for section in ITS_KEYS
        if section in entry
    }
    composed = replace(config, **sections)
    return replace(composed, data=replace(composed.data, sources={}))


def _with(section: Any, values: Mapping[str, Any], whole: tuple[str, ...]) -> Any:
    lists = {name: value for name, value in values.items() if name in LISTED and isinstance(value, list)}
    files = {name: ",".join(map(str, value)) for name, value in lists.items()}
    node: DictConfig = OmegaConf.structured(replace(section, **{name: {} for name in whole if name in values}))
    return OmegaConf.to_object(OmegaConf.merge(writable(node), {**values, **files}))


def writable(node: DictConfig) -> DictConfig:
    """Return the node with values that can be merged over. OmegaConf makes read-only nodes from frozen dataclasses."""
    OmegaConf.set_readonly(node, False)
    if not node:
        OmegaConf.set_struct(node, False)  # its keys are the user's
    for key in node:
        if OmegaConf.is_dict(node[key]):
            writable(node[key])
    return node
