"""Slurm on the hosts of a bed: the controller on the first, and a daemon on each."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.bed import SHARED, Bed, Host

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONF = SHARED / "slurm.conf"
OWN = Path("/tmp/slurm")
"""The folder of a host's daemons, on its own disk."""
START_S = 120
CONFIG = f"""
ClusterName=test
SlurmctldHost={{head.name}}({{head.address}})
SlurmUser=root
AuthInfo=socket={OWN}/munge.socket
StateSaveLocation={OWN}/state
SlurmdSpoolDir={OWN}/spool
SlurmctldPidFile={OWN}/slurmctld.pid
SlurmdPidFile={OWN}/slurmd.pid
SlurmctldLogFile={OWN}/slurmctld.log
SlurmdLogFile={OWN}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
KillWait=5
MinJobAge=3600
{{nodes}}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def lacks() -> str:
    """Say which programs of Slurm are not here; nothing where all are."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return f"no {', '.join(missing)} here" if missing else ""


@dataclass(frozen=True)
class Slurm:
    head: Host

    def call(self, *command: str, **environment: str) -> str:
        """Run a command of Slurm on the first host. Return what it prints."""
        return self.head.run(*command, SLURM_CONF=str(CONF), **environment).strip()

    def state(self, job: str) -> str:
        fields = dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)
        return fields["JobState"]


@contextlib.contextmanager
def started(made: Bed, cpus: int) -> Iterator[Slurm]:
    """Start munge and a slurmd on every host and the controller on the first, all of which end with the bed.

    Args:
        cpus: those that Slurm gives to jobs on each host.
    """
    head, key = made.hosts[0], os.urandom(1024)
    nodes = [f"NodeName={each.name} NodeAddr={each.address} CPUs={cpus} RealMemory=4000" for each in made.hosts]
    (made.shared / CONF.name).write_text(CONFIG.format(head=head, nodes="\n".join(nodes)))
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []

        def start(host: Host, *command: str) -> None:
            output = made.folder / f"{host.name}-{command[0]}.txt"
            processes.append(stack.enter_context(host.running(output, *command, SLURM_CONF=str(CONF))))

        for host in made.hosts:
            own = host.path(OWN)
            (own / "state").mkdir(parents=True)
            (own / "munge.key").write_bytes(key)
            (own / "munge.key").chmod(0o400)
            files = [f"--{name}-file={OWN}/munge.{name}" for name in ("key", "log", "pid", "seed")]
            start(host, "munged", "--foreground", "--force", f"--socket={OWN}/munge.socket", *files)
        start(head, "slurmctld", "-D")
        for host in made.hosts:
            start(host, "slurmd", "-D", "-N", host.name)
        deadline = time.monotonic() + START_S
        while _num_idle(slurm := Slurm(head)) < len(made.hosts):
            texts = "\n".join(path.read_text() for path in sorted(made.folder.glob("*.txt")))
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes), texts
            time.sleep(0.5)
        yield slurm


def _num_idle(slurm: Slurm) -> int:
    try:
        return len(slurm.call("sinfo", "--noheader", "--Node", "--partition=all", "--states=idle").splitlines())
    except (AssertionError, subprocess.TimeoutExpired):
        return 0  # the controller does not answer yet
