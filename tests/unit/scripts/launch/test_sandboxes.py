"""A run that needs sandboxes starts only where there are any, and its keys are checked before."""

from pathlib import Path
from typing import Any

import pytest

from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.validate import ConfigError, check
from rollout.environments.sandbox.commands import SandboxedCommands
from rollout.environments.sandbox.sandboxes import provide, sandbox_config
from rollout.sessions.harness import MACHINE
from scripts.launch.sandboxes import command_place, prepare_sandboxes, refuse_without_sandboxes
from tests.support.compose import changed

REWARD = "rollout.environments.sandbox.hidden_tests:hidden_tests"
NEEDING: list[dict[str, Any]] = [
    {"rollout__agent_loop": "rollout.environments.sandbox.tools:agent_loop"},
    {"rollout__reward": REWARD},
    {"rollout__reward": f"{REWARD}+0.1*format"},
    {"rollout__agent_command": "run-it", "rollout__agent_sandbox": True},
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


def test_a_run_whose_agent_would_see_the_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    config = changed(
        Config(),
        data__train_files=f"{tmp_path}/data/train.jsonl",
        rollout__agent_command="run-it",
        rollout__agent_sandbox=True,
        rollout__agent_sandbox_folders=[str(tmp_path)],
        ray__address="head:6379",
    )
    with pytest.raises(ConfigError, match="data.train_files=.*: is in a folder that sandboxes see"):
        refuse_without_sandboxes(config)
    refuse_without_sandboxes(changed(config, rollout__agent_sandbox_folders=[]))


def test_commands_run_in_a_sandbox_where_the_config_says_so() -> None:
    config = changed(Config(), rollout__agent_command="run-it")
    assert command_place(config) is MACHINE
    assert isinstance(command_place(changed(config, rollout__agent_sandbox=True)), SandboxedCommands)


AGENT: dict[str, Any] = {"rollout__agent_command": "run-it", "rollout__agent_sandbox": True}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"rollout__agent_command": None}, "rollout.agent_sandbox=True: needs a command: rollout.agent_command, or"),
        ({"sandbox__backend": SandboxBackend.docker}, "sandbox.backend=docker: must be bubblewrap with"),
        ({"sessions__fresh_folder": False}, "sessions.fresh_folder=False: must be true with"),
        ({"sessions__host": "0.0.0.0"}, "sessions.host=0.0.0.0: must be a loopback address"),
        ({"rollout__agent_sandbox_folders": ["here"]}, "rollout.agent_sandbox_folders=here: must be absolute"),
        ({"rollout__agent_sandbox_folders": ["/usr/.."]}, "rollout.agent_sandbox_folders=/usr/..: must be absolute"),
        ({"rollout__agent_sandbox_folders": ["/no/such"]}, "rollout.agent_sandbox_folders=/no/such: no such folder"),
        ({"rollout__agent_sandbox": False, "rollout__agent_sandbox_folders": ["/usr"]}, "needs rollout.agent_sandbox"),
    ],
)
def test_what_keeps_a_command_from_a_sandbox_is_refused(keys: dict[str, Any], problem: str) -> None:
    check(changed(Config(), **AGENT), needed_files=())
    with pytest.raises(ConfigError) as refusal:
        check(changed(Config(), **{**AGENT, **keys}), needed_files=())
    assert problem in str(refusal.value)


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
