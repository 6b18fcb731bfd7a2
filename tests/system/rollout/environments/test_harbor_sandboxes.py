"""Sandboxes of Harbor's environments: over a stand-in of Harbor, which this Python runs, and over Harbor itself where
SLIPSTREAM_HARBOR_PYTHON names its Python. The environment runs commands in a folder of this machine, with bubblewrap:
none of those that come with Harbor is run."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from configs.sandbox import SandboxBackend, SandboxConfig
from rollout.environments.sandbox import harbor
from rollout.environments.sandbox.launching import SandboxUnavailableError, check_backend, shipped_tasks
from rollout.environments.sandbox.sandbox import Limit, Sandbox, SandboxFileError, SandboxLostError
from tests.support.machines import wait_until
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock
from tests.support.sandboxes import SMALL, need_sandboxes, running, sandbox_of, shell

HARBOR_PYTHON = os.environ.get("SLIPSTREAM_HARBOR_PYTHON", "")
ENVIRONMENT = ROOT / "tests/support/harbor_environment"
STAND_IN = ROOT / "tests/support/harbor_stand_in"


@pytest.fixture(name="config", params=["stand-in", pytest.param("harbor", marks=pytest.mark.slow)])
def _config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    need_sandboxes()
    is_real = request.param == "harbor"
    if is_real and not HARBOR_PYTHON:
        pytest.skip("SLIPSTREAM_HARBOR_PYTHON names no Python with Harbor")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [ENVIRONMENT] if is_real else [ENVIRONMENT, STAND_IN])))
    return replace(
        SMALL,
        backend=SandboxBackend.harbor,
        harbor_python=HARBOR_PYTHON if is_real else sys.executable,
        harbor_environment="folder_environment:FolderEnvironment",
        harbor_args={"log": str(tmp_path / "log"), "override_memory_mb": 1024},
        image="some/image:1",
        start_timeout_s=120.0,
        answer_timeout_s=60.0,
        timeout_s=60.0,
    )


def with_args(config: SandboxConfig, **args: Any) -> SandboxConfig:
    return replace(config, harbor_args={**config.harbor_args, **args})


def log_of(config: SandboxConfig) -> list[str]:
    log = Path(config.harbor_args["log"])
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_commands_and_files_are_as_in_every_sandbox(config: SandboxConfig) -> None:
    async def run() -> None:
        async with sandbox_of(config) as sandbox:
            text = os.urandom(300_000)
            assert (await sandbox.exec(["cat"], stdin=text)).stdout == text
            outcome = await sandbox.exec(["bash", "-c", "pwd; echo $KEY >&2; exit 3"], cwd="/app", env={"KEY": "é"})
            assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (3, b"/app\n", "é\n".encode())
            script = b"#!/bin/sh\necho hi > /tmp/said; ln -s /tmp/said /tmp/link\n"
            await sandbox.write_file("/work/a/b.sh", script, mode=0o755)
            assert (await sandbox.exec(["./a/b.sh"])).is_success
            assert await sandbox.read_file("/tmp/said") == b"hi\n"
            with pytest.raises(SandboxFileError, match="/tmp/link: Too many levels"):
                await sandbox.read_file("/tmp/link")
        assert log_of(config)[0] == "start" and log_of(config)[-1] == "stop" and "exec" in log_of(config)

    uvloop.run(run())


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("setsid sleep {mark} & sleep 60", Limit.time),
        ("for i in 1 2 3; do python3 -c 'a = bytearray(120 << 20); input()' <> /tmp/p & done; wait", Limit.memory),
        ("for i in $(seq 50); do setsid sleep {mark} & done; wait", Limit.processes),
    ],
)
@on_real_clock
async def test_a_limit_ends_the_command_with_all_that_it_has_started(
    command: str, limit: Limit, config: SandboxConfig
) -> None:
    mark = f"60.{os.getpid()}{list(Limit).index(limit)}"
    async with sandbox_of(config) as sandbox:
        await shell(sandbox, "mkfifo /tmp/p")
        outcome = await shell(sandbox, command.format(mark=mark), timeout_s=2.0 if limit is Limit.time else None)
        assert outcome.limit is limit and not running(mark)
        assert (await shell(sandbox, "echo on")).stdout == b"on\n"


@on_real_clock
async def test_a_daemon_ends_with_its_command_and_no_other_process_does(config: SandboxConfig) -> None:
    """The environment shares its processes with this machine."""
    mark = f"60.{os.getpid()}7"
    with subprocess.Popen(["sleep", f"{mark}1"]) as other:
        async with sandbox_of(config) as sandbox:
            hidden = f"setsid env -i sh -c '(exec setsid sleep {mark}2) & exec sleep {mark}2' >/dev/null 2>&1 &"
            assert (await shell(sandbox, f"{hidden} sleep 0.5; echo done")).stdout == b"done\n"
            assert not running(f"{mark}2")
        assert other.poll() is None
        other.kill()


@on_real_clock
async def test_a_program_that_ends_what_looks_after_it_gets_nothing_more(config: SandboxConfig) -> None:
    async with sandbox_of(config) as sandbox:
        assert (await shell(sandbox, "kill -9 $PPID; sleep 1")).limit is Limit.tampered
        assert (await shell(sandbox, "echo hi")).limit is Limit.tampered


OWNER = """
import asyncio, pickle
from rollout.environments.sandbox.sandbox import Sandbox

async def run():
    sandbox = await Sandbox.start(pickle.loads({config!r}))
    print("ready", flush=True)
    await sandbox.exec(["sleep", "60"])

asyncio.run(run())
"""


def test_the_sandbox_is_stopped_when_the_run_is_killed(config: SandboxConfig) -> None:
    code = OWNER.format(config=pickle.dumps(config))
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        wait_until(lambda: log_of(config).count("exec") == 2)
        owner.kill()
    wait_until(lambda: log_of(config)[-1] == "stop")


@on_real_clock
async def test_the_sandbox_is_stopped_when_all_processes_of_the_run_are_told_to_end(config: SandboxConfig) -> None:
    sandbox = await Sandbox.start(config)
    sandbox._process.terminate()
    with pytest.raises(SandboxLostError):
        await shell(sandbox, "sleep 60")
    await sandbox.stop()
    assert log_of(config)[-1] == "stop"


@on_real_clock
async def test_a_service_that_hangs_costs_the_sandbox_which_is_stopped(config: SandboxConfig) -> None:
    hanging = replace(with_args(config, hangs_at="exec"), start_timeout_s=8.0)
    with pytest.raises(TimeoutError, match="the start of a sandbox took longer than sandbox.start_timeout_s=8"):
        await Sandbox.start(hanging)
    assert log_of(config) == ["start", "exec", "stop"]


@on_real_clock
async def test_what_harbor_says_is_in_the_error(config: SandboxConfig) -> None:
    with pytest.raises(SandboxUnavailableError, match="RuntimeError: the service has no room to start") as refusal:
        await Sandbox.start(with_args(config, fails_at="start"))
    assert "sandbox.harbor_environment=folder_environment:FolderEnvironment" in str(refusal.value)
    assert log_of(config) == ["start", "stop"]
    sandbox = await Sandbox.start(config)
    os.unlink(config.harbor_args["log"])
    os.mkdir(config.harbor_args["log"])
    with pytest.raises(SandboxLostError, match="IsADirectoryError"):
        await shell(sandbox, "echo hi")
    await sandbox.stop()


def test_nothing_is_started_to_see_whether_it_works(config: SandboxConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    check_backend(config)
    assert "sandbox.backend=harbor: Harbor 0.26" in caplog.text and log_of(config) == []
    with pytest.raises(SandboxUnavailableError, match="no-network"):
        check_backend(with_args(config, can_cut=False))
    assert log_of(config) == []


@on_real_clock
async def test_a_task_of_harbors_format_is_verified(config: SandboxConfig) -> None:
    task = harbor.read_task(shipped_tasks() / "count_errors")
    async with sandbox_of(config) as sandbox:
        await harbor.set_up(sandbox, task)
        await sandbox.write_file("/solution/solve.sh", (task.folder / "solution/solve.sh").read_bytes())
        assert (await sandbox.exec(["bash", "/solution/solve.sh"], cwd=task.workdir, env=task.env)).is_success
        assert (await harbor.verified(sandbox, task, 60.0)).reward == 1.0


@on_real_clock
async def test_what_harbor_has_built_gets_no_files_again(config: SandboxConfig) -> None:
    task = replace(harbor.read_task(shipped_tasks() / "count_errors"), needs_build="RUN needs an image")
    sandbox = await Sandbox.start(config, task.image(config))
    await harbor.set_up(sandbox, task)
    assert (await shell(sandbox, "ls /app")).stdout == b"", "this environment builds nothing"
    await sandbox.stop()
    assert Path(config.harbor_args["log"]).read_text().startswith(f"start {task.folder}/environment\n")
