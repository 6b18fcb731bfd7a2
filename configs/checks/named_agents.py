"""Keys that contradict an agent which rollout.agent names."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.checks.problem import Problem
from configs.checks.sections import TRAIN_AND_VAL
from configs.named_agents import NAMED_AGENTS, NamedAgent
from configs.schema import Config


def named_agent_problems(config: Config, needed_files: Sequence[str]) -> Iterator[Problem]:
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
        yield from _files_in_the_way(agent, Path(template).expanduser())
    context = config.data.max_prompt_tokens + rollout.max_response_tokens
    if context < agent.context and set(needed_files) & set(TRAIN_AND_VAL):
        needs = f"rollout.agent={agent.name} needs a context of {agent.context} tokens"
        allowed = f"{needs}, and with data.max_prompt_tokens={config.data.max_prompt_tokens} it has {context}"
        yield Problem("rollout.max_response_tokens", allowed)


def _files_in_the_way(agent: NamedAgent, template: Path) -> Iterator[Problem]:
    for path in agent.files:
        if (template / path).exists():
            allowed = f"must not have {path}, which rollout.agent={agent.name} writes"
            yield Problem("sessions.folder_template", allowed)
