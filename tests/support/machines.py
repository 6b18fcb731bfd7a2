"""Another machine of a Ray cluster: a node in namespaces of its own, on whose disk a folder of this one is empty."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import ray

NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="machines are namespaces, which need root and unshare"
)
DEADLINE_S = 120.0


class Machine:
    """A node of the cluster to which this process is connected.

    Example:
        machine = Machine(lacks=runs, num_cpus=1)
        ...
        machine.die()
    """

    def __init__(self, lacks: Path, num_cpus: int):
        """`lacks`: a folder in whose place the machine has an empty one."""
        before = set(living_nodes())
        ray_command = Path(sys.executable).with_name("ray")
        address = ray.get_runtime_context().gcs_address
        start = f"{ray_command} start --address={address} --num-cpus={num_cpus} --block"
        inside = f"mount -t proc proc /proc && mount -t tmpfs none {lacks} && exec {start}"
        command = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            inside,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(living_nodes() - before) == 1)
        [self.node_id] = living_nodes() - before

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self._process.pid).children(recursive=True)

    def die(self) -> None:
        """End every process of it at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: self.node_id not in living_nodes())


def living_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until, f"not so within {DEADLINE_S:g} s"
        time.sleep(0.01)
