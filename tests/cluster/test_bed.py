"""Hosts in namespaces, on which the other tests here stand: they are apart, disturbed as told, and leave nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.bed import SHARED, UP_S, Bed, Host, bed
from tests.support.paths import ROOT

ECHO = """
import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536): self.request.sendall(data)
socketserver.ThreadingTCPServer.daemon_threads = True
socketserver.ThreadingTCPServer(("", 5555), Echo).serve_forever()
"""
CALL = """
import socket, sys, time
deadline = time.monotonic() + 30
while True:  # until the server listens
    try:
        talk = socket.create_connection((sys.argv[1], 5555), timeout=5)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.05)
talk.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
took = []
for _ in range(5):
    began = time.monotonic()
    talk.sendall(b"x")
    talk.recv(1)
    took.append(time.monotonic() - began)
print(min(took))
"""
HOLD = """
import sys, time
from pathlib import Path
from tests.support.bed import bed
with bed(Path(sys.argv[1]), num_hosts=2) as made:
    print(*(host.pid for host in made.hosts), *(switch.process.pid for switch in made.switches), flush=True)
    time.sleep(600)
"""


def round_trip_s(caller: Host, address: str) -> float:
    return float(caller.run("python", "-c", CALL, address))


def state() -> tuple[set[psutil.Process], set[str], str]:
    children = {*psutil.Process().children(recursive=True)}
    return children, {*psutil.net_if_addrs()}, Path("/proc/self/mounts").read_text()


def is_gone(pids: list[int]) -> bool:
    ends = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def nothing_stays() -> Iterator[list[int]]:
    """Check that the processes whose ids the block appends have ended after it, and that this process's children, its
    interfaces and mounts are as they were."""
    before, pids = state(), list[int]()
    yield pids
    assert is_gone(pids)
    assert state() == before


def everything_of(made: Bed) -> list[int]:
    processes = [process for host in made.hosts for process in host.processes()]
    own = [*(host.pid for host in made.hosts), *(host.init.pid for host in made.hosts)]
    return [*own, *(switch.process.pid for switch in made.switches), *(process.pid for process in processes)]


def test_hosts_are_apart_and_reach_one_another_through_the_switch(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", is_debian=True, has_route=False, num_networks=2) as made:
        first, second, third = made.hosts
        assert [host.run("hostname").strip() for host in made.hosts] == ["node1", "node2", "node3"]
        assert {"127.0.1.1 node2", "10.77.0.1 node1"} <= {*second.run("cat", "/etc/hosts").splitlines()}
        assert "default" not in first.run("ip", "route") and "10.78.0.0/24 dev eth1" in first.run("ip", "route")
        first.run("bash", "-c", f"echo hello >{SHARED}/word; echo mine >/tmp/word; touch /dev/shm/word")
        assert second.run("cat", SHARED / "word") == "hello\n" == (made.shared / "word").read_text()
        assert second.run("ls", "/tmp", "/dev/shm").split() == ["/dev/shm:", "/tmp:", "home"]
        assert first.path("/tmp/word").read_text() == "mine\n" and not Path("/tmp/word").exists()
        with second.running(tmp_path / "echo.txt", "python", "-c", ECHO):
            assert round_trip_s(first, "10.77.0.2") < 0.6 and round_trip_s(third, "10.78.0.2") < 0.6
            assert len(second.processes()) == 1 and first.processes() == []
            made.disturb(second, round_trip_ms=600)
            assert round_trip_s(first, "10.77.0.2") >= 0.3 and round_trip_s(first, "10.78.0.2") < 0.6
            made.disturb(second)
            made.partition(second)
            with pytest.raises(AssertionError, match="timed out|No route to host"):
                round_trip_s(first, "10.77.0.2")
            made.heal(second)
            assert round_trip_s(third, "10.77.0.2") < 0.6


def test_a_hosts_wall_clock_is_wrong_for_python(tmp_path: Path) -> None:
    tell = "import time; time.sleep(0.01); print(time.time(), time.monotonic())"
    with bed(tmp_path / "bed", num_hosts=2, clocks_ahead_s={2: -86400}) as made:
        times = [[float(word) for word in host.run("python", "-c", tell).split()] for host in made.hosts]
        ahead_s, up_s = (there - here for here, there in zip(*times, strict=True))
        assert ahead_s == pytest.approx(-86400, abs=3600) and up_s == pytest.approx(UP_S, abs=3600)


def test_a_host_that_dies_takes_all_its_processes_and_another_one_takes_its_place(tmp_path: Path) -> None:
    with bed(tmp_path / "bed", num_hosts=2) as made:
        first, second = made.hosts
        with second.running(tmp_path / "echo.txt", "python", "-c", ECHO):
            round_trip_s(first, second.address)
            pids = [second.pid, *(process.pid for process in second.processes())]
            made.die(second)
            assert len(pids) == 2 and is_gone(pids) and made.hosts == [first]
        again = made.bring_up(2)
        with again.running(tmp_path / "echo.txt", "python", "-c", ECHO):
            assert again.pid != second.pid and round_trip_s(first, again.address) < 0.6


def test_a_bed_leaves_nothing_when_what_runs_on_it_fails(tmp_path: Path) -> None:
    with nothing_stays() as pids:
        with pytest.raises(ZeroDivisionError), bed(tmp_path / "bed", num_hosts=2) as made:
            first, _ = made.hosts
            with first.running(tmp_path / "sleep.txt", "bash", "-c", "setsid sleep 600 & setsid sleep 600 & wait"):
                while len(first.processes()) < 3:
                    time.sleep(0.05)
                pids += everything_of(made)
                raise ZeroDivisionError
        assert not (tmp_path / "bed").exists()


def test_a_bed_of_which_a_host_does_not_start_leaves_nothing(tmp_path: Path) -> None:
    with nothing_stays():
        with pytest.raises(AssertionError, match="the switch ended at 'attach 8 "), bed(tmp_path / "bed", num_hosts=8):
            pytest.fail("the switch has no port 8")
        assert not (tmp_path / "bed").exists()


def test_a_bed_whose_process_is_killed_leaves_its_folder_only(tmp_path: Path) -> None:
    with nothing_stays() as pids:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "bed")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        pids += map(int, process.stdout.readline().split())
        assert len(pids) == 3
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
