"""Composes a command line with Hydra, without running or writing anything, and says in one line what is wrong."""

import re
from collections.abc import Sequence

from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from configs.cli.overrides import RENAMED_VALUES, hint
from configs.load import one_line, register
from configs.validate import ConfigError

UNKNOWN_KEY = re.compile(r"([\w.]+): .*Key '\w+' not in ")
INVALID_VALUE = re.compile(r"([\w.]+)(?:=\w+)?: .*Invalid value '(\w+)'")


def compose_job(name: str, overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """Returns the config of configs/NAME.yaml with `overrides`, and Hydra's own. Raises ConfigError."""
    register()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            composed = compose(name, overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_with_hint(one_line(error))) from error
    HydraConfig.instance().set_config(composed)
    hydra_config = composed.hydra.copy()
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    return composed, hydra_config


def folder_pattern(hydra_config: DictConfig, part: str) -> str:
    """The folder as it is written, before its interpolations. `part`: run or sweep."""
    written = OmegaConf.to_container(hydra_config[part], resolve=False)
    assert isinstance(written, dict)
    return str(written["dir"] or "")


def folder(hydra_config: DictConfig, part: str) -> str:
    """hydra.run.dir or hydra.sweep.dir. Raises ConfigError for one that is empty or cannot be resolved."""
    key = f"hydra.{part}.dir"
    try:
        resolved = hydra_config[part].dir
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={folder_pattern(hydra_config, part)}: {one_line(error)}") from error
    if not resolved:
        raise ConfigError(f"{key}=: must name a folder; to leave it out takes a new one under runs/")
    return str(resolved)


def _with_hint(text: str) -> str:
    """An unknown key in a YAML file gets the hint that one on the command line gets, a former value its new name."""
    if unknown := UNKNOWN_KEY.match(text):
        return f"{text}; {hint(unknown[1])}"
    if (invalid := INVALID_VALUE.match(text)) and (now := RENAMED_VALUES.get((invalid[1], invalid[2]))):
        return f"{text}; {invalid[2]} is called {now} now"
    return text
