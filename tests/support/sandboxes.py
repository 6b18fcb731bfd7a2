"""Real sandboxes for tests, where bubblewrap is installed and may make namespaces."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest

from configs.sandbox import SandboxConfig
from rollout.environments.sandbox.launching import SandboxUnavailableError, check_backend
from rollout.environments.sandbox.sandbox import Outcome, Sandbox

SMALL = SandboxConfig(timeout_s=10.0, cpu_s=5, memory_mb=256, disk_mb=16, max_processes=32)
"""Limits that an attack reaches soon."""


@cache
def why_not() -> str:
    """Return why there are no sandboxes here; "" where there are."""
    try:
        check_backend(SMALL)
    except SandboxUnavailableError as error:
        return str(error)
    return ""


def need_sandboxes() -> None:
    """Skip a test where there are none."""
    if reason := why_not():
        pytest.skip(reason)


@asynccontextmanager
async def sandbox_of(config: SandboxConfig = SMALL) -> AsyncIterator[Sandbox]:
    sandbox = await Sandbox.start(config)
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def shell(sandbox: Sandbox, command: str, timeout_s: float | None = None) -> Outcome:
    return await sandbox.exec(["bash", "-c", command], timeout_s=timeout_s)


def running(mark: str) -> list[int]:
    """Return the processes of this machine whose command line has the mark."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if mark.encode() in words:
            found.append(int(folder.name))
    return found
