"""Sees to it that a run that needs sandboxes can start them, before anything else starts."""

from configs.checks.sandbox import needs_sandbox
from configs.mixture import sources_of
from configs.schema import Config
from configs.validate import ConfigError
from rollout.environments.sandbox.launching import SandboxUnavailableError, check_backend
from rollout.environments.sandbox.sandboxes import provide


def refuse_without_sandboxes(config: Config) -> None:
    """Raise ConfigError where this machine, on which agents run, cannot start the sandboxes that the config needs.
    The machines of a cluster are asked when their agent workers start."""
    is_needed = any(needs_sandbox(source.config) for source in sources_of(config))
    if is_needed and config.ray.address is None:
        try:
            check_backend(config.sandbox)
        except SandboxUnavailableError as error:
            raise ConfigError(str(error)) from error


def prepare_sandboxes(config: Config) -> None:
    """Make the process of an agent worker ready for sandboxes. Raises SandboxUnavailableError where its machine cannot
    start those that the config needs."""
    provide(config.sandbox)
    if needs_sandbox(config):
        check_backend(config.sandbox)
