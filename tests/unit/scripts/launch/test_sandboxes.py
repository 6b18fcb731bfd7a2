"""A run that needs sandboxes starts only where there are any, and its keys are checked before."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.sandbox import SandboxBackend
from configs.schema import Config
from configs.validate import ConfigError, check
from rollout.environments.sandbox.commands import SandboxedCommands
from rollout.environments.sandbox.launching import shipped_tasks
from rollout.environments.sandbox.sandboxes import provide, sandbox_config
from rollout.sessions.harness import start_here
from scripts.launch.data import held_out_sources, load_sources
from scripts.launch.sandboxes import command_place, prepare_sandboxes, refuse_without_sandboxes
from tests.support.compose import changed, refusal, resolve

HARBOR: dict[str, Any] = {
    "sandbox__backend": SandboxBackend.harbor,
    "sandbox__harbor_python": sys.executable,
    "sandbox__harbor_environment": "e2b",
    "sandbox__image": "an/image:1",
}
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


def make_tasks(folder: Path, images: dict[str, str]) -> Path:
    """Make a task of Harbor's format for each name, made for the image of that name."""
    for name, image in images.items():
        shutil.copytree(shipped_tasks() / "count_errors", folder / name)
        with (folder / name / "task.toml").open("a") as toml:  # it ends in the table of the environment
            toml.write(f'docker_image = "{image}"\n')
    return folder


def test_tasks_whose_image_bubblewrap_cannot_start_are_refused_before_their_first_episode(tmp_path: Path) -> None:
    tasks = make_tasks(tmp_path / "tasks", {name: "python:3.12" for name in "abcde"})
    with pytest.raises(ConfigError) as refused:
        load_sources(resolve("model=chat", f"+data.sources.code.data.harbor={tasks}"))
    first, *_, last = str(refused.value).splitlines()
    assert first.startswith(f"data.sources.code: data.harbor={tasks}: task {tasks}/a: docker_image=python:3.12 needs ")
    assert "needs sandbox.image=FOLDER" in first and "or sandbox.backend=docker or podman" in first
    assert last == "and 2 more tasks"
    unpacked = resolve("model=chat", f"data.harbor={tasks}", f"sandbox.image={tmp_path}")
    assert len(load_sources(unpacked)[""][0]) == 5
    held_out = resolve("model=chat", "data.harbor=slipstream/tasks", f"data.val_files={tasks}")
    with pytest.raises(ConfigError, match=f"task {tasks}/a: docker_image=python:3.12 needs sandbox.image"):
        held_out_sources(held_out)


def test_tasks_whose_image_docker_has_not_are_refused_with_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" >> "$0.calls"\n[ "$5" = here:1 ]\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tasks = make_tasks(tmp_path / "tasks", {"a": "here:1", "b": "here:1", "c": "there:1"})
    words = ("model=chat", f"data.harbor={tasks}", "sandbox.backend=docker", "sandbox.image=here:1")
    with pytest.raises(ConfigError) as refused:
        load_sources(resolve(*words))
    fetch = "docker_image=there:1 is not on this machine: `docker pull there:1` fetches it"
    assert str(refused.value) == f"data.harbor={tasks}: task {tasks}/c: {fetch}"
    assert len((tmp_path / "docker.calls").read_text().splitlines()) == 2, "each image is asked for once"
    load_sources(resolve(*words, "ray.address=head:6379"))


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
    assert command_place(config) is start_here
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
    assert problem in refusal(changed(Config(), **{**AGENT, **keys}), needed_files=())


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
        ({"sandbox__harbor_environment": "e2b"}, "sandbox.harbor_environment=e2b: needs sandbox.backend=harbor"),
        ({**HARBOR, "sandbox__image": None}, "sandbox.image=None: sandbox.backend=harbor needs the name of an image"),
        (
            {**HARBOR, "sandbox__harbor_environment": None},
            "sandbox.harbor_environment=None: sandbox.backend=harbor",
        ),
        ({**HARBOR, "sandbox__reuse": True}, "sandbox.reuse=True: must be false with sandbox.backend=harbor"),
        ({"sandbox__memory_mb": 1}, "sandbox.memory_mb=1: must be between 64 and 1000000"),
    ],
)
def test_keys_that_contradict_others_are_refused(keys: dict[str, Any], problem: str) -> None:
    check(changed(Config(), rollout__reward=REWARD))
    assert problem in refusal(changed(Config(), rollout__reward=REWARD, **keys))
    if "sandbox__memory_mb" not in keys:
        check(changed(Config(), **keys))
