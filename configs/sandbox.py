"""Keys of the sandboxes in which agents run commands, and rewards run what a policy wrote."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class SandboxBackend(Enum):
    """The program that makes sandboxes."""

    bubblewrap = "bubblewrap"
    """bwrap, which needs no service: its sandboxes start within tens of milliseconds."""
    docker = "docker"
    podman = "podman"
    harbor = "harbor"
    """An environment of Harbor (https://harborframework.com), which has a Python of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """Read by the agent loops and rewards of rollout/environments/sandbox, by rollout.agent_sandbox, and by your own
    that ask for a sandbox."""

    backend: SandboxBackend = SandboxBackend.bubblewrap
    """The program that makes sandboxes: bubblewrap, docker, podman or harbor. It must be on every machine with agent
    workers."""
    image: str | None = None
    """Files that a sandbox begins with, and cannot change. bubblewrap: the folder of an unpacked image, or null for
    this machine's /usr. docker and podman: the name of an image. harbor: this, or the absolute path of the folder of a
    Dockerfile, and its files can be changed. It must have python3."""
    harbor_python: str | None = None
    """sandbox.backend=harbor: the Python that has Harbor, 0.26 or later, such as /opt/harbor/bin/python."""
    harbor_environment: str | None = None
    """sandbox.backend=harbor: the environment of Harbor that makes sandboxes: a name such as daytona, or MODULE:CLASS
    of your own, which that Python can import."""
    harbor_args: dict[str, Any] = field(default_factory=dict)
    """sandbox.backend=harbor: fields of Harbor's EnvironmentConfig such as override_memory_mb, and keyword arguments of
    the environment."""
    memory_mb: int = 512
    """MiB of memory of all processes of a sandbox together, and of the address space of each (not of an agent's)."""
    disk_mb: int = 64
    """MiB of files that a sandbox can write; they are kept in memory. docker and podman: so many in each folder that
    can be written. harbor: in each file, wherever the service keeps it."""
    max_processes: int = 64
    """Processes and threads of a sandbox. Reaching this number ends all of them."""
    cpu_s: int = 20
    """Seconds of processor time of each process."""
    timeout_s: float = 20.0
    """Deadline in seconds of a command, and of all hidden tests of a response together."""
    start_timeout_s: float = 30.0
    """Deadline in seconds for the start of a sandbox."""
    answer_timeout_s: float = 10.0
    """Deadline in seconds for reading or writing a file of a sandbox, for what a command takes beyond its own deadline,
    and for the end of a sandbox. One that is far away needs more."""
    wait_timeout_s: float = 1800.0
    """Deadline in seconds for waiting until one of sandbox.max_running is free: an episode may hold its own until it
    ends."""
    max_running: int = 64
    """Sandboxes in use at once in each agent worker. Further episodes and rewards wait."""
    warm: int = 4
    """Sandboxes that each agent worker keeps started for the next episodes, besides those in use."""
    reuse: bool = False
    """Give a sandbox to the next episode after its processes were ended and its files removed, in place of a new one.
    It saves the start."""
