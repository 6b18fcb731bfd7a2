"""Sandboxes that a run needs, and keys of theirs that contradict others."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from configs.checks.problem import Problem
from configs.rewards import parse_reward
from configs.sandbox import SandboxBackend
from configs.schema import Config

ROOM = "rollout.environments.sandbox."
"""The package whose agent loops and rewards run something in sandboxes."""


def needs_sandbox(config: Config) -> bool:
    """Return whether the agent loop, the harness or a reward of the config is one of those that use sandboxes."""
    return any((path or "").startswith(ROOM) for path in (config.rollout.agent_loop, config.rollout.agent)) or (
        _rewards_in_sandbox(config)
    )


def _rewards_in_sandbox(config: Config) -> bool:
    with suppress(ValueError):  # a wrong expression is another check's
        return any(term.path.startswith(ROOM) for term in parse_reward(config.rollout.reward))
    return False


def sandbox_problems(config: Config) -> Iterator[Problem]:
    sandbox, reward_s = config.sandbox, config.rollout.reward_timeout_s
    if not needs_sandbox(config):
        return
    if sandbox.backend is SandboxBackend.bubblewrap:
        is_here = config.ray.address is None  # the machines of a cluster may have what this one has not
        if sandbox.image is not None and is_here and not Path(sandbox.image).expanduser().is_dir():
            yield Problem("sandbox.image", "with sandbox.backend=bubblewrap, must be the folder of an unpacked image")
    elif sandbox.image is None:
        yield Problem("sandbox.image", f"sandbox.backend={sandbox.backend.value} needs the name of an image")
    if _rewards_in_sandbox(config) and sandbox.start_timeout_s + sandbox.timeout_s >= reward_s:
        sum_of = "the sum of sandbox.start_timeout_s and sandbox.timeout_s"
        yield Problem("sandbox.timeout_s", f"{sum_of} must be less than rollout.reward_timeout_s={reward_s:g}")
