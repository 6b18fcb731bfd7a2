"""Sandboxes of bubblewrap: what they keep out, what ends in them and why, and that nothing is left of them."""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from rollout.environments.sandbox.sandbox import (
    Limit,
    Sandbox,
    SandboxFileError,
    SandboxLostError,
)
from rollout.environments.sandbox.sandboxes import Sandboxes
from tests.support.machines import wait_until
from tests.support.paths import ROOT
from tests.support.real_clock import on_real_clock
from tests.support.sandboxes import SMALL, need_sandboxes, running, sandbox_of, shell


@pytest.fixture(autouse=True)
def _sandboxes() -> None:
    need_sandboxes()


@on_real_clock
async def test_a_command_gets_its_input_and_its_output_and_exit_code_come_back() -> None:
    async with sandbox_of() as sandbox:
        text = os.urandom(300_000)
        assert (await sandbox.exec(["cat"], stdin=text)).stdout == text
        outcome = await shell(sandbox, "echo out; echo err >&2; exit 3")
        assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (3, b"out\n", b"err\n")
        assert outcome.text() == "out\nerr\n[exit code 3]"
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        flood = await shell(sandbox, "head -c 3000000 /dev/zero")
        assert flood.is_success and flood.is_cut and len(flood.stdout) == 2**20


def test_it_starts_on_the_event_loop_of_agent_workers() -> None:
    async def run() -> bytes:
        async with sandbox_of() as sandbox:
            return (await sandbox.exec(["echo", "hi"])).stdout

    assert uvloop.run(run()) == b"hi\n"


@on_real_clock
async def test_files_stay_for_the_next_command_and_go_with_the_sandbox() -> None:
    async with sandbox_of() as sandbox:
        await sandbox.write_file("/work/a/b.sh", b"#!/bin/sh\necho hi > /tmp/said\n", mode=0o755)
        assert (await sandbox.exec(["./a/b.sh"])).is_success
        assert await sandbox.read_file("/tmp/said") == b"hi\n"
        await sandbox.renew()
        assert (await shell(sandbox, "find /work /tmp /app -type f | wc -l")).stdout.strip() == b"0"
    async with sandbox_of() as sandbox:
        with pytest.raises(SandboxFileError, match="/tmp/said: No such file"):
            await sandbox.read_file("/tmp/said")


# -- attacks -----------------------------------------------------------------------------------------------------------

ATTACKS = {
    "fork bomb": (":(){ :|:& };:; sleep 8", Limit.processes, "had sandbox.max_processes=32 processes or more"),
    "memory": (
        "for i in 1 2 3; do python3 -c 'import time; a = bytearray(120 << 20); time.sleep(8)' & done; wait",
        Limit.memory,
        "used more memory than sandbox.memory_mb=256",
    ),
    "shared memory": (
        "for i in 1 2 3; do python3 -c 'import mmap, time; a = mmap.mmap(-1, 120 << 20); a.write(bytes(120 << 20));"
        " time.sleep(8)' & done; wait",
        Limit.memory,
        "used more memory than sandbox.memory_mb=256",
    ),
    "time": ("sleep 60", Limit.time, "took longer than sandbox.timeout_s=4"),
    "processor time": ("while :; do :; done", Limit.cpu, "used more processor time than sandbox.cpu_s=1"),
    "small files": (
        'python3 -c \'for n in range(50_000): open(f"/tmp/{n}", "w").close()\'',
        Limit.files,
        "made more than 20000 files",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
@on_real_clock
async def test_an_attack_on_the_machine_is_ended_and_says_why(attack: str) -> None:
    """And the sandbox goes on: nothing of the attack is left in it."""
    command, limit, why = ATTACKS[attack]
    timeout_s, cpu_s = (4.0 if attack == "time" else 100.0), (1 if attack == "processor time" else SMALL.cpu_s)
    config = replace(SMALL, timeout_s=timeout_s, cpu_s=cpu_s)
    async with sandbox_of(config) as sandbox:
        outcome = await shell(sandbox, command)
        assert (outcome.exit_code, outcome.limit, outcome.why) == (None, limit, why)
        assert outcome.text().endswith(f"[ended: {why}]")
        if limit is Limit.files:
            assert (await shell(sandbox, "find /tmp -type f -delete")).is_success, "it may make room"
        after = await shell(sandbox, "echo /proc/[0-9]*")
        assert len(after.stdout.split()) == 2, "process 1 and the shell itself"


@on_real_clock
async def test_a_full_disk_is_the_sandboxs_own() -> None:
    async with sandbox_of() as sandbox:
        for folder in ("/work", "/tmp", "/dev/shm"):
            full = await shell(
                sandbox, f"dd if=/dev/zero of={folder}/big bs=1M count=64; dd if=/dev/zero of={folder}/b2 bs=1M"
            )
            assert full.exit_code == 1 and b"No space left" in full.stderr + full.stdout, full.text()
            assert (await shell(sandbox, "rm -f /work/b* /tmp/b* /dev/shm/b*")).is_success
        for place in ("/", "/usr", "/dev", "/etc", "/proc"):
            assert not (await shell(sandbox, f"touch {place}/new")).is_success, place


@on_real_clock
async def test_a_huge_allocation_fails_in_the_program_itself() -> None:
    async with sandbox_of() as sandbox:
        outcome = await sandbox.exec(["python3", "-c", "bytearray(400 << 20)"])
        assert outcome.exit_code == 1 and b"MemoryError" in outcome.stderr


REFUSED = """
import ctypes, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(what, call):
    try:
        value = call()
    except OSError as error:
        print(what, "refused:", error.strerror)
    else:
        print(what, "GRANTED" if value != -1 else "refused: " + os.strerror(ctypes.get_errno()))
refused("network", lambda: socket.create_connection(("192.0.2.1", 80), timeout=2))
refused("memfd", lambda: os.memfd_create("x"))
refused("shmget", lambda: libc.shmget(0, 1 << 20, 0o1600))
refused("user namespace", lambda: libc.unshare(0x10000000))
refused("mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None))
refused("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
refused("memory of process 1", lambda: open("/proc/1/mem", "rb"))
refused("files of process 1", lambda: os.listdir("/proc/1/fd"))
refused("shadow", lambda: open("/etc/shadow"))
refused("kill", lambda: [os.kill(1, number) for number in (1, 2, 15)] and -1)
refused("limits of process 1", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))
refused("priority of process 1", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
refused("priority of all", lambda: os.setpriority(os.PRIO_USER, 0, 19))
refused("processors of process 1", lambda: os.sched_setaffinity(1, {0}))
refused("scheduling of process 1", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
refused("vsock", lambda: socket.socket(socket.AF_VSOCK))
"""


@on_real_clock
async def test_what_leads_out_is_refused() -> None:
    async with sandbox_of() as sandbox:
        outcome = await sandbox.exec(["python3", "-c", REFUSED])
        assert outcome.is_success and b"GRANTED" not in outcome.stdout, outcome.text()
        assert len(outcome.stdout.splitlines()) == 16
        listed = await shell(sandbox, "cat /proc/net/dev | tail -n +3 | cut -d: -f1; ls /root /home")
        assert listed.stdout.split() == [b"lo"], "no interface but its own, and no files of ours"


@on_real_clock
async def test_signals_reach_nobody_outside_and_process_1_goes_on() -> None:
    outside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        async with sandbox_of() as sandbox:
            kills = f"kill -9 {outside.pid}; for s in 1 2 3 9 15 17 19; do kill -$s 1; done; kill -9 -1"
            await shell(sandbox, kills)
            assert (await shell(sandbox, "echo on")).stdout == b"on\n"
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


@on_real_clock
async def test_links_lead_nowhere_when_files_are_read_or_written(tmp_path: Path) -> None:
    """Files are opened inside, where nothing of this machine can be reached, and a link is not even followed there."""
    secret = tmp_path / "secret"
    secret.write_text("ours")
    async with sandbox_of() as sandbox:
        await shell(
            sandbox, f"ln -s {secret} /work/link; ln -s {tmp_path} /work/folder; mkfifo /work/pipe; mkdir /work/dir"
        )
        for path in ("/work/link", "/work/folder/secret", "/work/pipe", "/work/dir", "/work/../../../etc/shadow"):
            with pytest.raises(SandboxFileError):
                await sandbox.read_file(path)
        for path in ("/work/link", "/work/folder/secret", "/work/pipe", "/usr/new"):
            with pytest.raises(SandboxFileError):
                await sandbox.write_file(path, b"theirs")
        await shell(sandbox, "head -c 100000 /dev/zero > /work/long")
        with pytest.raises(SandboxFileError, match="has 100000 bytes, and at most 10 are read"):
            await sandbox.read_file("/work/long", most=10)
    assert secret.read_text() == "ours" and os.listdir(tmp_path) == ["secret"]


DAEMON = "setsid nohup bash -c 'trap \"\" TERM HUP INT; while :; do sleep 0.1; done' {mark} >/dev/null 2>&1 &"


@on_real_clock
async def test_a_daemon_does_not_hold_its_command_and_ends_with_the_sandbox() -> None:
    mark = f"daemon-{os.getpid()}"
    async with sandbox_of() as sandbox:
        outcome = await shell(sandbox, f"{DAEMON.format(mark=mark)} echo started")
        assert outcome.stdout == b"started\n"
        wait_until(lambda: bool(running(mark)))  # it may serve the next command; a program that starts has no name
    assert not running(mark)


def test_a_daemon_with_the_output_open_does_not_hold_its_command() -> None:
    async def run() -> None:
        async with sandbox_of() as sandbox:
            outcome = await shell(sandbox, "sleep 9 & echo done")
            assert (outcome.exit_code, outcome.stdout) == (0, b"done\n")

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 8


@pytest.mark.slow
@on_real_clock
async def test_a_limit_that_is_reached_between_two_commands_is_told_by_the_next() -> None:
    async with sandbox_of() as sandbox:
        await shell(sandbox, "(sleep 0.3; :(){ :|:& };:) >/dev/null 2>&1 &")
        limits: list[Limit | None] = []
        until = time.monotonic() + 60
        while not any(limits) and time.monotonic() < until:
            await asyncio.sleep(1.0)
            limits.append((await shell(sandbox, "echo hi")).limit)
        assert limits[-1] is Limit.processes
        assert (await shell(sandbox, "echo hi")).stdout == b"hi\n"


OWNER = """
import asyncio
from tests.support.sandboxes import SMALL, shell
from rollout.environments.sandbox.sandbox import Sandbox

async def run():
    sandbox = await Sandbox.start(SMALL)
    await shell(sandbox, {command!r})
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(run())
"""


def test_nothing_is_left_when_the_run_is_killed() -> None:
    mark = f"orphan-{os.getpid()}"
    code = OWNER.format(command=DAEMON.format(mark=mark))
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        wait_until(lambda: bool(running(mark)))
        owner.kill()
    wait_until(lambda: not running(mark))


@on_real_clock
async def test_a_request_that_is_cancelled_costs_the_sandbox() -> None:
    """The answer would be taken for that to the next request."""
    async with sandbox_of() as sandbox:
        call = asyncio.create_task(shell(sandbox, "sleep 5; echo late"))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sandbox.is_lost
        with pytest.raises(SandboxLostError):
            await shell(sandbox, "echo hi")


# -- the pool ----------------------------------------------------------------------------------------------------------


@on_real_clock
async def test_sandboxes_wait_started_and_no_more_run_than_may() -> None:
    pool = Sandboxes(replace(SMALL, warm=2, max_running=2, start_timeout_s=15.0))
    first, second = await pool.take(), await pool.take()
    third = asyncio.create_task(pool.take())
    await asyncio.sleep(0.3)
    assert not third.done()
    await shell(first, "touch /work/mine")
    pool.give_back(first)
    fresh = await third
    assert fresh is not first and (await shell(fresh, "ls /work")).stdout == b""
    with pytest.raises(ValueError, match="not lent"):
        pool.give_back(first)
    pool.give_back(second)
    await pool.close()
    assert fresh.is_lost and first.is_lost and second.is_lost


@on_real_clock
async def test_a_sandbox_is_reused_only_where_the_config_says_so_and_is_empty_then() -> None:
    pool = Sandboxes(replace(SMALL, warm=1, max_running=1, reuse=True))
    look = "words=(/proc/[0-9]*); ls /work; echo ${#words[@]}; touch /work/mine; sleep 60 >/dev/null 2>&1 &"
    seen: list[Sandbox] = []
    for _ in range(20):  # a new one may come before one that is emptied
        async with pool.lent() as sandbox:
            outcome = await shell(sandbox, look)
        assert outcome.stdout.split() == [b"2"], "process 1 and the shell, and no file"
        if is_reused := sandbox in seen:
            break
        seen.append(sandbox)
    assert is_reused
    await pool.close()


@on_real_clock
async def test_waiting_for_a_sandbox_has_a_deadline_that_names_the_keys() -> None:
    pool = Sandboxes(replace(SMALL, warm=1, max_running=1, wait_timeout_s=0.2))
    held = await pool.take()
    with pytest.raises(TimeoutError, match="sandbox.max_running=1 sandboxes took longer than sandbox.wait_timeout_s"):
        await pool.take()
    pool.give_back(held)
    await pool.close()


@on_real_clock
async def test_many_at_once() -> None:
    sandboxes = await asyncio.gather(*(Sandbox.start(SMALL) for _ in range(16)))
    outcomes = await asyncio.gather(*(shell(some, f"echo {n}") for n, some in enumerate(sandboxes)))
    assert [outcome.stdout for outcome in outcomes] == [f"{n}\n".encode() for n in range(16)]
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
