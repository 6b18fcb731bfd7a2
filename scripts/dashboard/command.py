"""Shows a run in a browser: `make dashboard`, `python -m scripts.dashboard [run=FOLDER] [port=0] [--export FILE]`.

    run=FOLDER          a folder of a run, of one that goes on too; give it twice to compare two [the newest in runs/]
    port=0              where to listen on 127.0.0.1; 0 takes a free port
    --export FILE.html  write the run, with the predictor's advice, into one file that needs no server, and stop
    --with-parent       end when standard input ends, as `dashboard=true` of a run wants it

It only reads files, in a process of its own: a run never waits for it, and one that was killed or copied opens like
one that goes on. It prints its address; who has not got the token in it gets nothing. Ctrl-C ends it.
"""

import asyncio
import logging
import secrets
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.serve import ServeConfig
from configs.validate import ConfigError
from scripts.dashboard.runs import DashboardError, checked_run, newest_run

HOST = "127.0.0.1"
RUNS = Path("runs")
WITH_PARENT = "--with-parent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    runs: tuple[Path, ...]
    port: int = 0
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
    except (DashboardError, ConfigError, OSError) as error:
        sys.exit(f"dashboard error: {error}")


def parsed(words: Sequence[str]) -> Options:
    """Raises DashboardError, which names the key, the value and what is allowed."""
    runs: list[Path] = []
    port, export, left = 0, None, [word for word in words if word != WITH_PARENT]
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        if word == "--export" and left:
            export = Path(left.pop(0))
        elif key == "--export" and value:
            export = Path(value)
        elif key == "run" and value:
            runs.append(checked_run(value))
        elif key == "port" and equals:
            if not value.isdecimal() or int(value) > 65535:
                raise DashboardError(f"port={value}: must be a whole number from 0 to 65535")
            port = int(value)
        else:
            raise DashboardError(f"{word}: must be run=FOLDER, port=NUMBER or --export FILE.html")
    return Options(runs=tuple(runs) or (newest_run(RUNS),), port=port, export=export, with_parent=WITH_PARENT in words)


def write_report(runs: Sequence[Path], output: Path) -> None:
    from scripts.dashboard.export import report
    from scripts.dashboard.prediction import Predictor

    output.write_text(report(list(runs), Predictor()), encoding="utf-8")
    sys.stdout.write(f"{output}: {output.stat().st_size / 1e6:.1f} MB\n")


async def serve_dashboard(options: Options) -> None:
    """Serves until it is cancelled. Raises ConfigError where the port is taken."""
    from rollout.http.access import Access
    from rollout.http.server import listen, serve, url_of
    from scripts.dashboard.answers import Answers
    from scripts.dashboard.app import TokenInPath, dashboard_app
    from scripts.dashboard.prediction import Predictor

    try:
        listener = listen(HOST, options.port)
    except ConfigError as error:
        raise ConfigError(str(error).replace("serve.", "")) from error
    token = secrets.token_urlsafe(24)
    limits = ServeConfig(host=HOST, port=options.port)
    if options.with_parent:
        _end_with_standard_input()
    sys.stdout.write(f"dashboard of {options.runs[0]}: {url_of(listener)}/{token}/\n")
    sys.stdout.flush()
    app = TokenInPath(dashboard_app(Answers(list(options.runs), Predictor())), token)
    await serve(app, listener, limits, Access.of(limits, None, on_loopback=True))


def _end_with_standard_input() -> None:
    """Cancel this task when the other end of standard input is closed."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def wait() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(task.cancel)

    threading.Thread(target=wait, daemon=True).start()
