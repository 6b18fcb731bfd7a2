"""Configs as a command line composes them, and changed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs import load
from configs.checks.sections import TRAIN_AND_VAL
from configs.cli.compose import compose_job
from configs.schema import Config
from configs.validate import ConfigError, check
from scripts.command.command import Invocation

CONFIGS = Path(load.__file__).parent
RECIPES = sorted(path.stem for path in (CONFIGS / "recipe").glob("*.yaml"))


def resolve(*overrides: str) -> Config:
    composed = compose_job("train", overrides).config
    return load.load(composed, overrides=overrides)


def invocation(config: Config, run_dir: Path) -> Invocation:
    return Invocation(config=config, composed=OmegaConf.create(), run_dir=run_dir)


def changed(config: Any, **values: object) -> Any:
    """The config with `section__key=value` set."""
    for name, value in values.items():
        section, _, key = name.partition("__")
        new = changed(getattr(config, section), **{key: value}) if key else value
        config = replace(config, **{section: new})
    return config


def refusal(config: Config, needed_files: Sequence[str] = TRAIN_AND_VAL) -> str:
    """What the checks of a config refuse."""
    with pytest.raises(ConfigError) as caught:
        check(config, needed_files)
    return str(caught.value)


def files(tmp_path: Path) -> list[str]:
    """Overrides that give a recipe its data."""
    (tmp_path / "questions.jsonl").write_text("{}\n")
    return [f"data.{key}_files={tmp_path}/questions.jsonl" for key in ("train", "val")]
