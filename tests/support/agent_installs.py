"""Agents that nobody here wrote, each in a folder of its own, so that their packages do not meet ours.

`python -m tests.support.install_agents` installs them. Tests of an agent that is not installed are skipped.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.named_agents import NamedAgent

FOLDER = Path(os.environ.get("SLIPSTREAM_AGENTS") or Path.home() / ".cache/slipstream/agents")
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """The packages of one agent, with the versions that are tested."""

    name: str
    packages: tuple[str, ...]
    program: str
    """The program to run, below the agent's folder."""
    is_node: bool = False

    @property
    def folder(self) -> Path:
        """The folder is named by the versions, so that other versions are another folder."""
        return FOLDER / re.sub(r"[^\w.]+", "-", " ".join(self.packages)).strip("-")

    @property
    def path(self) -> Path:
        return self.folder / self.program

    def reason_to_skip(self) -> str | None:
        if self.is_node and shutil.which("node") is None:
            return f"{self.name} needs node"
        return None if self.path.exists() else f"{self.name} is not installed: python -m tests.support.install_agents"

    def install(self) -> None:
        """Install the agent, or raise subprocess.CalledProcessError, TimeoutExpired or OSError."""
        new = FOLDER / f"new-{os.getpid()}"  # renamed last, so that a half is not taken for a whole
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        try:
            if self.is_node:
                (new / "package.json").write_text('{"private": true}')
                command = ["npm", "install", "--prefix", str(new), "--no-audit", "--no-fund", "--loglevel=error"]
            else:
                run([sys.executable, "-m", "venv", str(new)])
                command = pip_install(new / self.program)
            run([*command, *self.packages])
            new.rename(self.folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def node(name: str, program: str, *packages: str) -> Install:
    return Install(name=name, packages=packages, program=f"node_modules/{program}", is_node=True)


def python(name: str, *packages: str) -> Install:
    return Install(name=name, packages=packages, program="bin/python")


INSTALLS: Mapping[str, Install] = {
    install.name: install
    for install in (
        node("claude-code", ".bin/claude", "@anthropic-ai/claude-code@2.1.197"),
        node("codex", ".bin/codex", "@openai/codex@0.169.0"),
        node("opencode", ".bin/opencode", "opencode-ai@1.18.33"),
        node("ai-sdk", "ai/package.json", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7"),
        python("openai-agents", "openai-agents==0.24.0"),
        python("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.68.0"),
        python("langchain", "langchain==1.5.2", "langchain-openai==1.7.4"),
        python("smolagents", "smolagents[openai]==1.26.0"),
        python("mini-swe-agent", "mini-swe-agent==2.4.6"),
    )
}


def path_with(agent: NamedAgent, folder: Path) -> str:
    """Return PATH with the program of an installed agent in a new folder, as its installation has it for a user."""
    install = INSTALLS[agent.name.replace("_", "-")]
    folder.mkdir()
    run = install.path if install.is_node else f"{install.path} -m minisweagent.run.mini"  # the program's own module
    (folder / agent.program).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
    (folder / agent.program).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def pip_install(interpreter: Path) -> list[str]:
    """Return the command that installs packages for an interpreter: uv takes a tenth of the time of pip."""
    if importlib.util.find_spec("uv") is not None:
        uv = [sys.executable, "-m", "uv"]
    elif (path := shutil.which("uv")) is not None:
        uv = [path]
    else:
        return [str(interpreter), "-m", "pip", "install", "-qq"]
    return [*uv, "pip", "install", "--quiet", "--python", str(interpreter)]


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
