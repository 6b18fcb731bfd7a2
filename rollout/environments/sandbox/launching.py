"""The ways to start a sandbox: bubblewrap, the command of docker or podman, or an environment of Harbor. Each starts
`guest.py` as process 1 of something that has files, processes and a network of its own, and talks to it over its stdin
and stdout; with Harbor, another program stands in for it (`harbor_guest.py`)."""

import errno
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from configs.sandbox import SandboxBackend, SandboxConfig
from rollout.environments.sandbox import harbor_guest
from rollout.environments.sandbox.seccomp import filter_program

logger = logging.getLogger(__name__)
KEY = "sandbox.backend"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FOLDERS = ("work", "tmp", "app", "tests", "logs", "solution")
"""Folders at the top of a sandbox that can be written. Commands begin in the first; the last four are where Harbor's
tasks expect them."""
HOME = f"/{FOLDERS[0]}"
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders of this machine with programs, which sandboxes without an image see."""
ALTERNATIVES = "/etc/alternatives"
"""The folder of the links by which Debian chooses between programs."""
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
MIB = 2**20
SHARED_MEMORY_MB = 16
"""The size of /dev/shm, by which programs share memory."""
MAX_FILES = 20_000
"""The most files and folders in a folder of memory: each costs the machine some, whatever is in it."""
MAX_OPEN_FILES = 256
UNPRIVILEGED_ID = 61_357
"""The user and group of sandboxes where the run is root's. The kernel does not limit root's processes. No user of any
distribution has this number."""
BWRAP = "bwrap"
HARBOR_GUEST = str(Path(__file__).with_name("harbor_guest.py"))
INSTALL = "python3.12 -m venv FOLDER && FOLDER/bin/pip install 'harbor>=0.26'"
PROBE_S = 30.0
"""The deadline of the sandbox that is started to see whether the backend works."""


class SandboxUnavailableError(RuntimeError):
    """No sandbox can be started here. The message names the key, and says what to install or to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command that starts a sandbox."""

    argv: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for `subprocess.Popen` and asyncio's form of it."""


class Launcher(Protocol):
    """Starts sandboxes of one backend."""

    def launch(self, image: str | None) -> AbstractContextManager[Launch]:
        """Return a context manager that gives the `Launch` of one sandbox, for as long as its command is started."""
        ...

    def advice(self, error: str) -> str:
        """Return what to install or to set where a start has failed with this text."""
        ...


@cache
def guest_source() -> str:
    return (resources.files("rollout.environments.sandbox") / "guest.py").read_text(encoding="utf-8")


def guest_settings(
    config: SandboxConfig, *, writable: Sequence[str], folders: Sequence[str], own_user: bool
) -> dict[str, Any]:
    """Return the settings of `guest.py`.

    Args:
        config: The limits.
        writable: Folders that are emptied for the next episode.
        folders: Folders that are made at the start.
        own_user: Whether the kernel counts the processes of the sandbox's user by themselves.
    """
    memory = config.memory_mb * MIB
    rlimits = {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": config.cpu_s,
        "RLIMIT_FSIZE": config.disk_mb * MIB,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    if own_user:
        rlimits["RLIMIT_NPROC"] = config.max_processes + 1  # process 1 counts, too
    return {
        "writable": writable,
        "folders": folders,
        "memory_bytes": memory,
        "max_processes": config.max_processes,
        "max_files": MAX_FILES,
        "rlimits": rlimits,
    }


def _unprivileged() -> tuple[str, ...]:
    """Return the words before a command by which root runs it as another user. Not `subprocess`'s own `user=`: with
    that, it forks (see `ChildProcess`)."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", f"--reuid={UNPRIVILEGED_ID}", f"--regid={UNPRIVILEGED_ID}", "--clear-groups", "--")


@contextmanager
def bwrap_launch(
    image: str | None,
    files: Sequence[str],
    arguments: Sequence[str],
    *,
    before: Sequence[str] = (),
    environment: Mapping[str, str] = NO_VARIABLES,
    pass_fds: Sequence[int] = (),
) -> Iterator[Launch]:
    """Return a context manager that gives the `Launch` of a sandbox of bwrap.

    Args:
        image: The folder of its files, or None for those of this machine's system.
        files: Arguments of bwrap for what it has besides.
        arguments: Those of `guest.py`.
        before: Words of a command that root runs before it becomes another user.
        environment: Variables of `guest.py`. They are on no command line, which others could read.
        pass_fds: Descriptors that `guest.py` gets.
    """
    if shutil.which(BWRAP) is None:  # setpriv would say so in its own words
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), BWRAP)
    program, ours = os.pipe()
    try:
        with os.fdopen(ours, "wb") as pipe:
            pipe.write(filter_program())
        options: dict[str, Any] = {
            "pass_fds": (program, *pass_fds),
            "cwd": "/",
            "env": {**environment, "PATH": os.environ.get("PATH", PATH)},
        }
        guest = ("python3", "-I", "-S", "-c", guest_source(), *arguments)
        yield Launch(argv=(*before, *_unprivileged(), *_bwrap(image, program, files), *guest), options=options)
    finally:
        os.close(program)


class Bubblewrap:
    """Makes sandboxes with bwrap, in namespaces of the kernel.

    - The root holds links, folders of the image that cannot be written, and two file systems in memory, which are
      limited. Nothing of a sandbox is on a disk of the machine: it is gone with its last process.
    - Its process 1 dies with bwrap, which dies with the process that has started it; the kernel then ends all others.
    """

    def __init__(self, config: SandboxConfig):
        self._config = config
        writable = ["/sandbox", "/dev/shm"]
        folders = [f"/sandbox/{name}" for name in FOLDERS]
        self._settings = json.dumps(guest_settings(config, writable=writable, folders=folders, own_user=True))

    @contextmanager
    def launch(self, image: str | None) -> Iterator[Launch]:
        links = [word for name in FOLDERS for word in ("--symlink", f"sandbox/{name}", f"/{name}")]
        files = ("--size", str(self._config.disk_mb * MIB), "--tmpfs", "/sandbox", *links)
        with bwrap_launch(image, files, (self._settings,)) as launch:
            yield launch

    def advice(self, error: str) -> str:
        if shutil.which(BWRAP) is None:
            return "bwrap is not installed: apt-get install bubblewrap, or set sandbox.backend=docker or podman"
        if "python3" in error:
            return "sandbox.image has no python3 on its PATH, which a sandbox needs"
        if "namespace" in error or "uid map" in error or "Operation not permitted" in error:
            return (
                "bwrap can make no namespaces here: allow it with sysctl user.max_user_namespaces=10000, "
                "kernel.unprivileged_userns_clone=1 (Debian) and kernel.apparmor_restrict_unprivileged_userns=0 "
                "(Ubuntu), in a container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined, "
                "or set sandbox.backend=docker or podman"
            )
        return "bwrap cannot start a sandbox"


def _bwrap(image: str | None, program: int, files: Sequence[str]) -> tuple[str, ...]:
    """Return the command of bwrap, before that of process 1, which has the variables that bwrap has."""
    namespaces = ("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox")
    ends = ("--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--seccomp", str(program))
    devices = ("--dev", "/dev", "--size", str(SHARED_MEMORY_MB * MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    roots = _system() if image is None else _unpacked(Path(image))
    fixed = ("--proc", "/proc", *devices, *files, "--remount-ro", "/", "--setenv", "PATH", PATH, "--chdir", "/")
    return (BWRAP, *namespaces, *ends, *roots, *fixed)


def _system() -> list[str]:
    """Return the arguments that show this machine's programs."""
    roots = [word for name in SHOWN for word in _shown(Path(name), name)]
    for name in (ALTERNATIVES, "/etc/ld.so.cache"):  # links of programs, and where libraries are
        roots += _shown(Path(name), name)
    if is_shown(shipped_tasks()):  # their tests and solutions; Python of an image is in /usr/local
        roots += ["--tmpfs", str(shipped_tasks().resolve())]
    return roots


def is_shown(path: Path, folders: Sequence[str] = SHOWN) -> bool:
    """Return whether a path of this machine is in one of the folders, by default those that the sandboxes of bubblewrap
    without sandbox.image see."""
    return any(path.resolve().is_relative_to(Path(name).resolve()) for name in folders if Path(name).exists())


def shipped_tasks() -> Path:
    return Path(str(resources.files("rollout.environments.sandbox") / "tasks"))


def _unpacked(image: Path) -> list[str]:
    """Return the arguments that show what is in the folder of an image."""
    hidden = {"dev", "proc", "sys", "run", "sandbox", *FOLDERS}
    entries = sorted(image.expanduser().iterdir())
    return [word for entry in entries if entry.name not in hidden for word in _shown(entry, f"/{entry.name}")]


def _shown(source: Path, name: str) -> list[str]:
    if source.is_symlink():
        return ["--symlink", os.readlink(source), name]
    return ["--ro-bind", str(source.absolute()), name] if source.exists() else []


class Container:
    """Makes sandboxes with the command of docker or podman. The container ends when its stdin does, and with
    `--rm` is removed then."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        folders = [f"/{name}" for name in FOLDERS]
        self._settings = json.dumps(guest_settings(config, writable=folders, folders=folders, own_user=False))

    @contextmanager
    def launch(self, image: str | None) -> Iterator[Launch]:
        config = self._config
        if image is None:
            raise SandboxUnavailableError(f"{KEY}={config.backend.value}: needs sandbox.image, the name of an image")
        memory, disk = f"{config.memory_mb}m", f"rw,exec,nosuid,nodev,size={config.disk_mb}m,mode=1777"
        tmpfs = [word for name in FOLDERS for word in ("--tmpfs", f"/{name}:{disk}")]
        rights = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "1000:1000", "--read-only")
        limits = ("--memory", memory, "--memory-swap", memory, "--pids-limit", str(config.max_processes + 1))
        started = ("run", "--rm", "-i", "--network", "none", "--workdir", "/", "--shm-size", f"{SHARED_MEMORY_MB}m")
        guest = ("python3", image, "-I", "-S", "-c", guest_source(), self._settings)
        argv = (config.backend.value, *started, *rights, *limits, *tmpfs, "--entrypoint", *guest)
        yield Launch(argv=argv)

    def advice(self, error: str) -> str:
        name = self._config.backend.value
        if shutil.which(name) is None:
            return f"{name} is not installed"
        return f"{name} cannot start a sandbox of sandbox.image={self._config.image}"


class Harbor:
    """Makes sandboxes with an environment of Harbor. Each has a process of Harbor's Python on this machine, which stops
    the sandbox when its stdin ends."""

    def __init__(self, config: SandboxConfig):
        self._config = config
        folders = [f"/{name}" for name in FOLDERS]
        # No folder is emptied for another episode, or has its files counted: its file system is not its own.
        self._guest = guest_settings(config, writable=(), folders=folders, own_user=False)

    @contextmanager
    def launch(self, image: str | None) -> Iterator[Launch]:
        config = self._config
        if image is None or config.harbor_python is None or config.harbor_environment is None:
            needs = "sandbox.image, sandbox.harbor_python and sandbox.harbor_environment"
            raise SandboxUnavailableError(f"{KEY}={config.backend.value}: needs {needs}")
        settings = {
            "environment": config.harbor_environment,
            "args": config.harbor_args,
            "image": image,
            "guest": self._guest,
            "source": guest_source(),
            "answer_timeout_s": config.answer_timeout_s,
        }
        # -P: files beside the program are no modules of its own. A session of its own: Ctrl-C is for the run.
        options = {"env": {**os.environ, harbor_guest.SETTINGS: json.dumps(settings)}, "start_new_session": True}
        yield Launch(argv=(os.path.expanduser(config.harbor_python), "-P", HARBOR_GUEST), options=options)

    def advice(self, error: str) -> str:
        config = self._config
        python = config.harbor_python or ""
        is_missing = shutil.which(os.path.expanduser(python)) is None
        if is_missing or "No module named 'harbor'" in error or "Unknown option: -P" in error:
            return f"sandbox.harbor_python={python} must be a Python, 3.12 or later, with Harbor: {INSTALL}"
        return f"Harbor cannot start a sandbox with sandbox.harbor_environment={config.harbor_environment}"


LAUNCHERS: Mapping[SandboxBackend, type[Bubblewrap] | type[Container] | type[Harbor]] = {
    SandboxBackend.bubblewrap: Bubblewrap,
    SandboxBackend.docker: Container,
    SandboxBackend.podman: Container,
    SandboxBackend.harbor: Harbor,
}


def make_launcher(config: SandboxConfig) -> Launcher:
    return LAUNCHERS[config.backend](config)


def check_backend(config: SandboxConfig, launcher: Launcher | None = None) -> None:
    """Start a sandbox, by default as sandbox.backend says, and end it. Raises SandboxUnavailableError where that is not
    possible on this machine."""
    launcher = launcher or make_launcher(config)
    try:
        with launcher.launch(config.image) as launch:
            # Its stdin ends at once, and so does the sandbox.
            done = subprocess.run(
                launch.argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S, **launch.options
            )
        error = done.stderr.decode(errors="replace").strip()
        if done.returncode == 0:
            if error:  # such as the version of Harbor
                logger.info("%s=%s: %s", KEY, config.backend.value, error)
            return
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure) if isinstance(failure, OSError) else f"a sandbox did not start within {PROBE_S:g} s"
    raise unavailable(config, launcher, error)


def has_image(config: SandboxConfig, image: str) -> bool:
    """Return whether docker or podman has an image on this machine. Raises SandboxUnavailableError where it does not
    say."""
    argv = (config.backend.value, "image", "inspect", "--format", "{{.Id}}", image)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise unavailable(config, make_launcher(config), str(failure)) from failure
    return done.returncode == 0


def unavailable(config: SandboxConfig, launcher: Launcher, error: str) -> SandboxUnavailableError:
    """Return the error of a start that failed with this text."""
    return SandboxUnavailableError(f"{KEY}={config.backend.value}: {launcher.advice(error)} ({error[-300:]})")
