"""What a killed run leaves in shared memory and in weight_sync.directory is removed when it goes on, and only that; in
shared memory also when another run starts."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from scripts.launch import run as run_script
from scripts.launch.start import owner
from trainer.tracking.console import PlainConsole
from weight_sync.transports import cleanup


def publish(folder: Path, run_dir: Path) -> tuple[Path, Path]:
    """What a process of that run has there, in shared memory and in weight_sync.directory."""
    in_memory = folder / f"slipstream-{owner(run_dir)}-5-0badbeef"
    in_memory.write_bytes(bytes(8))
    (folder / owner(run_dir) / "v5-0badbeef").mkdir(parents=True)
    return in_memory, folder / owner(run_dir)


@asynccontextmanager
async def no_cluster(*_: Any) -> AsyncIterator[None]:
    raise InterruptedError("it would start now")
    yield


def test_the_next_process_of_a_run_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "DIRECTORY", tmp_path)
    monkeypatch.setattr(run_script, "cluster", no_cluster)
    run_dirs = [tmp_path / "one" / "run", tmp_path / "two" / "run", tmp_path / "one" / "run-2"]
    left = [publish(tmp_path, run_dir) for run_dir in run_dirs]
    long_ago = tmp_path / "slipstream-0123456789ab-5-0badbeef"  # of a run that was killed, and never went on
    long_ago.touch()
    os.utime(long_ago, (0, 0))
    assert max(len(file.name) for file, _ in left) < 64
    monkeypatch.setattr(os, "getpid", lambda: 1)
    (tmp_path / "latest").symlink_to(run_dirs[0])
    config = Config()
    config = replace(config, weight_sync=replace(config.weight_sync, directory=str(tmp_path)))
    with (tmp_path / "console.log").open("w") as log, pytest.raises(InterruptedError):
        recorder: Any = None
        console = PlainConsole(1, log)
        asyncio.run(run_script.run(config, "cpu", tmp_path / "latest", console=console, recorder=recorder))
    assert [(file.exists(), folder.exists()) for file, folder in left] == [(False, False), (True, True), (True, True)]
    assert not long_ago.exists()
