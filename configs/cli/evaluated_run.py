"""The folder that `slipstream evaluate FOLDER` names: a run is evaluated with its own model, data, reward and sizes."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.checkpoint import CONFIG_FILE, UnreadableConfigError, is_checkpoint, read_config
from configs.cli.arguments import key_of, parsed
from configs.load import one_line
from configs.named_agents import NAMED_AGENTS
from configs.validate import ConfigError

TAKEN = ("seed", "device", "gpu_share", "model", "data", "rollout", "sessions", "sandbox", "evaluation", "ray")
"""The parts of a run's config that its evaluation takes over."""
RECIPE = "run"


def expand_folder(arguments: Sequence[str]) -> list[str]:
    """Replaces a folder, if it is the first argument, by overrides, which those after it precede. Raises ConfigError.

    Example: expand_folder(["runs/latest", "evaluation.samples=4"]) == ["recipe=run", "~sizes", "evaluation.samples=4"]
    """
    if not arguments or arguments[0].startswith(("-", "~", "+")) or "=" in arguments[0]:
        return list(arguments)
    folder = Path(arguments[0]).expanduser().resolve()
    if not folder.is_dir():
        allowed = "a run folder, a checkpoint in one or a Hugging Face folder, and then key=value"
        raise ConfigError(f"{arguments[0]}: no such folder; slipstream evaluate takes {allowed}")
    if (folder / "config.json").is_file():
        content = {"model": {"kind": "hf", "path": str(folder)}}
    elif is_checkpoint(folder):
        content = _content_of_run(folder)
        _refuse_command_of_folder(content, arguments)
    else:
        raise ConfigError(f"{arguments[0]}: neither a model nor a run with checkpoints (checkpoint.every=0 saves none)")
    ConfigStore.instance().store(group="recipe", name=RECIPE, package="_global_", node=content)
    sizes = "sizes=hf" if (folder / "config.json").is_file() else "~sizes"  # those of a run are in its config
    return [f"recipe={RECIPE}", sizes, *arguments[1:]]


def _refuse_command_of_folder(content: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raises ConfigError where the evaluation would run a command that only the folder names, be it one of the shell,
    that of a server, the Python of Harbor's sandboxes, or a named agent, which does what the model says: a run folder
    that somebody sent may hold any."""
    sources = (content.get("data") or {}).get("sources") or {}
    sections = {"rollout": content.get("rollout") or {}}
    for name, entry in sources.items():
        sections[f"data.sources.{name}.rollout"] = (entry.get("rollout") if isinstance(entry, Mapping) else None) or {}
    commands: dict[str, Any] = {"sandbox.harbor_python": (content.get("sandbox") or {}).get("harbor_python")}
    for section, rollout in sections.items():
        commands[f"{section}.agent_command"] = rollout.get("agent_command")
        commands[f"{section}.agent"] = agent if (agent := rollout.get("agent")) in NAMED_AGENTS else None
        arguments_of_loop = _commands(rollout.get("agent_args") or {})
        commands |= {f"{section}.agent_args.{name}": value for name, value in arguments_of_loop}
    for key, command in commands.items():
        if command and not any(_decides(argument, key) for argument in arguments[1:]):
            raise ConfigError(
                f"{key}={command}: {arguments[0]} has this command, which the evaluation would run on this machine; "
                f"if you know it, name it: {shlex.quote(f'{key}={command}')}"
            )


def _decides(argument: str, key: str) -> bool:
    """Return whether an argument gives the key a value, or leaves it out. A dict that lacks the key does neither: it
    is merged with what is there."""
    name = key_of(argument)
    if name == key or not key.startswith(f"{name}."):
        return name == key
    (override,) = parsed([argument])
    value: Any = override.value()
    for part in key.removeprefix(f"{name}.").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return override.is_delete() or value is not None


def _commands(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the entries called `command` of nested arguments, with their paths."""
    for name, value in arguments.items():
        if name == "command":
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _commands(value, f"{prefix}{name}.")


def _content_of_run(folder: Path) -> dict[str, Any]:
    """`folder`: a run, or one of its checkpoints, which lies two folders below."""
    file = next((path for run in (folder, folder.parent.parent) if (path := run / CONFIG_FILE).is_file()), None)
    if file is None:
        raise ConfigError(f"{folder}: its run has no {CONFIG_FILE}; set model=hf, model.path and the keys of the run")
    try:
        config = OmegaConf.to_container(read_config(file), resolve=True)
    except (UnreadableConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{folder}: {one_line(error)}") from error
    assert isinstance(config, dict)
    content: dict[str, Any] = {str(key): value for key, value in config.items() if key in TAKEN}
    content["model"] = content.get("model", {}) | {"kind": "hf", "path": str(folder)}
    if "lora" in content["model"]:  # the adapter is merged into the weights that it was trained on
        content["model"]["lora"]["served_path"] = None
    return content
