"""Reads a script or file of another framework, and says whose it is."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import yaml

from scripts.migrate.python_source import INSTEAD, read_python
from scripts.migrate.settings import Setting, Source, Unread, UnreadableError, flat, last_of_each
from scripts.migrate.shell import Shell, options_of, overrides_of, unread_words

FRAMEWORKS = {"verl": "verl", "skyrl": "skyrl", "trl": "trl", "prime-rl": "prime_rl"}
"""The names on the command line, and those of `configs.cli.peers`."""
MARKS = {
    "skyrl": re.compile(
        r"\bskyrl|generator\.(inference_engine|n_samples|sampling_params|num_inference)", re.IGNORECASE
    ),
    "verl": re.compile(r"\bverl\b|\bmain_(ppo|dapo)\b|actor_rollout_ref\."),
    "prime_rl": re.compile(r"\bprime[-_]rl\b|^\s*\[{1,2}(orchestrator|inference|deployment)\b", re.MULTILINE),
    "trl": re.compile(r"\btrl\b|\bGRPO(Config|Trainer)\b|num_generations|per_device_train_batch_size"),
}
"""Signs of a file of each framework, in the order in which they are looked for."""


SFT = re.compile(r"(\S*[._/])?(fsdp_|main_)?sft(_trainer\w*|_with\w*)?(\.py)?", re.IGNORECASE)
"""The names of programs that fine-tune on conversations, such as `verl.trainer.fsdp_sft_trainer` and `trl sft`."""


def read(path: Path, framework: str | None) -> Source:
    """Read a file of the framework, a value of FRAMEWORKS; None finds out which. Raises UnreadableError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path}: cannot be read: {error}") from error
    framework = framework or _framework_of(path, text)
    try:
        settings = last_of_each(_settings(path, text, framework))
    except UnreadableError as error:
        raise UnreadableError(f"{path}: {error}") from error
    if not settings:
        raise UnreadableError(f"{path}: has no setting of {framework} that could be read")
    return Source(framework=framework, settings=settings)


def _framework_of(path: Path, text: str) -> str:
    for framework, mark in MARKS.items():
        if mark.search(text):
            return framework
    known = ", ".join(f"from-{name}" for name in FRAMEWORKS)
    raise UnreadableError(f"{path}: nothing in it tells its framework; name it: {known}")


def _settings(path: Path, text: str, framework: str) -> list[Setting]:
    match path.suffix:
        case ".py":
            return read_python(text)
        case ".toml":
            try:
                return flat(tomllib.loads(text))
            except tomllib.TOMLDecodeError as error:
                raise UnreadableError(f"is no TOML: {error}") from error
        case ".yaml" | ".yml":
            try:
                tree = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise UnreadableError(f"is no YAML: {error}") from error
            if not isinstance(tree, Mapping):
                raise UnreadableError("has no keys")
            return flat(tree)
    return _of_script(text, framework)


def _of_script(text: str, framework: str) -> list[Setting]:
    """Return the settings of the command of a script that has most: others prepare data and the like."""
    shell = Shell()
    shell.read(text)
    read_words = overrides_of if framework in ("verl", "skyrl") else options_of
    commands = [command for command in shell.commands if _starts(command, framework)]
    command = max(commands, key=lambda command: len(read_words(command)), default=[])
    before = dict(zip(command[1:], command, strict=False))
    programs = [word for word in command if before.get(word) in ("-m", "trl") or word.endswith(".py")]
    if fine_tuning := [word for word in programs if SFT.fullmatch(word) and "=" not in word]:
        raise UnreadableError(f"{fine_tuning[0]} {INSTEAD}")
    unread = unread_words(command) if read_words is overrides_of else []
    doubts = [Setting(name, Unread(why)) for name, why in shell.doubts.items()]
    settings = read_words(command)
    return [*settings, *unread, *doubts] if settings else []


def _starts(command: list[str], framework: str) -> bool:
    if framework in ("verl", "skyrl"):
        return sum("." in word.partition("=")[0] for word in command if "=" in word) > 1
    return any(word.startswith("--") for word in command)
