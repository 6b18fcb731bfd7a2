"""Sees to it that a run that needs sandboxes can start them, before anything else starts."""

from pathlib import Path

from configs.checks.sandbox import needs_sandbox
from configs.mixture import Source, sources_of
from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.validate import ConfigError
from rollout.environments.sandbox.launching import SandboxUnavailableError, check_backend, is_shown
from rollout.environments.sandbox.sandboxes import provide


def refuse_without_sandboxes(config: Config) -> None:
    """Raise ConfigError where this machine, on which agents run, cannot start the sandboxes that the config needs, or
    where they would see the tests. The machines of a cluster are asked when their agent workers start."""
    sources = sources_of(config)
    if not any(needs_sandbox(source.config) for source in sources):
        return
    for source in sources:
        _refuse_shown_data(source)
    if config.ray.address is None:
        try:
            check_backend(config.sandbox)
        except SandboxUnavailableError as error:
            raise ConfigError(str(error)) from error


def _refuse_shown_data(source: Source) -> None:
    config, whose = source.config, f"data.sources.{source.name}: " if source.name else ""
    if config.sandbox.backend is not SandboxBackend.bubblewrap or config.sandbox.image is not None:
        return
    for key, entries in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        for entry in (entries or "").split(","):
            path = Path(entry.strip().partition("@")[0]).expanduser()
            if entry.strip() and path.exists() and is_shown(path):
                folder = "a folder that sandboxes see, with the tests in it"
                raise ConfigError(
                    f"{whose}data.{key}={entry.strip()}: is in {folder}: move it out, or set sandbox.image"
                )


def prepare_sandboxes(config: Config) -> None:
    """Make the process of an agent worker ready for sandboxes. Raises SandboxUnavailableError where its machine cannot
    start those that the config needs."""
    provide(config.sandbox)
    if needs_sandbox(config):
        check_backend(config.sandbox)
