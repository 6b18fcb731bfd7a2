"""Checks beyond the config before anything starts: the rows of the data, vLLM's parsers, and in a dry run the agent
loop that a user's own code makes."""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.checkpoint import is_checkpoint
from configs.checks.problem import Problem
from configs.checks.sections import BUILT_IN_AGENT_LOOPS, TRAIN_AND_VAL, missing_data
from configs.mixture import sources_of
from configs.rollout import ToolPlace
from configs.runtime.environment import PYTHON_PATH
from configs.schema import Config, ModelKind
from configs.validate import ConfigError
from rollout.agents.loop import is_harness, load_agent_loop
from rollout.agents.tool_processes import make_processes, tools_in
from rollout.agents.worker_group import load_tokenizer
from rollout.chat.append_only import append_only
from scripts.launch.data import held_out_sources, load_sources, naming
from scripts.launch.models import untrained_tiny_model
from scripts.launch.teacher import refuse_another_tokenizer
from trainer.checkpoint.store import CheckpointError, checkpoint_at

REFUSED, MARK = 97, "\0refused: "
AGENT_LOOP_CHECK = f"""
import pickle, sys
from configs.validate import ConfigError
from scripts.plan.preview import check_agent_loop
try:
    check_agent_loop(pickle.load(sys.stdin.buffer))
except ConfigError as error:
    sys.stderr.write({MARK!r} + str(error))
    sys.exit({REFUSED})
"""
PARSER_NAMES = "import json; from rollout.engines.vllm.parsers import parser_names; print(json.dumps(parser_names()))"


def count_rows(config: Config, needed_files: Sequence[str]) -> tuple[int | None, int | None]:
    """(training, held-out) rows, each None where it is not needed or missing. Raises DataError for a malformed row."""
    if not needed_files or any(any(missing_data(source.config, needed_files)) for source in sources_of(config)):
        return None, None
    if tuple(needed_files) == TRAIN_AND_VAL:
        every = load_sources(config).values()
        held_out = [len(rows) for _, rows in every if rows is not None]
        return sum(len(train) for train, _ in every), sum(held_out) if held_out else None
    return None, sum(map(len, held_out_sources(config).values()))


def check_agent_loop(config: Config) -> str | None:
    """Make the agent loop of each source as an agent worker does. Return the reason if that is not possible here. Raise
    ConfigError for an invalid agent loop, and for tools that cannot run or be shown as the config says."""
    for source in sources_of(config):
        with naming(source.name):
            why = _check_agent_loop_of(source.config, config)
        if why is not None:
            return why
    return None


def _check_agent_loop_of(config: Config, run: Config) -> str | None:
    """Check the agent loop of one source. `config`: its own; `run`: that of all sources, which makes the model."""
    if config.rollout.agent_loop in BUILT_IN_AGENT_LOOPS:
        return None
    key = f"rollout.agent_loop={config.rollout.agent_loop}: "
    try:
        tokenizer = load_policy_tokenizer(run)
    except (OSError, ValueError) as error:
        return f"{key}not made, for want of the tokenizer: {_line(error)}"
    try:
        with tools_in(make_processes(config.rollout)):
            loop = load_agent_loop(config.rollout.agent_loop, tokenizer, config.rollout.agent_args)
    except Exception as error:
        text = str(error) if str(error).startswith("rollout.") else f"{key}{type(error).__name__}: {error}"
        hint = _way_to_a_template(config, tokenizer) if "template" in text else ""
        raise ConfigError(text + hint) from error
    if getattr(loop, "prompt_tools", None) and not config.data.chat_template:
        raise ConfigError(
            f"data.chat_template=false: {key}has tools, which only a chat template shows: set data.chat_template=true"
        )
    return None


def _way_to_a_template(config: Config, tokenizer: Any) -> str:
    """Return the end of an error where the model that is made here has no chat template, which may be the reason."""
    if config.model.kind is not ModelKind.tiny or tokenizer.chat_template is not None:
        return ""
    return "; model=chat has a chat template (with its data.generated=calculator), and so may model=hf model.path=..."


def refuse_agent_loop(config: Config) -> None:
    """Raise the ConfigError of `check_agent_loop`, before Ray and vLLM start. Another process makes the loop, which
    takes the libraries of the tokenizer; that takes seconds, and so it does only where the loop may contradict a
    key."""
    if not any(_may_contradict(source.config) for source in sources_of(config)):
        return
    with contextlib.suppress(subprocess.TimeoutExpired):  # an agent worker will tell
        checked = _run_python(AGENT_LOOP_CHECK, config.rollout.start_timeout_s, pickle.dumps(config))
        if checked.returncode == REFUSED:
            raise ConfigError(checked.stderr.decode().rpartition(MARK)[2])


def _may_contradict(config: Config) -> bool:
    is_own = config.rollout.agent_loop not in BUILT_IN_AGENT_LOOPS
    return is_own and (not config.data.chat_template or config.rollout.tools_run_in is ToolPlace.process)


def _run_python(code: str, timeout_s: float, sent: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run code that imports this checkout in another process. Raises subprocess.TimeoutExpired."""
    command, variables = [sys.executable, "-P", "-c", code], {**os.environ, "PYTHONPATH": PYTHON_PATH}
    return subprocess.run(command, env=variables, input=sent, capture_output=True, timeout=timeout_s)


def chat_template_of_sessions(config: Config) -> str | None:
    """Describe how sessions will fare with the model's chat template; None without a harness. Raises ConfigError
    where the model has no template that sessions can use."""
    with_harness = [source.config for source in sources_of(config) if is_harness(source.config)]
    return _template_for(with_harness[0], config) if with_harness else None


def _template_for(config: Config, run: Config) -> str:
    """Describe how the sessions of one source will fare. `config`: its own; `run`: that of all sources."""
    key = "agent" if config.rollout.agent is not None else "agent_command"
    harness = config.rollout.agent or config.rollout.agent_command
    try:
        tokenizer = load_policy_tokenizer(run)
    except (OSError, ValueError) as error:
        return f"chat template: not looked at, for want of the tokenizer: {_line(error)}"
    try:
        return str(append_only(tokenizer))
    except ValueError as error:
        raise ConfigError(f"rollout.{key}={harness}: {error}{_way_to_a_template(config, tokenizer)}") from error


def teacher_tokenizer(config: Config) -> str | None:
    """Return why the teacher's tokenizer cannot be compared with the policy's here, or None if it can. Raise
    ConfigError if they differ."""
    if config.teacher.path is None:
        return None
    try:
        refuse_another_tokenizer(config, _loaded(config.teacher.path), load_policy_tokenizer(config))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        return f"teacher.path={config.teacher.path}: its tokenizer was not compared with the policy's: {_line(error)}"
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def load_policy_tokenizer(config: Config) -> Any:
    """Load the tokenizer of the model, without downloading anything. Raises OSError and ValueError."""
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
    """Raise ConfigError for a session parser that vLLM does not have. Another process asks vLLM, because importing vLLM
    takes ten seconds and changes the environment of the process."""
    for source in sources_of(config):
        with naming(source.name):
            _check_parsers_of(source.config)


def _check_parsers_of(config: Config) -> None:
    parsers = {"tool_parser": config.sessions.tool_parser, "reasoning_parser": config.sessions.reasoning_parser}
    if not any(parsers.values()):
        return
    timeout_s = config.rollout.start_timeout_s
    try:
        listing = _run_python(PARSER_NAMES, timeout_s)
    except subprocess.TimeoutExpired as error:
        why = f"vLLM did not name its parsers within rollout.start_timeout_s={timeout_s:g}"
        raise ConfigError(f"sessions.tool_parser: {why}") from error
    if listing.returncode:
        why = listing.stderr.decode(errors="replace")[-2000:]
        raise ConfigError(f"sessions.tool_parser: vLLM cannot be asked for its parsers:\n{why}")
    for key, known in json.loads(listing.stdout.splitlines()[-1]).items():
        if parsers[key] is not None and parsers[key] not in known:
            problem = Problem(f"sessions.{key}", f"vLLM has no such parser; use one of {', '.join(known)}")
            raise ConfigError(problem.line(config))
