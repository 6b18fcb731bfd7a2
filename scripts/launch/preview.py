"""What is looked at besides the config before anything starts: the rows of the data, vLLM's parsers, and in a dry run
the agent loop that a user's own code makes."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.checkpoint import is_checkpoint
from configs.checks.problem import Problem
from configs.checks.sections import BUILT_IN_AGENT_LOOPS, TRAIN_AND_VAL, missing_data
from configs.runtime.environment import PYTHON_PATH
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from rollout.agents.loop import load_agent_loop
from rollout.agents.worker_group import load_tokenizer
from rollout.sessions.append_only import append_only
from scripts.export_hf import checkpoint_at
from scripts.launch.data import held_out_rows, load_rows
from scripts.launch.models import untrained_tiny_model
from scripts.launch.teacher import refuse_another_tokenizer
from trainer.checkpoint.store import CheckpointError

PARSER_NAMES = "import json; from rollout.engines.vllm.parsers import parser_names; print(json.dumps(parser_names()))"


def count_rows(config: Config, needed_files: Sequence[str]) -> tuple[int | None, int | None]:
    """(training, held-out) rows, each None where it is not needed or missing. Raises DataError for a malformed row."""
    if not needed_files or any(missing_data(config, needed_files)):
        return None, None
    if tuple(needed_files) == TRAIN_AND_VAL:
        train, held_out = load_rows(config)
        return len(train), len(held_out)
    return None, len(held_out_rows(config))


def check_agent_loop(config: Config) -> str | None:
    """Makes the agent loop as an agent worker does. Returns why that cannot be done here. Raises ConfigError for what
    is no agent loop."""
    if config.rollout.agent_loop in BUILT_IN_AGENT_LOOPS:
        return None
    key = f"rollout.agent_loop={config.rollout.agent_loop}: "
    try:
        tokenizer = _tokenizer(config)
    except (OSError, ValueError) as error:
        return f"{key}not made, for want of the tokenizer: {_line(error)}"
    try:
        load_agent_loop(config.rollout.agent_loop, tokenizer, config.rollout.agent_args)
    except Exception as error:
        text = str(error) if str(error).startswith(key) else f"{key}{type(error).__name__}: {error}"
        raise ConfigError(text) from error
    return None


def chat_template_of_sessions(config: Config) -> str | None:
    """What a harness will find of the model's chat template; None without a harness. Raises ConfigError where the model
    has none that sessions can use."""
    key = "agent" if config.rollout.agent is not None else "agent_command"
    if (harness := config.rollout.agent or config.rollout.agent_command) is None:
        return None
    try:
        tokenizer = _tokenizer(config)
    except (OSError, ValueError) as error:
        return f"chat template: not looked at, for want of the tokenizer: {_line(error)}"
    try:
        return str(append_only(tokenizer))
    except ValueError as error:
        raise ConfigError(f"rollout.{key}={harness}: {error}") from error


def teacher_tokenizer(config: Config) -> str | None:
    """Why the tokenizer of the teacher cannot be compared with the policy's here; None where it can. Raises ConfigError
    where it is another."""
    if config.teacher.path is None:
        return None
    try:
        refuse_another_tokenizer(config, _loaded(config.teacher.path), _tokenizer(config))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        return f"teacher.path={config.teacher.path}: its tokenizer was not compared with the policy's: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _tokenizer(config: Config) -> Any:
    """That of the model, which is not downloaded. Raises OSError and ValueError."""
    if config.model.kind is not ModelKind.tiny:
        return _loaded(config.model.path or "")
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(untrained_tiny_model(config, Path(folder) / "model"), local_only=True)


def _loaded(path: str) -> Any:
    """`path`: as model.path. Raises OSError and ValueError."""
    folder = Path(path).expanduser()
    if is_checkpoint(folder):
        try:
            path = str(checkpoint_at(folder).model_folder)
        except CheckpointError as error:
            raise OSError(str(error)) from error
    return load_tokenizer(path, local_only=True)


def check_parsers(config: Config) -> None:
    """Raises ConfigError for a parser of sessions that vLLM does not have. Another process asks vLLM, which takes ten
    seconds to import and changes the environment of who imports it."""
    given = {"tool_parser": config.sessions.tool_parser, "reasoning_parser": config.sessions.reasoning_parser}
    if not any(given.values()):
        return
    timeout_s = config.rollout.start_timeout_s
    try:
        asked = subprocess.run(
            [sys.executable, "-c", PARSER_NAMES],
            env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        why = f"vLLM did not name its parsers within rollout.start_timeout_s={timeout_s:g}"
        raise ConfigError(f"sessions.tool_parser: {why}") from error
    if asked.returncode:
        raise ConfigError(f"sessions.tool_parser: vLLM cannot be asked for its parsers:\n{asked.stderr[-2000:]}")
    for key, known in json.loads(asked.stdout.splitlines()[-1]).items():
        if given[key] is not None and given[key] not in known:
            problem = Problem(f"sessions.{key}", f"vLLM has no such parser; use one of {', '.join(known)}")
            raise ConfigError(problem.line(config))
