"""Show runs in a browser: `slipstream dashboard [FOLDER] [run=FOLDER] [port=7788] [--export FILE]`.

    FOLDER, run=FOLDER  a run, live or ended, or a folder of runs; name two to compare them [runs/]
    port=7788           the port on 127.0.0.1 to listen on; 0 takes a free one [7788, or the next free one]
    --export FILE.html  write the run into one file that needs no server, and stop
    --with-parent       end when standard input ends, as a run with `dashboard=true` wants it

One page shows all runs of a folder. The dashboard only reads files, in a process of its own: a run never waits for it,
and the folder of a run that was killed or copied opens like any other. It prints its address, with a token without
which it answers nothing. The token of a port is the same every time, so that a bookmark works. Ctrl-C ends the
dashboard.
"""

import asyncio
import logging
import os
import re
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from configs.serve import ServeConfig
from configs.validate import ConfigError
from scripts.observe.files import RunError
from scripts.observe.run import is_run, newest_run, run_folder, runs_in

HOST = "127.0.0.1"
PORT = 7788
"""The port unless another one is chosen."""
PORTS_TRIED = 20
"""The number of ports from PORT on that are tried before any free one is taken."""
RUNS = Path("runs")
WITH_PARENT = "--with-parent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    runs: tuple[Path, ...]
    """The runs that are shown first."""
    roots: tuple[Path, ...] = ()
    """The folders whose runs are shown, too."""
    port: int | None = None
    """None: PORT, or the next free one."""
    export: Path | None = None
    with_parent: bool = False


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(words):
        sys.stdout.write(__doc__ or "")
        return
    try:
        options = parsed(words)
        if options.export is not None:
            write_report(options.runs, options.export)
        else:
            asyncio.run(serve_dashboard(options))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stdout.write("stopped\n")
    except (RunError, ConfigError, OSError) as error:
        sys.exit(f"dashboard error: {error}")


def parsed(words: Sequence[str]) -> Options:
    """Read the command line. Raises RunError, which names the key, the value and what is allowed."""
    folders: list[str] = []
    port, export, left = 0, None, [word for word in words if word != WITH_PARENT]
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        if word == "--export" and left:
            export = Path(left.pop(0))
        elif key == "--export" and value:
            export = Path(value)
        elif key == "run" and value:
            folders.append(value)
        elif not equals and not word.startswith("-"):
            folders.append(word)
        elif key == "port" and equals:
            if not value.isdecimal() or int(value) > 65535:
                raise RunError(f"port={value}: must be a whole number from 0 to 65535")
            port = int(value)
        else:
            raise RunError(f"{word}: must be FOLDER, run=FOLDER, port=NUMBER or --export FILE.html")
    runs, roots = _runs_and_roots(folders)
    return Options(runs=runs, roots=roots, port=port, export=export, with_parent=WITH_PARENT in words)


def _runs_and_roots(texts: Sequence[str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the runs that these folders name, the newest one of a folder of runs, and the folders of runs."""
    runs, roots = list[Path](), list[Path]()
    for text in texts:
        folder = Path(text).expanduser()
        if not is_run(folder) and folder.is_dir() and runs_in(folder):
            roots.append(folder.resolve())
            runs.append(newest_run(folder))
        else:
            runs.append(run_folder(text))
    if not runs:
        return (newest_run(RUNS),), (RUNS.resolve(),)
    return tuple(dict.fromkeys(runs)), tuple(roots)


def write_report(runs: Sequence[Path], output: Path) -> None:
    from scripts.dashboard.export import report

    output.write_text(report(list(runs)), encoding="utf-8")
    size = output.stat().st_size / 1e6
    sys.stdout.write(f"{output}: {size:.1f} MB; its advice comes from the rules; `make predict` asks the predictor\n")


async def serve_dashboard(options: Options) -> None:
    """Serve until cancelled. Raises ConfigError if the port is taken."""
    from rollout.http.access import Access
    from rollout.http.server import listener_url, serve
    from scripts.dashboard.app import TokenInPath, dashboard_app
    from scripts.dashboard.prediction import Predictor
    from scripts.dashboard.routes import Routes

    listener, note = _listener(options.port)
    port = listener.getsockname()[1]
    token = _new_token() if options.port == 0 else stable_token(port)
    limits = ServeConfig(host=HOST, port=port)
    if options.with_parent:
        _end_with_standard_input()
    sys.stdout.write(f"dashboard of {options.runs[0]}{note}: {listener_url(listener)}/{token}/\n")
    sys.stdout.flush()
    app = TokenInPath(dashboard_app(Routes(options.runs, Predictor(), options.roots)), token)
    await serve(app, listener, limits, Access.of(limits, None, on_loopback=True))


def _listener(port: int | None) -> tuple[socket.socket, str]:
    """Return a listener at the port, or at PORT or the next free one, and what to say of another than PORT."""
    from rollout.http.server import listen

    note = ""
    for candidate in (port,) if port is not None else (*range(PORT, PORT + PORTS_TRIED), 0):
        try:
            listener = listen(HOST, candidate)
        except ConfigError as error:
            taken = f"port {candidate} is taken"
            if not _is_ours(candidate):
                # Whoever listens there reads the token in the address of a bookmark, and could use it later.
                with suppress(NotADirectoryError, RuntimeError):  # no home folder: no token was kept
                    _token_path(candidate).unlink(missing_ok=True)
                taken += (
                    " by a process that is not yours: a bookmark of it shows that process your token, which is no "
                    "longer valid"
                )
            if port is not None:
                raise ConfigError(f"{str(error).replace('serve.', '')}; {taken}") from error
            note = note or f" ({taken})"
            continue
        return listener, note
    raise ConfigError(f"host={HOST}: no port can be listened on")


def _is_ours(port: int) -> bool:
    """Return whether the processes that listen on the port are all of this user; False if that cannot be known."""
    owners = set[int]()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):  # not on Linux, or no IPv6
            rows = [line.split() for line in table.read_text().splitlines()[1:]]
            # 0A: it listens. The addresses are HOST:PORT in hexadecimal digits.
            owners |= {int(row[7]) for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
    return owners == {os.getuid()}


def _new_token() -> str:
    return secrets.token_urlsafe(24)


def _token_path(port: int) -> Path:
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "slipstream"
    return folder / f"dashboard-{port}.token"


def stable_token(port: int) -> str:
    """Return the token of this user for a port of this machine, which only they can read, or a new one if it cannot be
    kept.

    Remove the file to get another one.
    """
    new = _new_token()
    try:
        path = _token_path(port)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            temporary = path.with_name(f".{path.name}-{os.getpid()}")
            temporary.unlink(missing_ok=True)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(new)
            with suppress(FileExistsError):
                path.hardlink_to(temporary)  # whole from the start, and the first of two processes wins
            temporary.unlink()
        status, text = path.lstat(), path.read_text()
        is_secret = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        return text if is_secret and re.fullmatch(r"[\w-]{32}", text) else new
    except (OSError, RuntimeError, ValueError):  # no home folder, a full disk, a file system without links
        return new


def _end_with_standard_input() -> None:
    """Cancel this task when the other end of standard input is closed."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def wait() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=wait, daemon=True).start()
