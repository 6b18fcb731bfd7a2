"""Hosts on one Linux machine, to run the product across machines: each has its own network, mounts, host name,
processes, clock since boot, /tmp and /dev/shm, and reaches the others through a switch in user space (switch.c) only.
Its wall clock is wrong where a test asks for it (clock.c).

Nothing of a bed has a name outside: namespaces, interfaces and mounts end with the processes that hold them, and these
end with a pipe from this process, however it ends. Only the folder is removed by hand.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.paths import ROOT

SWITCH, CLOCK = (Path(__file__).with_name(name) for name in ("switch.c", "clock.c"))
TOOLS = ("cc", "ip", "nsenter", "unshare")
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--time")
NETWORKS = (("eth0", "10.77.0"), ("eth1", "10.78.0"))
"""The interface and the addresses of each network. Hosts know one another by the first."""
SHARED = Path("/mnt/shared")
"""The folder that all hosts see, and that holds what `Bed.shared` does."""
TMP_BYTES = 2**30
UP_S = 100_000
"""The seconds for which each host seems to have been up longer than the one before: a time.monotonic() says nothing to
another host."""
END_S = 30.0
ENVIRONMENT = {
    "HOME": "/tmp/home",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": f"{ROOT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "RAY_worker_niceness": "0",
}
INIT = """
set -eu
read -r outer _ </proc/self/stat
mount -t proc proc /proc
hostname "$NAME"
mount --bind "$FOLDER/$NAME.hosts" /etc/hosts
mount --bind "$FOLDER/resolv.conf" /etc/resolv.conf
mount -t tmpfs tmpfs /mnt
mkdir /mnt/shared
mount --bind "$FOLDER/shared" /mnt/shared
mount -t tmpfs shm /dev/shm
mount -t tmpfs -o "size=$TMP_BYTES" tmp /tmp
chmod 1777 /tmp
mkdir /tmp/home
echo "$outer"
read -r links
eval "$links"
echo up
while read -r _; do :; done
"""
"""The first process of a host, whose end ends all others. It goes on when its interfaces have come, and ends with its
standard input."""


def missing() -> str | None:
    """Return why there can be no bed here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts in namespaces need Linux and root"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts in namespaces need {', '.join(absent)}"
    if any(path.is_relative_to(own) for path in (ROOT, Path(sys.executable).resolve()) for own in ("/tmp", "/mnt")):
        return f"{ROOT} or its interpreter lies in /tmp or /mnt, which hosts have for themselves"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    if tried.returncode or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return f"this machine makes no namespaces or no network devices: {tried.stderr.strip() or '/dev/net/tun'}"
    return None


@dataclass
class Switch:
    """One network. Its ports are numbered as the hosts are."""

    process: subprocess.Popen[str]

    def order(self, text: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n", f"the switch ended at {text!r}"


@dataclass
class Host:
    """One machine. It is up from `Bed.bring_up` to its death."""

    number: int
    name: str
    address: str
    init: subprocess.Popen[str]
    pid: int
    """The first process, as it is numbered outside."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """The variables of all commands here."""

    def command(self, *words: str | Path, cwd: Path | str = ROOT, **environment: str) -> list[str]:
        """Return the command line that runs another one here."""
        enter = ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={cwd}", "--"]
        variables = [f"{name}={value}" for name, value in (ENVIRONMENT | self.environment | environment).items()]
        return [*enter, "env", "-i", *variables, *map(str, words)]

    def run(self, *words: str | Path, timeout_s: float = 60.0, **environment: str) -> str:
        """Return what the command writes. Raises AssertionError when it fails."""
        done = subprocess.run(
            self.command(*words, **environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {' '.join(map(str, words))}: {done.returncode}\n{done.stdout}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, output: Path, *words: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background while the block runs, and kill it then."""
        with output.open("w") as file:
            process = subprocess.Popen(
                self.command(*words, **environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children():
                    child.kill()
            process.wait(END_S)

    def path(self, inside: Path | str) -> Path:
        """Return the path outside of a file that only this host sees."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def processes(self) -> list[psutil.Process]:
        """Return all processes but the first."""
        namespace, found = os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace and process.pid != self.pid:
                    found.append(process)
        return found


@dataclass
class Bed:
    """The hosts, and the networks between them."""

    folder: Path
    switches: tuple[Switch, ...]
    routes: str
    """The commands that give a host a way out of its networks."""
    clocks_ahead_s: Mapping[int, int]
    """The seconds by which Python's wall clock is ahead of the right one, by the number of the host."""
    hosts: list[Host] = field(default_factory=list)

    @property
    def shared(self) -> Path:
        """The folder that hosts see as SHARED."""
        return self.folder / "shared"

    def bring_up(self, number: int) -> Host:
        """Start a host, the first time or after it died."""
        name = name_of(number)
        settings = {"NAME": name, "FOLDER": str(self.folder), "TMP_BYTES": str(TMP_BYTES)}
        clocks = [f"--monotonic={number * UP_S}", f"--boottime={number * UP_S}"]
        log = self.folder / f"{name}.log"
        with log.open("w") as errors:
            init = subprocess.Popen(
                ["unshare", *NAMESPACES, *clocks, "--fork", "--kill-child", "bash", "-c", INIT],
                env=os.environ | settings,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        assert init.stdin is not None and init.stdout is not None
        pid = init.stdout.readline().strip()
        assert pid, f"{name} did not start: {log.read_text()}"
        ahead = {"LD_PRELOAD": str(SHARED / CLOCK.stem), "WALL_CLOCK_AHEAD_S": str(self.clocks_ahead_s.get(number))}
        environment = ahead if number in self.clocks_ahead_s else {}
        host = Host(number, name, f"{NETWORKS[0][1]}.{number}", init, int(pid), environment)
        self.hosts = sorted([*self.hosts, host], key=lambda each: each.number)
        links = ["ip link set lo up"]
        for switch, (interface, network) in zip(self.switches, NETWORKS, strict=False):
            switch.order(f"attach {number} {pid}")
            # The address of the card stays when a host comes again: the others may still know it.
            links.append(f"ip link set {interface} address 02:00:00:00:00:0{number} mtu 9000 up")
            links.append(f"ip address add {network}.{number}/24 dev {interface}")
        self.heal(host)
        init.stdin.write("; ".join([*links, self.routes]) + "\n")
        init.stdin.flush()
        assert init.stdout.readline() == "up\n", log.read_text()
        return host

    def die(self, host: Host) -> None:
        """End a host as a power cut does: the others hear nothing more of it, not even that connections end, until it
        is brought up again."""
        self.partition(host)
        _end(host)
        self.hosts.remove(host)

    def disturb(self, host: Host, *, round_trip_ms: float = 0, loss_percent: float = 0, mbit: float = 0) -> None:
        """Make the first network of a host slow or lossy, both ways. `mbit`: per second; 0: no limit."""
        self.switches[0].order(f"disturb {host.number} {round_trip_ms / 2} {loss_percent} {mbit}")

    def partition(self, host: Host) -> None:
        """Let nothing through between a host and all others."""
        self._cut(host, 1)

    def heal(self, host: Host) -> None:
        self._cut(host, 0)

    def _cut(self, host: Host, is_cut: int) -> None:
        for switch in self.switches:
            for other in self.hosts:
                if other.number != host.number:
                    switch.order(f"cut {host.number} {other.number} {is_cut}")


@contextlib.contextmanager
def bed(
    folder: Path,
    num_hosts: int = 3,
    *,
    is_debian: bool = False,
    has_route: bool = True,
    num_networks: int = 1,
    clocks_ahead_s: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[Bed]:
    """Bring hosts up, and end all of it however the block ends.

    Args:
        folder: made here, and removed at the end.
        is_debian: /etc/hosts maps a host's own name to 127.0.1.1, as Debian's installer writes it.
        has_route: every host has a default route; with two networks it leaves by the second one.
        clocks_ahead_s: the seconds by which Python's wall clock is ahead of the right one, by the number of the host.
    """
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        (folder / "shared").mkdir()
        (folder / "resolv.conf").touch()  # nobody answers, at once
        for number in range(1, num_hosts + 1):
            (folder / f"{name_of(number)}.hosts").write_text(_hosts_file(number, num_hosts, is_debian))
        binary = folder / "switch"
        subprocess.run(["cc", "-O2", "-o", binary, SWITCH], check=True)
        if clocks_ahead_s:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "shared" / CLOCK.stem, CLOCK], check=True)
        networks = NETWORKS[:num_networks]
        switches = tuple(stack.enter_context(_switch(binary, interface)) for interface, _ in networks)
        interface, network = networks[-1]
        routes = f"ip route add default via {network}.254 dev {interface}" if has_route else ":"
        made = Bed(folder, switches, routes, clocks_ahead_s)
        stack.callback(lambda: [_end(host) for host in made.hosts])
        for number in range(1, num_hosts + 1):
            made.bring_up(number)
        yield made


def name_of(number: int) -> str:
    return f"node{number}"


def _hosts_file(number: int, num_hosts: int, is_debian: bool) -> str:
    addresses = {name_of(other): f"{NETWORKS[0][1]}.{other}" for other in range(1, num_hosts + 1)}
    if is_debian:
        addresses[name_of(number)] = "127.0.1.1"
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())


@contextlib.contextmanager
def _switch(binary: Path, interface: str) -> Iterator[Switch]:
    with subprocess.Popen(
        [binary, interface], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        yield Switch(process)  # its end closes the pipe, which ends the process


def _end(host: Host) -> None:
    """Kill all processes of a host, and wait until the kernel has taken them away."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(host.pid, signal.SIGKILL)
    with host.init:  # closes the pipes
        host.init.wait(END_S)
