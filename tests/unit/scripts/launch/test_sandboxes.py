"""A run that needs sandboxes starts only where there are any, and its keys are checked before."""

from pathlib import Path
from typing import Any

import pytest

from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.validate import ConfigError, check
from rollout.environments.sandbox.sandboxes import provide, sandbox_config
from scripts.launch.sandboxes import prepare_sandboxes, refuse_without_sandboxes
from tests.support.compose import changed

REWARD = "rollout.environments.sandbox.hidden_tests:hidden_tests"
NEEDING: list[dict[str, Any]] = [
    {"rollout__agent_loop": "rollout.environments.sandbox.tools:agent_loop"},
    {"rollout__reward": REWARD},
    {"rollout__reward": f"{REWARD}+0.1*format"},
]


@pytest.mark.parametrize("keys", NEEDING)
def test_a_run_that_needs_sandboxes_is_refused_where_bubblewrap_is_missing(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sandbox.backend=bubblewrap: bwrap is not installed: apt-get install"):
        refuse_without_sandboxes(changed(Config(), **keys))
    refuse_without_sandboxes(Config())
    refuse_without_sandboxes(changed(Config(), **keys, ray__address="head:6379"))


def test_an_agent_worker_knows_the_sandboxes_of_its_config() -> None:
    before = sandbox_config()
    try:
        prepare_sandboxes(changed(Config(), sandbox__warm=7))
        assert sandbox_config().warm == 7
    finally:
        provide(before)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"sandbox__backend": SandboxBackend.docker}, "sandbox.image=None: sandbox.backend=docker needs the name"),
        (
            {"sandbox__image": "no/such/folder"},
            "sandbox.image=no/such/folder: with sandbox.backend=bubblewrap, must be",
        ),
        (
            {"sandbox__timeout_s": 30.0},
            "sandbox.timeout_s=30.0: the sum of sandbox.start_timeout_s and sandbox.timeout_s",
        ),
        ({"sandbox__memory_mb": 1}, "sandbox.memory_mb=1: must be between 64 and 1000000"),
    ],
)
def test_keys_that_contradict_others_are_refused(keys: dict[str, Any], problem: str) -> None:
    check(changed(Config(), rollout__reward=REWARD))
    with pytest.raises(ConfigError) as refusal:
        check(changed(Config(), rollout__reward=REWARD, **keys))
    assert problem in str(refusal.value)
    if "sandbox__memory_mb" not in keys:
        check(changed(Config(), **keys))
