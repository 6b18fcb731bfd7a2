"""Compose a command line with Hydra, which writes nothing, say in one line what is wrong, and run what was composed."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from configs.cli.arguments import key_of, parsed
from configs.cli.overrides import RENAMED_VALUES, hint
from configs.load import one_line, register
from configs.validate import ConfigError

UNKNOWN_KEY = re.compile(r"([\w.]+): .*Key '\w+' not in ")
SOURCES = "data.sources."
NO_CHOICE = re.compile(r"(?:In '[^']*': )?Could not find '([^'/]+)/([^']*)': Available options in '[^']*': (.+)")
INVALID_VALUE = re.compile(r"([\w.]+)(?:=\w+)?: .*Invalid value '(\w+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedJob:
    """The config of one job, composed and not yet run.

    Example: compose_job("train", ["seed=1"]).config.seed == 1
    """

    config: DictConfig
    """The keys of this project."""
    whole: DictConfig
    """The same with Hydra's own keys below `hydra`."""
    loader: ConfigLoader

    @property
    def hydra(self) -> DictConfig:
        return self.whole.hydra


def compose_job(name: str, overrides: Sequence[str]) -> ComposedJob:
    """Compose configs/NAME.yaml with the overrides. Raises ConfigError."""
    register()
    try:
        with initialize_config_module("configs", version_base="1.3", job_name=name):
            whole = compose(name, overrides=list(overrides), return_hydra_config=True)
            _refuse_unknown_sources(name, overrides)
            loader = GlobalHydra.instance().config_loader()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_with_hint(one_line(error))) from error
    HydraConfig.instance().set_config(whole)  # interpolations of ${hydra:...} in our own keys read it
    config = whole.copy()
    with read_write(config), open_dict(config):
        del config["hydra"]
    return ComposedJob(config=config, whole=whole, loader=loader)


def _refuse_unknown_sources(name: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError for an override of a source that the recipe does not have, beside those that it has: a name
    that is misspelled would otherwise be one more source."""
    set_here = {source for override in overrides for source in _sources_in(override)}
    if not set_here:
        return
    others = [override for override in overrides if not f"{key_of(override)}.".startswith(SOURCES)]
    known = list(compose(name, overrides=others).data.sources)
    if known and (unknown := sorted(set_here - set(known))):
        raise ConfigError(
            f"data.sources.{unknown[0]}: there is no such source, only {', '.join(known)}; "
            f"+data.sources.{unknown[0]}.KEY=VALUE adds one"
        )


def _sources_in(override: str) -> set[str]:
    """Return the names of the sources of which an override sets something, one after another or as a dict of them."""
    if (key := override.partition("=")[0]).startswith(SOURCES):
        return {key.split(".")[2]}
    value = parsed([override])[0].value() if f"{key}." == SOURCES else None
    return set(map(str, value)) if isinstance(value, Mapping) else set()


@contextmanager
def beside_another_hydra() -> Iterator[None]:
    """Compose within this where the process may be a user's own `hydra.main`: its Hydra and the config that its
    interpolations read are put aside, and come back at the end."""
    hydra, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = hydra
        HydraConfig.instance().cfg = config


def run_composed(job: ComposedJob, run_dir: Path, task: Callable[[DictConfig], object]) -> None:
    """Run the task as `hydra.main` does, in its folder and with its log, but on the config that was composed already.

    The folder is the one that was checked, whatever ${now:} would say by now. The task handles its own errors.
    """
    with read_write(job.hydra), open_dict(job.hydra):
        job.hydra.run.dir = str(run_dir)
    context = HydraContext(config_loader=job.loader, callbacks=Callbacks(job.whole))
    run_job(task, job.whole, "hydra.run.dir", None, context)


def folder_pattern(hydra_config: DictConfig, part: str) -> str:
    """The folder as it is written, before its interpolations. `part`: run or sweep."""
    written = OmegaConf.to_container(hydra_config[part], resolve=False)
    assert isinstance(written, dict)
    return str(written["dir"] or "")


def refuse_new_folder(job: ComposedJob, part: str) -> None:
    """Raise ConfigError for resume=auto in a folder that is a new one each time. `part`: run or sweep."""
    if job.config.resume == "auto" and "${now" in folder_pattern(job.hydra, part):
        raise ConfigError(f"resume=auto: needs hydra.{part}.dir, because the default is a new folder each time")


def folder(hydra_config: DictConfig, part: str) -> str:
    """Return hydra.run.dir or hydra.sweep.dir. Raises ConfigError for one that is empty or cannot be resolved."""
    key = f"hydra.{part}.dir"
    try:
        resolved = hydra_config[part].dir
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={folder_pattern(hydra_config, part)}: {one_line(error)}") from error
    if not resolved:
        raise ConfigError(f"{key}=: must name a folder; to leave it out takes a new one under runs/")
    return str(resolved)


def _with_hint(text: str) -> str:
    """Put a hint to an unknown key in a YAML file, as to one of the command line, to an unknown choice of a group, and
    to a former value."""
    if unknown := UNKNOWN_KEY.match(text):
        return f"{text}; {hint(unknown[1])}"
    if missing := NO_CHOICE.match(text):
        group, name, names = missing.groups()
        return f"{group}={name}: there is no such {group}, only {', '.join(names.split())}"
    if (invalid := INVALID_VALUE.match(text)) and (now := RENAMED_VALUES.get((invalid[1], invalid[2]))):
        return f"{text}; {invalid[2]} is called {now} now"
    return text
