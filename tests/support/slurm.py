"""A Slurm cluster of this machine alone, with several nodes, for a test."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.paths import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
START_S = 120
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
KillWait=5
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
{keys}
"""


def lacks() -> str:
    """Say why no Slurm can be started here; nothing where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"no {', '.join(missing)} here" if missing else "" if os.geteuid() == 0 else "needs root"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True)
class Slurm:
    folder: Path

    def call(self, *command: str, **environment: str) -> str:
        """Run a command of Slurm. Return what it prints."""
        env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | environment
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        fields = dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)
        return fields["JobState"]


@contextlib.contextmanager
def started(num_nodes: int, cpus: int, *, keys: str = "") -> Iterator[Slurm]:
    """Start munge, the controller and a slurmd for each node, and end them and what they started.

    Args:
        keys: more lines of slurm.conf.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "state").mkdir()
    port, *node_ports = free_ports(num_nodes + 1)
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} RealMemory=4000"
        for number, node_port in enumerate(node_ports)
    ]
    config = CONFIG.format(host=host, port=port, folder=folder, nodes="\n".join(nodes), keys=keys)
    (folder / "slurm.conf").write_text(config)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    own = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    commands = [["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", f"n{number}"] for number in range(num_nodes)]
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    processes: list[subprocess.Popen[bytes]] = []
    slurm = Slurm(folder)
    try:
        for command in commands:
            with (folder / f"{command[0]}.txt").open("ab") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            while command[0] == "munged" and not (folder / "munge.socket").exists():
                assert processes[0].poll() is None, (folder / "munged.txt").read_text()
                time.sleep(0.1)
        deadline = time.monotonic() + START_S
        while _num_idle(slurm) < num_nodes:
            texts = "\n".join(path.read_text() for path in sorted(folder.glob("*.txt")))
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes), texts
            time.sleep(0.5)
        yield slurm
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            slurm.call("scancel", "--signal=KILL", "--full", "--user=root")
        stop(processes)
        shutil.rmtree(folder, ignore_errors=True)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the daemons, those that others talk to last."""
    children = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
    for process in reversed(processes):
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _num_idle(slurm: Slurm) -> int:
    try:
        return len(slurm.call("sinfo", "--noheader", "--Node", "--partition=all", "--states=idle").splitlines())
    except (AssertionError, subprocess.TimeoutExpired):
        return 0  # the controller does not answer yet
