"""A sandbox: commands run in it, and its files are read and written, by the program that is its process 1."""

import asyncio
import json
import logging
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from configs.runtime.deadline import within
from configs.sandbox import SandboxBackend, SandboxConfig
from rollout.actors.child_process import ChildProcess
from rollout.environments.sandbox.launching import (
    HOME,
    MAX_FILES,
    PATH,
    Launcher,
    make_launcher,
    unavailable,
)

logger = logging.getLogger(__name__)
HEADER = struct.Struct("!I")
MAX_ANSWER_BYTES = 65_536
"""The longest answer of process 1, without the output or file that comes with it."""
MAX_FILE_BYTES = 16 * 2**20
"""The longest file that is read or written from outside."""
MAX_OUTPUT_BYTES = 2**20
"""The part of a command's output, and of its errors, that is kept by default. The rest is read and thrown away."""
MAX_SAID_BYTES = 4096
"""The last part of what a program that starts sandboxes writes to stderr that is kept for errors."""
SAID_S = 1.0
END_S = 5.0
ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


class SandboxLostError(RuntimeError):
    """A sandbox does not answer any more. That is no fault of what ran in it."""


class SandboxFileError(OSError):
    """A file of a sandbox cannot be read or written: it is none, or what ran there has left no room."""


class Limit(Enum):
    """A limit that the processes of a sandbox have reached. All of them were ended."""

    time = "time"
    cpu = "cpu"
    memory = "memory"
    processes = "processes"
    files = "files"
    tampered = "tampered"
    """The limits of process 1 were changed from within. The sandbox runs nothing any more."""

    def text(self, config: SandboxConfig, timeout_s: float) -> str:
        """Return what a reader should know of it. It names the key."""
        match self:
            case Limit.time:
                key = "sandbox.timeout_s=" if timeout_s == config.timeout_s else ""
                return f"took longer than {key}{timeout_s:g}" + ("" if key else " s")
            case Limit.cpu:
                return f"used more processor time than sandbox.cpu_s={config.cpu_s}"
            case Limit.memory:
                return f"used more memory than sandbox.memory_mb={config.memory_mb}"
            case Limit.processes:
                return f"had sandbox.max_processes={config.max_processes} processes or more"
            case Limit.files:
                return f"made more than {MAX_FILES} files"
            case Limit.tampered:
                return "changed the limits of process 1, and nothing runs in this sandbox any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a command.

    Example: Outcome(exit_code=1, stdout=b"", stderr=b"ls: cannot access ...")
    """

    exit_code: int | None
    """The exit code, above 128 for a command that a signal has ended. None: it reached a limit."""
    stdout: bytes
    stderr: bytes
    limit: Limit | None = None
    is_cut: bool = False
    """True where there was more output than is kept."""
    why: str = ""
    """The limit in words."""

    @property
    def is_success(self) -> bool:
        return self.exit_code == 0

    def text(self) -> str:
        """Return output and errors as a terminal shows them, and how the command ended if not well."""
        parts = [part.decode(errors="replace").rstrip("\n") for part in (self.stdout, self.stderr) if part]
        if self.is_cut:
            parts.append("[the output was cut]")
        if self.limit is not None:
            parts.append(f"[ended: {self.why}]")
        elif self.exit_code:
            parts.append(f"[exit code {self.exit_code}]")
        return "\n".join(parts)


class Sandbox:
    """A sandbox that runs. One request is under way at a time.

    Example:
        sandbox = await Sandbox.start(config.sandbox)
        await sandbox.write_file("/work/add.py", b"print(2 + 2)")
        outcome = await sandbox.exec(["python3", "add.py"])  # outcome.stdout == b"4\\n"
        await sandbox.stop()
    """

    def __init__(self, process: ChildProcess, config: SandboxConfig, image: str | None):
        self.image, self.config = image, config
        self._process = process
        self._one = asyncio.Lock()
        self._is_lost = False
        self._said = bytearray()
        # Read on at all times: a program whose stderr is full waits until somebody reads it.
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, config: SandboxConfig, image: str | None = None, launcher: Launcher | None = None
    ) -> "Sandbox":
        """Start a sandbox of an image, by default that of the config, and wait until it answers.

        Raises:
            SandboxUnavailableError: It ended at once, or cannot be started.
            TimeoutError: It did not answer within sandbox.start_timeout_s.
        """
        launcher, image = launcher or make_launcher(config), image or config.image
        try:
            with launcher.launch(image) as launch:
                process = await ChildProcess.start(*launch.argv, **launch.options)
        except OSError as error:
            raise unavailable(config, launcher, str(error)) from error
        sandbox = cls(process, config, image)
        try:
            what = "the start of a sandbox"
            async with within(config.start_timeout_s, "sandbox.start_timeout_s", what):
                await sandbox._exchange({"do": "hello"}, b"")
        except (SandboxLostError, TimeoutError) as error:
            await sandbox.stop()
            said = await sandbox._last_words()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{error} {said}".strip()) from error
            raise unavailable(config, launcher, said or "it ended at once") from error
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    @property
    def is_lost(self) -> bool:
        return self._is_lost or self._process.returncode is not None

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = HOME,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        most: int = MAX_OUTPUT_BYTES,
    ) -> Outcome:
        """Run a command. What it leaves running goes on until a limit is reached, or the sandbox stops.

        Args:
            argv: The program and its arguments.
            stdin: The text that it reads.
            cwd: The folder that it begins in.
            env: Environment variables besides PATH, HOME and LANG.
            timeout_s: Its deadline, at most sandbox.timeout_s where that is None.
            most: The bytes that are kept of its output, and as many of its errors; at most MAX_FILE_BYTES.

        Raises:
            SandboxLostError: The sandbox is gone, or does not answer.
        """
        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        request = {
            "do": "exec",
            "argv": list(argv),
            "cwd": cwd,
            "env": {**ENVIRONMENT, **(env or {})},
            "timeout_s": timeout_s,
            "most": most,
        }
        answer, output = await self._ask(request, stdin, timeout_s + self.config.answer_timeout_s)
        if "error" in answer:
            raise SandboxLostError(f"a sandbox cannot run {argv[0]}: {answer['error']}")
        limit = None if answer["limit"] is None else Limit(answer["limit"])
        return Outcome(
            exit_code=answer["exit_code"],
            stdout=output[: answer["sizes"][0]],
            stderr=output[answer["sizes"][0] :],
            limit=limit,
            is_cut=answer["is_cut"],
            why="" if limit is None else limit.text(self.config, timeout_s),
        )

    async def read_file(self, path: str, *, most: int = MAX_FILE_BYTES) -> bytes:
        """Return the content of a file of at most so many bytes. A link is not followed.

        Raises:
            SandboxFileError: It is no plain file, or longer.
            SandboxLostError: As in `exec`.
        """
        answer, content = await self._ask({"do": "read", "path": path, "most": most}, b"")
        return _checked(content, answer, path)

    async def write_file(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Write a file, and make its folders. Raises as `read_file` does."""
        if len(content) > MAX_FILE_BYTES:
            raise SandboxFileError(f"{path}: has {len(content)} bytes, and at most {MAX_FILE_BYTES} are written")
        answer, _ = await self._ask({"do": "write", "path": path, "mode": mode}, content)
        _checked(b"", answer, path)

    async def clear(self, *folders: str) -> None:
        """End all that runs in it, and empty folders of `FOLDERS`, whatever was put in their places.

        Raises:
            SandboxFileError: What ran there does not let them be emptied.
            SandboxLostError: As in `exec`.
        """
        answer, _ = await self._ask({"do": "clear", "names": folders}, b"")
        _checked(b"", answer, ", ".join(folders))

    async def renew(self) -> None:
        """End all that runs in it, and remove all files. Raises SandboxLostError, also where a file stays."""
        answer, _ = await self._ask({"do": "renew"}, b"")
        if "error" in answer:
            raise SandboxLostError(f"a sandbox cannot be emptied: {answer['error']}")

    async def stop(self) -> None:
        """End it, with all that runs in it and all its files. One that does not end in time is killed."""
        self._lose()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.answer_timeout_s):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
            async with within(END_S, "END_S", "the end of a sandbox that was killed"):
                await self._process.wait()
            if self.config.backend is SandboxBackend.harbor:  # with the others, the kernel ends all
                late = f"did not end within sandbox.answer_timeout_s={self.config.answer_timeout_s:g}"
                logger.warning("a sandbox of Harbor %s, and may be left behind: %s", late, await self._last_words())
        await self._last_words()  # so that nothing of it is left

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _ask(
        self, request: dict[str, Any], content: bytes, deadline_s: float | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request, by default within sandbox.answer_timeout_s."""
        deadline_s = self.config.answer_timeout_s if deadline_s is None else deadline_s
        async with self._one:
            if self.is_lost:
                raise SandboxLostError("the sandbox is gone")
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._exchange(request, content)
            except TimeoutError:
                self._lose()
                raise SandboxLostError(f"a sandbox did not answer within {deadline_s:g} s, and was ended") from None
            except SandboxLostError as error:
                self._lose()
                raise SandboxLostError(f"{error} {await self._last_words()}".strip()) from error
            except BaseException:
                self._lose()  # the answer to this request would be taken for that to the next
                raise

    async def _exchange(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes]:
        reader, writer = self._process.stdout, self._process.stdin
        header = json.dumps(request | {"size": len(content)}).encode()
        try:
            writer.write(HEADER.pack(len(header)) + header + content)
            await writer.drain()
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            if size > MAX_ANSWER_BYTES:
                raise SandboxLostError(f"a sandbox has answered with {size} bytes")
            answer = json.loads(await reader.readexactly(size))
            if answer["size"] > 2 * MAX_FILE_BYTES:
                raise SandboxLostError(f"a sandbox has answered with {answer['size']} bytes")
            return answer, await reader.readexactly(answer["size"])
        except (OSError, asyncio.IncompleteReadError) as error:
            raise SandboxLostError("the sandbox has ended") from error

    def _lose(self) -> None:
        """Close stdin, which ends process 1 and with it all others. It is not killed: with Harbor, it cleans up."""
        self._is_lost = True
        self._process.stdin.close()

    async def _listen(self) -> None:
        while part := await self._process.stderr.read(MAX_SAID_BYTES):
            self._said = (self._said + part)[-MAX_SAID_BYTES:]

    async def _last_words(self) -> str:
        """Return the end of what the program that has started the sandbox has written to stderr. It has ended, or is
        about to."""
        await asyncio.wait({self._listening}, timeout=SAID_S)
        self._listening.cancel()
        return self._said.decode(errors="replace").strip()


def _checked(content: bytes, answer: dict[str, Any], path: str) -> bytes:
    if "error" in answer:
        raise SandboxFileError(f"{path}: {answer['error']}")
    return content
