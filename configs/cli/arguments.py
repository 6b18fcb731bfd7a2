"""A command line as Hydra reads it, told apart: options, overrides, and the jobs of a sweep."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from configs.checkpoint import LATEST
from configs.validate import ConfigError

MODEL_PATHS = ("model.path", "teacher.path")
SWEEP_OPTIONS = {"-m", "--multirun"}
HELP_OPTIONS = {"-h", "--help"}
SWEEP_MODE = "hydra.mode=MULTIRUN"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Example: Arguments(("-m", "trainer.lr=1e-4,3e-4", "seed=1")) has two jobs."""

    given: tuple[str, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(argument for argument in self.given if not argument.startswith("-") and _is_override(argument))

    @property
    def options(self) -> tuple[str, ...]:
        """What begins with a dash, and the values that options take, such as `job` of `--cfg job`."""
        return tuple(argument for argument in self.given if argument.startswith("-") or not _is_override(argument))

    @property
    def is_sweep(self) -> bool:
        return bool(SWEEP_OPTIONS.intersection(self.options)) or SWEEP_MODE in self.overrides

    @property
    def asks_for_help(self) -> bool:
        return bool(HELP_OPTIONS.intersection(self.options))

    @property
    def words(self) -> tuple[str, ...]:
        """What is neither an override nor begins with a dash: what to help with, or what an option takes."""
        return tuple(option for option in self.options if not option.startswith("-"))

    @property
    def starts_jobs(self) -> bool:
        """False where Hydra only shows something, or reads its configs from elsewhere."""
        return SWEEP_OPTIONS.issuperset(self.options)

    @property
    def is_listed(self) -> bool:
        """Whether every job of the sweep is known from the command line: not under shuffle(), glob() and interval()."""
        return all(_choices(override) is not None for override in parsed(self.overrides))

    def jobs(self) -> list[tuple[str, ...]]:
        """The overrides of each job in Hydra's order: of a sweep every combination of what it lists, else one. Raises
        ConfigError."""
        if not self.is_sweep:
            return [self.overrides]
        given = [override for override in parsed(self.overrides) if override.key_or_group != "hydra.mode"]
        return list(itertools.product(*(choices for one in given if (choices := _choices(one)) is not None)))


def parse(arguments: Sequence[str]) -> Arguments:
    """Raises ConfigError for a word that is neither an override nor belongs to an option, and for an option that help
    does not go with."""
    found = Arguments(tuple(map(_pinned, arguments)))
    others = [one for one in found.options if one.startswith("-") and one not in SWEEP_OPTIONS | HELP_OPTIONS]
    if found.asks_for_help and others:
        raise ConfigError(f"--help: takes a section, key=value and -m, not {others[0]}")
    if found.words and not found.asks_for_help and not others:
        raise ConfigError(f"{found.words[0]}: must be key=value, or one of the options that --hydra-help lists")
    return found


def _pinned(argument: str) -> str:
    """model.path=runs/latest with the folder that the link leads to now: a run that begins takes the link over."""
    key = argument.partition("=")[0]
    if key.lstrip("+") not in MODEL_PATHS or LATEST not in argument:
        return argument
    value = parsed([argument])[0].value()
    given = value.list if isinstance(value, ChoiceSweep) else [value]
    paths = [one.text if isinstance(one, QuotedString) else one for one in given]
    found = [_without_link(path) if isinstance(path, str) else path for path in paths]
    if found == paths or not all(isinstance(path, str) for path in found):
        return argument
    return ",".join([override(key, str(found[0])), *(_quoted(str(path)) for path in found[1:])])


def _without_link(path: str) -> str:
    try:
        whole = Path(path).expanduser()
    except RuntimeError:  # ~nobody, which the checks refuse
        return path
    links = (place for place in (whole, *whole.parents) if place.name == LATEST and place.is_symlink())
    link = next(links, None)
    return path if link is None else str(link.resolve() / whole.relative_to(link))


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Raises ConfigError for one that is not in Hydra's grammar."""
    parser, found = OverridesParser.create(), []
    for override in overrides:
        try:
            found += parser.parse_overrides([override])
        except HydraException as error:
            raise ConfigError(f"{override}: {str(error).splitlines()[0]}") from error
    return found


def override(key: str, value: str) -> str:
    """An override in Hydra's grammar, which wants quotes around what is no plain word."""
    return f"{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    is_plain = re.fullmatch(r"[\w./:@+-]+", value)
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
