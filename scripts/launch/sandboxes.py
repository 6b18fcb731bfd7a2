"""Sees to it that a run that needs sandboxes can start them, before anything else starts."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from configs.checks.sandbox import needs_sandbox
from configs.harbor import AGENT_LOOP
from configs.mixture import Source, sources_of
from configs.named_agents import NAMED_AGENTS
from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.validate import ConfigError
from rollout.data.sources import DataError
from rollout.environments.sandbox.commands import CommandLauncher, SandboxedCommands
from rollout.environments.sandbox.harbor import COLUMN, Task, TaskError, read_task
from rollout.environments.sandbox.launching import SHOWN, SandboxUnavailableError, check_backend, has_image, is_shown
from rollout.environments.sandbox.programs import Shown, shown_for
from rollout.environments.sandbox.sandboxes import provide
from rollout.prompts import Row
from rollout.sessions.harness import CommandPlace, start_here

MOST_SHOWN = 3
"""The tasks that an error names."""


def refuse_without_sandboxes(config: Config) -> None:
    """Raise ConfigError where this machine, on which agents run, cannot start the sandboxes that the config needs, or
    where they would see the tests. The machines of a cluster are asked when their agent workers start."""
    sources = sources_of(config)
    if not any(needs_sandbox(source.config) for source in sources):
        return
    for source in sources:
        _refuse_shown_data(source)
    if config.ray.address is None:
        for source in sources:
            try:
                _check(source.config)
            except SandboxUnavailableError as error:
                raise ConfigError(str(error)) from error


def _refuse_shown_data(source: Source) -> None:
    config, whose = source.config, f"data.sources.{source.name}: " if source.name else ""
    if config.sandbox.backend is not SandboxBackend.bubblewrap:
        return
    system = SHOWN if config.sandbox.image is None else ()
    shown = (*system, *(each.path for each in _shown(config) if config.rollout.agent_sandbox))
    for key, entries in (("train_files", config.data.train_files), ("val_files", config.data.val_files)):
        for entry in (entries or "").split(","):
            path = Path(entry.strip().partition("@")[0]).expanduser()
            if entry.strip() and path.exists() and is_shown(path, shown):
                folder = "a folder that sandboxes see, with the tests in it"
                raise ConfigError(
                    f"{whose}data.{key}={entry.strip()}: is in {folder}: move it out, or set sandbox.image"
                )


def refuse_tasks(config: Config, rows: Iterable[Row]) -> None:
    """Raise DataError where a row is a task of Harbor's format that the sandboxes of the run cannot do: it would fail
    in each of its episodes.

    Args:
        config: That of the rows' source.
    """
    if config.rollout.agent_loop != AGENT_LOOP:
        return
    tasks = [read_task(Path(row.extra[COLUMN])) for row in rows if COLUMN in row.extra]
    problems = list(_task_problems(config, tasks))
    if problems:
        key = "data.train_files and val_files" if config.data.harbor is None else f"data.harbor={config.data.harbor}"
        more = f"\nand {len(problems) - MOST_SHOWN} more tasks" if len(problems) > MOST_SHOWN else ""
        raise DataError(f"{key}: task " + "\ntask ".join(problems[:MOST_SHOWN]) + more)


def _task_problems(config: Config, tasks: Sequence[Task]) -> Iterator[str]:
    are_here = dict[str, bool]()
    for task in tasks:
        try:
            image = task.image(config.sandbox)
        except TaskError as error:
            yield str(error)
            continue
        if image is None or config.ray.address is not None or config.sandbox.backend is SandboxBackend.harbor:
            continue  # the machines of a cluster have images of their own, and Harbor fetches or builds them
        if image not in are_here:
            try:
                are_here[image] = has_image(config.sandbox, image)
            except SandboxUnavailableError as error:
                raise DataError(str(error)) from error
        if not are_here[image]:
            backend = config.sandbox.backend.value
            yield f"{task.folder}: docker_image={image} is not on this machine: `{backend} pull {image}` fetches it"


def prepare_sandboxes(config: Config) -> None:
    """Make the process of an agent worker ready for sandboxes. Raises SandboxUnavailableError where its machine cannot
    start those that the config needs."""
    provide(config.sandbox)
    _check(config)


def command_place(config: Config) -> CommandPlace:
    """Return the place where the commands of rollout.agent_command and rollout.agent run."""
    return SandboxedCommands(config.sandbox, _shown(config)) if config.rollout.agent_sandbox else start_here


def _check(config: Config) -> None:
    if config.rollout.agent_sandbox:
        check_backend(config.sandbox, CommandLauncher(config.sandbox, _shown(config)))
    elif needs_sandbox(config):
        check_backend(config.sandbox)


def _shown(config: Config) -> list[Shown]:
    """Return what the sandbox of an agent's command shows besides the system. The programs of an image are in it."""
    rollout = config.rollout
    named = NAMED_AGENTS.get(rollout.agent or "")
    command = named.command if named is not None else rollout.agent_command or ""
    return shown_for(command if config.sandbox.image is None else "", rollout.agent_sandbox_folders)
