"""Starts the agent workers of a run, with the agent loop that its config names."""

from collections.abc import Callable, Iterable
from typing import Any

from configs.mixture import sources_of
from configs.named_agents import NAMED_AGENTS
from configs.schema import Config
from configs.validate import ConfigError
from rollout.actors.processes import end_descendants_with_this
from rollout.agents.loop import AgentLoop, is_harness, load_agent_loop
from rollout.agents.tool_processes import make_processes, tools_in
from rollout.agents.worker import AgentWorker
from rollout.agents.worker_group import AgentWorkerGroup
from rollout.events.driver import NO_EVENTS, DriverEvents
from rollout.replica.client import ReplicaClient
from scripts.launch.sandboxes import command_place, prepare_sandboxes

NOTICED = ("rollout.environments",)
"""Loggers in agent workers whose warnings the console shows."""


def start_agents(
    config: Config,
    tokenizer_path: str,
    replicas: Iterable[ReplicaClient],
    on_start: Callable[[str], Callable[[], None]],
    agent_loop: AgentLoop | None = None,
    events: DriverEvents = NO_EVENTS,
) -> AgentWorkerGroup:
    """Start agent workers, with `agent_loop` in place of the config's where it is given."""
    return AgentWorkerGroup(
        config=config,
        tokenizer_path=tokenizer_path,
        replicas=replicas,
        on_start=on_start,
        load_loop=load_loop if agent_loop is None else lambda _config, _tokenizer: agent_loop,
        noticed=NOTICED,
        events=events,
    )


def refuse_without_agent(config: Config) -> None:
    """Raise ConfigError where this machine, on which agents run, has not the program of the agent that rollout.agent
    names. The machines of a cluster are asked when their agent workers start."""
    for source in sources_of(config):
        agent = NAMED_AGENTS.get(source.config.rollout.agent or "")
        if agent is not None and config.ray.address is None and agent.problem is not None:
            whose = f"data.sources.{source.name}: " if source.name else ""
            raise ConfigError(f"{whose}rollout.agent={agent.name}: {agent.problem}")


def load_loop(config: Config, tokenizer: Any) -> AgentLoop:
    """Return the agent loop of rollout.agent_loop, rollout.agent or rollout.agent_command. Raises ValueError."""
    prepare_sandboxes(config)
    end_descendants_with_this()  # rewards, environments and commands start some, which outlive no worker that is killed
    if not is_harness(config):
        with tools_in(make_processes(config.rollout)):  # a tool that cannot run there is refused
            return load_agent_loop(config.rollout.agent_loop, tokenizer, config.rollout.agent_args)
    from rollout.sessions.harness_loop import load_harness_loop  # with a web server, which other loops do without

    return load_harness_loop(config, tokenizer, command_place(config))


async def check_chat_template(config: Config, agents: AgentWorkerGroup) -> str | None:
    """Return what is wrong with the model's chat template for the sessions of a harness."""
    for source in sources_of(config):
        if is_harness(source.config):
            return await agents.call(_find_problem, "looking at the template", source.name)
    return None


def _find_problem(worker: AgentWorker) -> str | None:
    from rollout.chat.append_only import append_only  # the driver does without the tokenizer's libraries

    report = append_only(worker.tokenizer)
    return None if report.is_append_only else str(report)
