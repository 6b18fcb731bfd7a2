"""Stands in for the package harbor 0.26 as far as `harbor_guest.py` needs it: the same names and arguments. What is in
the environment variable HARBOR_VERSION is its version."""

import importlib
import os
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = os.environ.get("HARBOR_VERSION", "0.26.0")


class NetworkMode(Enum):
    NO_NETWORK = "no-network"
    PUBLIC = "public"


@dataclass(kw_only=True)
class NetworkPolicy:
    network_mode: NetworkMode = NetworkMode.PUBLIC


@dataclass(kw_only=True)
class TaskEnvironment:
    docker_image: str | None = None


@dataclass(kw_only=True)
class EnvironmentConfig:
    type: str | None = None
    import_path: str | None = None
    override_memory_mb: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


EnvironmentConfig.model_fields = EnvironmentConfig.__dataclass_fields__


@dataclass
class TrialPaths:
    trial_dir: Path

    def mkdir(self) -> None:
        self.trial_dir.mkdir()


class EnvironmentCapabilities:
    def __init__(self, **flags: bool):
        self.disable_internet = flags.get("disable_internet", False)


@dataclass(kw_only=True)
class ExecResult:
    stdout: str | None = None
    stderr: str | None = None
    return_code: int


class BaseEnvironment:
    def __init__(
        self,
        environment_dir: Path,
        environment_name: str,
        session_id: str,
        trial_paths: TrialPaths,
        task_env_config: TaskEnvironment,
        network_policy: NetworkPolicy,
        **kwargs: Any,
    ):
        self.environment_dir, self.trial_paths, self.task_env_config = environment_dir, trial_paths, task_env_config
        self.override_memory_mb = kwargs.get("override_memory_mb")
        assert environment_name and session_id and trial_paths.trial_dir.is_dir()
        if network_policy.network_mode is NetworkMode.NO_NETWORK and not self.capabilities.disable_internet:
            raise ValueError(f"{self.type()} environment does not support network_mode='no-network'.")
        self._validate_definition()

    async def ensure_dirs(self, dirs: list[str]) -> ExecResult:
        return await self.exec(f"mkdir -p {' '.join(dirs)} && chmod 777 {' '.join(dirs)}", user="root")


class EnvironmentFactory:
    @classmethod
    def registered_names(cls) -> list[str]:
        return ["daytona", "docker"]

    @classmethod
    def get_environment_class(cls, import_path: str) -> Any:
        module, _, name = import_path.partition(":")
        return getattr(importlib.import_module(module), name)

    @classmethod
    def run_preflight(cls, type: str | None, import_path: str | None, kwargs: dict[str, Any]) -> None:
        if type is not None:
            raise SystemExit(f"{type} requires DAYTONA_API_KEY to be set.")
        cls.get_environment_class(import_path).preflight(kwargs=kwargs)

    @classmethod
    def create_environment_from_config(cls, config: EnvironmentConfig, **arguments: Any) -> Any:
        made = cls.get_environment_class(config.import_path)
        return made(override_memory_mb=config.override_memory_mb, **config.kwargs, **arguments)


def _module(name: str, **names: Any) -> None:
    for parent in (".".join(name.split(".")[:count]) for count in range(2, name.count(".") + 2)):
        sys.modules.setdefault(parent, ModuleType(parent))
    vars(sys.modules[name]).update(names)


_module("harbor.environments.base", BaseEnvironment=BaseEnvironment, ExecResult=ExecResult)
_module("harbor.environments.capabilities", EnvironmentCapabilities=EnvironmentCapabilities)
_module("harbor.environments.factory", EnvironmentFactory=EnvironmentFactory)
_module(
    "harbor.models.task.config", EnvironmentConfig=TaskEnvironment, NetworkMode=NetworkMode, NetworkPolicy=NetworkPolicy
)
_module("harbor.models.trial.config", EnvironmentConfig=EnvironmentConfig)
_module("harbor.models.trial.paths", TrialPaths=TrialPaths)
