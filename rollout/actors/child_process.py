"""Programs that an event loop starts and talks to, without a fork of this process.

uvloop, on which Ray runs async actors, forks for `asyncio.create_subprocess_exec`: the copy has the locks of all
threads as they were, and runs Python before it becomes the program, while this process waits for it and holds the
interpreter's lock. Where the copy waits for a lock that no thread of its own holds, both stand still for good.
`subprocess` starts programs by vfork, and runs nothing in between.
"""

import asyncio
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any


class ChildProcess:
    """A program that was started, with pipes for its streams.

    Example:
        process = await ChildProcess.start("cat")
        process.stdin.write(b"hello")
        process.stdin.close()
        assert await process.stdout.read() == b"hello" and await process.wait() == 0
    """

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ):
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._popen = popen
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        threading.Thread(target=self._await_end, name=f"end of process {popen.pid}", daemon=True).start()

    @classmethod
    async def start(cls, *argv: str | bytes, **options: Any) -> "ChildProcess":
        """Start a program. `options`: those of `subprocess.Popen`, but for streams and `preexec_fn`.

        Raises OSError and ValueError where the system does not take it.
        """
        pipe = subprocess.PIPE
        # Here, not in another thread: bwrap's --die-with-parent means the thread that has started it.
        popen = subprocess.Popen[bytes](argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, **options)
        try:
            return cls(popen, await _writer(popen.stdin), await _reader(popen.stdout), await _reader(popen.stderr))
        except BaseException:
            popen.kill()
            popen.wait()
            for stream in (popen.stdin, popen.stdout, popen.stderr):
                assert stream is not None
                stream.close()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for the signal that has ended it. None: it runs."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Return the exit code once the program has ended. Others may still hold its streams."""
        await self._ended.wait()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def kill(self) -> None:
        """Send SIGKILL. A program that has ended gets none."""
        self._popen.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM. A program that has ended gets none."""
        self._popen.send_signal(signal.SIGTERM)

    def _await_end(self) -> None:
        self._popen.wait()
        with suppress(RuntimeError):  # the event loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._ended.set)


async def _writer(stream: Any) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), stream
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _reader(stream: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: _UntilTheEnd(reader), stream)
    return reader


class _UntilTheEnd(asyncio.StreamReaderProtocol):
    """Closes the pipe at its end, where a socket would stay open for what is still to be written."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False
