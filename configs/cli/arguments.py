"""A command line as Hydra reads it, told apart: options, overrides, and the jobs of a sweep."""

import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from configs.checkpoint import LATEST
from configs.checks.secrets import NOT_SHOWN, may_be_shown
from configs.validate import ConfigError

MODEL_PATHS = ("model.path", "teacher.path")
SOURCES = "data.sources"
COMMAND = re.compile(r"\+*(data\.sources\.[\w-]+\.)?rollout\.agent_command")
"""The key of a command of the shell, that of a source of data.sources included."""
_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
IN_QUOTES = re.compile(rf"{_TEXT}(?:,{_TEXT})*")
"""A text in quotes, or several of a sweep."""
NO_TEXT = re.compile(r"null|true|false|yes|no|on|off|[-+]?(inf|nan|[\d_.]+(e[-+]?\d+)?)", re.IGNORECASE)
"""Words that Hydra takes for something else than a text."""
SWEEP_OPTIONS = {"-m", "--multirun"}
HELP_OPTIONS = {"-h", "--help"}
SWEEP_MODE = "hydra.mode=MULTIRUN"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Example: Arguments(("-m", "trainer.lr=1e-4,3e-4", "seed=1")) has two jobs."""

    line: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(argument for argument in self.line if not argument.startswith("-") and _is_override(argument))

    @property
    def options(self) -> tuple[str, ...]:
        """The words that begin with a dash, and the values that such options take, such as `job` of `--cfg job`."""
        return tuple(argument for argument in self.line if argument.startswith("-") or not _is_override(argument))

    @property
    def is_sweep(self) -> bool:
        return bool(SWEEP_OPTIONS.intersection(self.options)) or SWEEP_MODE in self.overrides

    @property
    def asks_for_help(self) -> bool:
        return bool(HELP_OPTIONS.intersection(self.options))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are neither overrides nor options: topics of --help, or the value of an option."""
        return tuple(option for option in self.options if not option.startswith("-"))

    @property
    def starts_jobs(self) -> bool:
        """False where Hydra only shows something, or reads its configs from elsewhere."""
        return SWEEP_OPTIONS.issuperset(self.options)

    @property
    def is_listed(self) -> bool:
        """True where the command line names every job of the sweep, so not under shuffle(), glob() and interval()."""
        return all(_choices(override) is not None for override in parsed(self.overrides))

    def jobs(self) -> list[tuple[str, ...]]:
        """The overrides of each job in Hydra's order: of a sweep every combination of what it lists, else one. Raises
        ConfigError."""
        if not self.is_sweep:
            return [self.overrides]
        overrides = [override for override in parsed(self.overrides) if override.key_or_group != "hydra.mode"]
        return list(itertools.product(*(choices for each in overrides if (choices := _choices(each)) is not None)))


def parse(arguments: Sequence[str]) -> Arguments:
    """Parse the words. Raise ConfigError for a word that is neither an override nor belongs to an option, and for an
    option that --help does not go with."""
    line = Arguments(tuple(_with_names(_pinned(_with_quotes(argument))) for argument in arguments))
    others = [word for word in line.options if word.startswith("-") and word not in SWEEP_OPTIONS | HELP_OPTIONS]
    if line.asks_for_help and others:
        raise ConfigError(f"--help: takes a section, key=value and -m, not {others[0]}")
    if line.words and not line.asks_for_help and not others:
        raise ConfigError(f"{line.words[0]}: must be key=value, or one of the options that --hydra-help lists")
    return line


def _with_quotes(argument: str) -> str:
    """Put a command of the shell into quotes, which the user's own shell has taken away: braces, commas and quotes mean
    something else to Hydra."""
    key, _, value = argument.partition("=")
    if not COMMAND.fullmatch(key) or value in ("", "null") or IN_QUOTES.fullmatch(value):
        return argument
    return override(key, value)


def _pinned(argument: str) -> str:
    """Replace the link in model.path=runs/latest by the folder that it leads to now: a run that begins takes the
    link over."""
    if key_of(argument) not in MODEL_PATHS or LATEST not in argument:
        return argument
    key = argument.partition("=")[0]
    value = parsed([argument])[0].value()
    choices = value.list if isinstance(value, ChoiceSweep) else [value]
    paths = [choice.text if isinstance(choice, QuotedString) else choice for choice in choices]
    folders = [_without_link(path) if isinstance(path, str) else path for path in paths]
    if folders == paths or not all(isinstance(path, str) for path in folders):
        return argument
    return ",".join([override(key, str(folders[0])), *(quoted(str(path)) for path in folders[1:])])


def _without_link(path: str) -> str:
    whole = Path(os.path.expanduser(path))  # ~nobody stays as it is, which the checks refuse
    links = (place for place in (whole, *whole.parents) if place.name == LATEST and place.is_symlink())
    link = next(links, None)
    return path if link is None else str(link.resolve() / whole.relative_to(link))


def _with_names(argument: str) -> str:
    """Give each source of data.sources=[{harbor: FOLDER}] the name of its folder."""
    key, _, value = argument.partition("=")
    if key.lstrip("+") != SOURCES or not value.startswith("["):
        return argument
    entries = parsed([argument])[0].value()
    if not isinstance(entries, list):  # a sweep over several lists
        return argument
    named: dict[str, Any] = {}
    for entry in entries:
        is_entry = isinstance(entry, dict) and isinstance(entry.get("data", {}), dict)
        if not is_entry or not isinstance(folder := entry.get("harbor"), str):
            allowed = "each entry of a list must have harbor: FOLDER; other sources have names: {NAME: {weight: 2}}"
            raise ConfigError(f"{argument}: {allowed}")
        name = Path(os.path.abspath(os.path.expanduser(folder))).name
        if name in named:
            raise ConfigError(f"{argument}: two of the folders are called {name}: name them: {{NAME: {{data: ...}}}}")
        others = {section: value for section, value in entry.items() if section != "harbor"}
        named[name] = {**others, "data": {**entry.get("data", {}), "harbor": folder}}
    return f"{key}={_text(named)}"


def _text(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides. Raise ConfigError for an override that is not in Hydra's grammar."""
    parser, overridden = OverridesParser.create(), []
    for override in overrides:
        try:
            overridden += parser.parse_overrides([override])
        except HydraException as error:
            if not may_be_shown(override):
                raise ConfigError(f"{override.partition('=')[0]}={NOT_SHOWN}: is not in Hydra's grammar") from None
            raise ConfigError(f"{override}: {str(error).splitlines()[0]}") from error
    return overridden


def key_of(override: str) -> str:
    """Return the key that an override sets, adds or deletes."""
    return override.partition("=")[0].lstrip("+~")


def override(key: str, value: str) -> str:
    """An override in Hydra's grammar, which wants quotes around what is no plain word."""
    return f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """Return a text in Hydra's grammar, with quotes where it would be no text without."""
    is_plain = re.fullmatch(r"[\w./:@+-]+", value) and not NO_TEXT.fullmatch(value)
    return value if is_plain else QuotedString(value, Quote.double).with_quotes()


def _choices(override: Override) -> list[str] | None:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    value = override.value()
    is_shuffled = isinstance(value, ChoiceSweep | RangeSweep) and value.shuffle
    if is_shuffled or isinstance(value, Glob) or not override.is_discrete_sweep():
        return None
    return [f"{override.get_key_element()}={choice}" for choice in override.sweep_string_iterator()]


def _is_override(argument: str) -> bool:
    return "=" in argument or argument.startswith("~")
