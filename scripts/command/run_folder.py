"""The lock of a run folder, which lets one process at a time write into it."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil

from configs.validate import ConfigError

LOCK_FILE = "driver.lock"
"""Names the process that writes into the folder; empty when none does. It is never removed: a process that waits for
the lock of a removed file would hold another than one that comes later."""
NO_LOCKS_HERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""The errors with which some network file systems answer flock. There the text of the file decides alone."""
LOCAL = "apfs bcachefs btrfs ext2 ext3 ext4 f2fs hfs jfs overlay ramfs reiserfs tmpfs xfs zfs"
BETWEEN_HOSTS = "ceph gpfs lustre nfs4"
PROVES = frozenset([*LOCAL.split(), *BETWEEN_HOSTS.split()])
"""File systems on which nobody on any host holds the lock that flock gives here. NFS before version 4, 9p, virtiofs,
CIFS and FUSE may keep it to one host."""
ON_ONE_HOST = {"localflock", "local_lock=flock", "local_lock=all"}
"""Options of a mount that keep the locks of such a file system to one host."""
CLOCK_STEP_S = 5.0
"""The largest shift of a process's start time that counts as the same process: the machine's clock may be set
meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a run folder.

    Example: Holder(host="node-3", boot_id="4f1c...", pid=4711, started=1763850000.12, since="2026-11-22 22:20:00")
    """

    host: str
    boot_id: str
    """Tells apart the starts of a machine, whose process ids begin anew."""
    pid: int
    started: float
    """The start time of the process, in seconds since the epoch: another process may get its id later."""
    since: str
    slurm_job: str = ""
    """The Slurm job of the process; empty outside of Slurm."""
    slurm_restarts: int = 0
    """The times that this job had been queued again before."""

    @classmethod
    def this_process(cls) -> Self:
        return cls(
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid=os.getpid(),
            started=psutil.Process().create_time(),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            slurm_restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """True where the process is known to have ended. On another host nothing is known, except of an earlier start
        of the same Slurm job: Slurm ends all its processes before it starts the job again."""
        if not self.is_here:
            this = Holder.this_process()
            return self.slurm_job == this.slurm_job != "" and self.slurm_restarts < this.slurm_restarts
        try:
            process = psutil.Process(self.pid)
            age_differs = abs(process.create_time() - self.started) > CLOCK_STEP_S
            return self.boot_id != _boot_id() or age_differs or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder while the block runs. The kernel frees it when the process dies, however it dies.

    The lock of flock decides. The text of the file counts where there is no flock, and of a process on another host
    also on file systems whose locks may end at this host.

    Raises ConfigError when another process holds it, or may hold it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        has_flock = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(path, _read(descriptor)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS_HERE:
                raise
            has_flock = False
        holder = _read(descriptor)
        if holder is not None and _may_live(holder, has_flock, run_dir):
            raise _refused(path, holder)
        _write(descriptor, json.dumps(asdict(Holder.this_process())).encode())
        try:
            yield
        finally:
            _write(descriptor, b"")
    finally:
        os.close(descriptor)


def read_holder(run_dir: Path) -> Holder | None:
    """Return the process that driver.lock names, which may have been killed, or None if it names none."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as file:
            return _read(file.fileno())
    except FileNotFoundError:
        return None


def _may_live(holder: Holder, has_flock: bool, run_dir: Path) -> bool:
    if has_flock and (holder.is_here or _reaches_every_host(run_dir)):
        return False
    return not holder.has_ended


def _reaches_every_host(run_dir: Path) -> bool:
    """Return true where holding the lock of flock here means that no process on any host holds it."""
    path = run_dir.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not mounts:
        return False
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint))  # the later one covers the earlier
    return mount.fstype in PROVES and ON_ONE_HOST.isdisjoint(mount.opts.split(","))


def _refused(path: Path, holder: Holder | None) -> ConfigError:
    folder = f"hydra.run.dir={path.parent}"
    if holder is None:  # it has the lock, and has not written its name yet
        return ConfigError(f"{folder}: another process has just begun to write into it; name another folder")
    who = f"process {holder.pid} on {holder.host}, since {holder.since}"
    if holder.is_here:
        return ConfigError(f"{folder}: {who}, writes into it; end that first, or name another folder")
    return ConfigError(f"{folder}: {who}, writes into it, or was killed in it: if it has ended, remove {path}")


def _read(descriptor: int) -> Holder | None:
    """None for an empty file, and for one whose writer died while it wrote."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError, RecursionError):
        return None


def _write(descriptor: int, text: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text, 0)
    os.fsync(descriptor)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return ""
