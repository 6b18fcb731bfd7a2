"""Values that keep an agent from talking to its session: rollout.agent, rollout.agent_command and sessions.*."""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.checks.problem import Problem, dotted_problems
from configs.checks.sections import BUILT_IN_AGENT_LOOPS, TRAIN_AND_VAL
from configs.data import Generated
from configs.named_agents import NAMED_AGENTS
from configs.rollout import PROMPT_PLACEHOLDER
from configs.schema import Config, ModelKind


def agent_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    yield from _harness_problems(config)
    yield from _session_problems(config)
    yield from _named_agent_problems(config, needed_files)
    yield from _chat_template_problems(config, needed_files)


def _harness_problems(config: Config) -> Iterator[Problem]:
    rollout, sessions = config.rollout, config.sessions
    harnesses = [key for key in ("agent", "agent_command") if getattr(rollout, key) is not None]
    if not harnesses:
        return
    if len(harnesses) == 2:
        yield Problem("rollout.agent_command", "rollout.agent is set, too: a run has one harness")
    if rollout.agent_loop not in BUILT_IN_AGENT_LOOPS:
        yield Problem("rollout.agent_loop", f"rollout.{harnesses[0]} is set, too: a run has an agent loop or a harness")
    if rollout.agent is not None:
        yield from dotted_problems(
            "rollout.agent", rollout.agent, tuple(NAMED_AGENTS), ("task", "client"), rollout.agent_args
        )
    if (command := rollout.agent_command) is not None:
        if not command.strip():
            yield Problem("rollout.agent_command", "must be a command", repr(command))
        if _is_in_quotes(command, PROMPT_PLACEHOLDER):
            allowed = f"{PROMPT_PLACEHOLDER} must stand outside of quotes: it is quoted for the shell"
            yield Problem("rollout.agent_command", allowed)
    if sessions.timeout_s >= rollout.group_timeout_s:
        yield Problem("sessions.timeout_s", f"must be less than rollout.group_timeout_s={rollout.group_timeout_s:g}")
    try:
        socket.getaddrinfo(sessions.host, None, flags=socket.AI_PASSIVE)
    except OSError:
        yield Problem("sessions.host", "must be an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0")


def _is_in_quotes(command: str, word: str) -> bool:
    """Return whether the word begins inside of quotes of the shell anywhere in the command."""
    quote, is_escaped = "", False
    for index, character in enumerate(command):
        if quote and command.startswith(word, index):
            return True
        if is_escaped:
            is_escaped = False
        elif character == "\\" and quote != "'":
            is_escaped = True
        elif character in "'\"" and quote in ("", character):
            quote = "" if quote else character
    return False


def _session_problems(config: Config) -> Iterator[Problem]:
    """Keys that only commands read, and folders that are not there."""
    sessions, template = config.sessions, config.sessions.folder_template
    if sessions.command_reward and config.rollout.agent_command is None:
        yield Problem("sessions.command_reward", "needs rollout.agent_command")
    if template is None:
        return
    if not sessions.fresh_folder:
        yield Problem("sessions.folder_template", "needs sessions.fresh_folder=true")
    if not Path(template).expanduser().is_dir():
        yield Problem("sessions.folder_template", "no such folder")


def _named_agent_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    """Yield what keeps a named agent from its settings and, where it runs on prompts of the data, from its first
    answer. The machines on which it runs say whether they have its program."""
    rollout, sessions = config.rollout, config.sessions
    if (agent := NAMED_AGENTS.get(rollout.agent or "")) is None:
        return
    if rollout.agent_args:
        yield Problem("rollout.agent_args", f"rollout.agent={agent.name} is a command, which takes none")
    if agent.files and not sessions.fresh_folder:
        files = ", ".join(agent.files)
        yield Problem("sessions.fresh_folder", f"must be true: rollout.agent={agent.name} writes {files} into its HOME")
    if (template := sessions.folder_template) is not None:
        for path in (path for path in agent.files if (Path(template).expanduser() / path).exists()):
            allowed = f"must not have {path}, which rollout.agent={agent.name} writes"
            yield Problem("sessions.folder_template", allowed)
    context = config.context_tokens
    if context < agent.context and set(needed_files) & set(TRAIN_AND_VAL):
        needs = f"rollout.agent={agent.name} needs a context of {agent.context} tokens"
        allowed = f"{needs}, and with data.max_prompt_tokens={config.data.max_prompt_tokens} it has {context}"
        yield Problem("rollout.max_response_tokens", allowed)


def _chat_template_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
    """Keys that need a chat template, where the model that is made here has none. Other tokenizers are looked at when
    they are there."""
    is_plain = config.model.kind is ModelKind.tiny and config.data.generated is not Generated.calculator
    if not is_plain or not set(needed_files) & set(TRAIN_AND_VAL):
        return
    allowed = (
        f"needs a chat template, which the model of data.generated={config.data.generated.value} has not: set "
        "model=chat, whose data.generated=calculator gives it one, or model=hf model.path=..."
    )
    if config.data.chat_template:
        yield Problem("data.chat_template", allowed)
    for key in ("agent", "agent_command"):
        if getattr(config.rollout, key) is not None:
            yield Problem(f"rollout.{key}", allowed)
