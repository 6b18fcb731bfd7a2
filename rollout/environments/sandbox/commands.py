"""Agents that are commands, each in a sandbox of bubblewrap that holds its episode: its HOME, the programs that it
needs, and of all networks the address of its session."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from configs.sandbox import SandboxConfig
from rollout.actors.child_process import ChildProcess
from rollout.environments.sandbox.launching import (
    MIB,
    PATH,
    UNPRIVILEGED_ID,
    Bubblewrap,
    Launch,
    bwrap_launch,
    guest_settings,
    unavailable,
)
from rollout.environments.sandbox.programs import Shown
from rollout.environments.sandbox.relay import Relay
from rollout.environments.sandbox.sandbox import Limit
from rollout.environments.sandbox.staging import closed_folders
from rollout.sessions.folders import EpisodeFolder
from rollout.sessions.harness import PROMPT_FILE_ENV, AgentCommand

STAGING = str(Path(__file__).with_name("staging.py"))
HOME, PROMPT = "/episode/home", "/episode/prompt.txt"
WRITABLE = ("/tmp", "/dev/shm")
"""Folders in memory that a command can write besides its HOME."""
SAID_S = 1.0
"""The longest wait for the last words of a sandbox that did not start."""


class CommandLauncher(Bubblewrap):
    """Starts sandboxes for commands. As a `Launcher` it starts one without a command, to see whether that works."""

    def __init__(self, config: SandboxConfig, shown: Sequence[Shown]):
        super().__init__(config)
        self._shown = shown
        settings = guest_settings(config, writable=WRITABLE, folders=(), own_user=True)
        del settings["rlimits"]["RLIMIT_AS"]  # JavaScript reserves many times the memory that it takes
        self._base = settings

    def launch(self, image: str | None) -> AbstractContextManager[Launch]:
        return bwrap_launch(image, self._files(), (json.dumps(self._base),), before=self._before())

    @contextmanager
    def launch_command(self, command: AgentCommand, control: int, address: tuple[str, int]) -> Iterator[Launch]:
        """Give the `Launch` of a sandbox that runs a command. Its process 1 sends the listener at `address` to
        `control`, and ends when the other end of that is closed."""
        config, folder = self._config, command.folder
        assert folder.home is not None  # sessions.fresh_folder, which is checked
        path = os.environ.get("PATH", PATH)
        limits = {limit.value: limit.text(config, config.timeout_s) for limit in Limit}
        agent = {"control": control, "address": address, "cwd": HOME, "path": path, "limits": limits}
        settings = json.dumps({**self._base, "agent": agent})
        binds = ("--bind", str(folder.home), HOME, "--ro-bind", str(folder.prompt), PROMPT)
        variables = {**command.variables, "HOME": HOME, PROMPT_FILE_ENV: PROMPT, "LANG": "C.UTF-8"}
        with bwrap_launch(
            config.image,
            self._files(*binds),
            (settings, command.script, os.fsdecode(command.argument)),
            before=self._before(str(folder.home), str(folder.prompt)),
            environment=variables,
            pass_fds=(control,),
        ) as launch:
            yield launch

    def _files(self, *binds: str) -> tuple[str, ...]:
        shown = (word for each in self._shown for word in each.words)
        return ("--size", str(self._config.disk_mb * MIB), "--tmpfs", "/tmp", *shown, *binds)

    def _before(self, *sources: str) -> tuple[str, ...]:
        """Return the words of `staging.py`, where there are folders that only root may enter."""
        paths = sorted(
            {os.path.realpath(path) for path in sources} | {each.source for each in self._shown if not each.link}
        )
        if os.geteuid() != 0 or not closed_folders(paths, UNPRIVILEGED_ID):
            return ()
        return (sys.executable, "-I", "-S", STAGING, json.dumps(paths), str(UNPRIVILEGED_ID))

    def advice(self, error: str) -> str:
        if "only root may enter" in error:
            return (
                f"a sandbox of root's run belongs to the user {UNPRIVILEGED_ID}, who cannot be shown such folders: "
                "install the agent below /usr/local or /opt"
            )
        return super().advice(error)


class SandboxedCommands:
    """The place of commands with rollout.agent_sandbox: a `CommandPlace`."""

    def __init__(self, config: SandboxConfig, shown: Sequence[Shown]):
        self._config, self._launcher = config, CommandLauncher(config, shown)

    async def __call__(self, command: AgentCommand) -> tuple[ChildProcess, int]:
        """Start a command. Raises SandboxUnavailableError, and OSError and ValueError for a prompt that can be no
        argument."""
        url = urlsplit(command.connection.server_url)
        assert url.hostname is not None and url.port is not None
        address = (url.hostname, url.port)
        await asyncio.to_thread(_hand_over, command.folder)
        control, theirs = socket.socketpair()
        with control:
            with theirs, self._launcher.launch_command(command, theirs.fileno(), address) as launch:
                process = await ChildProcess.start(*launch.argv, start_new_session=True, **launch.options)
            try:
                listener = await asyncio.to_thread(_receive_listener, control, self._config.start_timeout_s)
                if listener is None:
                    raise unavailable(self._config, self._launcher, await _said(process))
                relay = await Relay.start(listener, address)
            except BaseException:
                process.kill()
                await process.wait()
                raise
            command.connection.at_end.insert(0, lambda has_failed: relay.close())
            return process, control.detach()


def _hand_over(folder: EpisodeFolder) -> None:
    """Give the folder of an episode to the user of the sandbox, where that is another one."""
    if os.geteuid() != 0:
        return
    for parent, folders, files in os.walk(folder.path):
        for path in (parent, *(os.path.join(parent, name) for name in (*folders, *files))):
            os.lchown(path, UNPRIVILEGED_ID, UNPRIVILEGED_ID)


def _receive_listener(control: socket.socket, timeout_s: float) -> socket.socket | None:
    """Return the listener that process 1 sends, or None where it has ended. Raises TimeoutError."""
    control.settimeout(timeout_s)
    try:
        said, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    except TimeoutError:
        raise TimeoutError(f"the start of a sandbox took longer than sandbox.start_timeout_s={timeout_s:g}") from None
    return socket.socket(fileno=descriptors[0]) if said else None


async def _said(process: ChildProcess) -> str:
    """Return what a sandbox that did not start has written to stderr."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SAID_S):
            return (await process.stderr.read(4096)).decode(errors="replace").strip()
    return "it wrote no reason"
