"""Agents that rollout.agent names: their settings, and what keeps a run with one from starting."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from configs.named_agents import NAMED_AGENTS
from configs.schema import Config
from configs.validate import ConfigError, check
from rollout.sessions.harness_loop import load_harness
from scripts.launch.agents import refuse_without_agent
from tests.support.agent_installs import INSTALLS
from tests.support.compose import changed, refusal

ROOM = {"data__max_prompt_tokens": 32768, "rollout__max_response_tokens": 16384}
SESSION = {"OPENAI_BASE_URL": "http://127.0.0.1:1/sessions/x/v1", "OPENAI_API_KEY": "session-key"}


def problems(**values: Any) -> str:
    """Return what is said of a config besides that the tiny model has no chat template."""
    lines = refusal(changed(Config(), **values)).splitlines()
    return "\n".join(line for line in lines if "needs a chat template" not in line)


@pytest.mark.parametrize("name", NAMED_AGENTS)
def test_a_named_agent_is_taken_and_its_context_is_needed(name: str) -> None:
    agent = NAMED_AGENTS[name]
    assert problems(rollout__agent=name, **ROOM) == ""
    short = {"data__max_prompt_tokens": agent.context - 1025, "rollout__max_response_tokens": 1024}
    assert f"{name} needs a context of {agent.context} tokens, and" in problems(rollout__agent=name, **short)
    check(changed(Config(), rollout__agent=name), needed_files=())  # serve and agent-check do not run it on data
    written = agent.written_files(SESSION)
    assert all(SESSION["OPENAI_BASE_URL"] in text for text in written.values())
    assert agent.command.count("{prompt}") == 1


def test_the_settings_of_codex_are_toml() -> None:
    settings = tomllib.loads(NAMED_AGENTS["codex"].written_files(SESSION)[".codex/config.toml"])
    assert settings["model_providers"][settings["model_provider"]]["base_url"] == SESSION["OPENAI_BASE_URL"]


def test_what_keeps_an_agent_from_its_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "opencode.json").write_text("{}")
    own: dict[str, Any] = {"rollout__agent": "opencode", **ROOM}
    where = f"sessions.folder_template={tmp_path}: must not have opencode.json, which rollout.agent=opencode writes"
    assert problems(**own, sessions__folder_template=str(tmp_path)) == where
    assert "sessions.fresh_folder=False: must be true" in problems(**own, sessions__fresh_folder=False)
    assert "which takes none" in problems(**own, rollout__agent_args={"topk": 1})
    assert problems(rollout__agent="claude_code", sessions__fresh_folder=False, **ROOM) == "", "it has no files"
    allowed = "must be one of claude_code, codex, opencode, mini_swe_agent, or package.module:name"
    assert problems(rollout__agent="cline").startswith(f"rollout.agent=cline: {allowed}")


@pytest.mark.parametrize("name", NAMED_AGENTS)
def test_an_agent_that_is_not_installed_is_refused_with_the_way_to_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, config = NAMED_AGENTS[name], changed(Config(), rollout__agent=name)
    monkeypatch.setenv("PATH", str(tmp_path))
    said = f"rollout.agent={name}: {agent.program} is not on PATH; install it: {agent.install}"
    with pytest.raises(ConfigError) as refused:
        refuse_without_agent(config)
    assert str(refused.value) == said
    refuse_without_agent(changed(config, ray__address="head:6379"))  # its machines may have it
    with pytest.raises(ValueError, match="is not on PATH"):
        load_harness(config)
    (tmp_path / agent.program).write_text("#!/bin/sh\n")
    (tmp_path / agent.program).chmod(0o755)
    refuse_without_agent(config)
    load_harness(config)


def test_what_is_installed_is_what_is_tested() -> None:
    tested = [package for install in INSTALLS.values() for package in install.packages]
    assert [agent.name for agent in NAMED_AGENTS.values() if agent.install.split()[-1] not in tested] == []
