"""Sandboxes that a run needs, and keys of theirs that contradict others."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from configs.checks.problem import Problem
from configs.named_agents import NAMED_AGENTS
from configs.rewards import parse_reward
from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.serve import is_loopback

ROOM = "rollout.environments.sandbox."
"""The package whose agent loops and rewards run something in sandboxes."""
OWN_PLACES = tuple(map(Path, ("/", "/dev", "/proc", "/episode")))
"""The places in the sandbox of an agent that are its own."""


def needs_sandbox(config: Config) -> bool:
    """Return whether the agent loop, the harness or a reward of the config is one of those that use sandboxes."""
    rollout = config.rollout
    is_of_room = any((path or "").startswith(ROOM) for path in (rollout.agent_loop, rollout.agent))
    return rollout.agent_sandbox or is_of_room or _rewards_in_sandbox(config)


def _rewards_in_sandbox(config: Config) -> bool:
    with suppress(ValueError):  # a wrong expression is another check's
        return any(term.path.startswith(ROOM) for term in parse_reward(config.rollout.reward))
    return False


def sandbox_problems(config: Config) -> Iterator[Problem]:
    sandbox, reward_s = config.sandbox, config.rollout.reward_timeout_s
    yield from _agent_problems(config)
    if not needs_sandbox(config):
        return
    if sandbox.backend is SandboxBackend.bubblewrap:
        is_here = config.ray.address is None  # the machines of a cluster may have what this one has not
        if sandbox.image is not None and is_here and not Path(sandbox.image).expanduser().is_dir():
            yield Problem("sandbox.image", "with sandbox.backend=bubblewrap, must be the folder of an unpacked image")
    elif sandbox.image is None:
        yield Problem("sandbox.image", f"sandbox.backend={sandbox.backend.value} needs the name of an image")
    yield from _harbor_problems(config)
    if _rewards_in_sandbox(config) and sandbox.start_timeout_s + sandbox.timeout_s >= reward_s:
        sum_of = "the sum of sandbox.start_timeout_s and sandbox.timeout_s"
        yield Problem("sandbox.timeout_s", f"{sum_of} must be less than rollout.reward_timeout_s={reward_s:g}")


def _harbor_problems(config: Config) -> Iterator[Problem]:
    sandbox = config.sandbox
    keys = {key: getattr(sandbox, key) for key in ("harbor_python", "harbor_environment", "harbor_args")}
    if sandbox.backend is not SandboxBackend.harbor:
        for key, value in keys.items():
            if value:
                yield Problem(f"sandbox.{key}", "needs sandbox.backend=harbor")
        return
    for key in ("harbor_python", "harbor_environment"):
        if not keys[key]:
            yield Problem(f"sandbox.{key}", "sandbox.backend=harbor needs it")
    if sandbox.reuse:
        yield Problem("sandbox.reuse", "must be false with sandbox.backend=harbor: programs can write everywhere in it")


def _agent_problems(config: Config) -> Iterator[Problem]:
    """Yield what keeps the command of an agent from a sandbox."""
    rollout = config.rollout
    if not rollout.agent_sandbox:
        if rollout.agent_sandbox_folders:
            yield Problem("rollout.agent_sandbox_folders", "needs rollout.agent_sandbox=true")
        return
    if rollout.agent_command is None and rollout.agent not in NAMED_AGENTS:
        names = ", ".join(NAMED_AGENTS)
        yield Problem("rollout.agent_sandbox", f"needs a command: rollout.agent_command, or rollout.agent={names}")
    if config.sandbox.backend is not SandboxBackend.bubblewrap:
        yield Problem("sandbox.backend", "must be bubblewrap with rollout.agent_sandbox=true")
    if not config.sessions.fresh_folder:
        yield Problem("sessions.fresh_folder", "must be true with rollout.agent_sandbox=true")
    if not is_loopback(config.sessions.host):
        allowed = "must be a loopback address, such as 127.0.0.1, with rollout.agent_sandbox=true: it has no other"
        yield Problem("sessions.host", allowed)
    is_here = config.ray.address is None  # the machines of a cluster may have what this one has not
    for folder in rollout.agent_sandbox_folders:
        path = Path(os.path.normpath(os.path.expanduser(folder)))
        if not path.is_absolute() or path in OWN_PLACES or any(place in path.parents for place in OWN_PLACES[1:]):
            places = ", ".join(map(str, OWN_PLACES))
            yield Problem("rollout.agent_sandbox_folders", f"must be absolute, and none of {places}", folder)
        elif is_here and not path.exists():
            yield Problem("rollout.agent_sandbox_folders", "no such folder or file", folder)
