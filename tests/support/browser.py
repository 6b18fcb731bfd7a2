"""A real headless Chromium, driven by its own protocol (DevTools) over a websocket."""

import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S, WAIT_S = 60.0, 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Tab:
    """Example: tab.open(url); tab.wait("document.title !== ''"); assert tab.errors == []"""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        """Exceptions, errors on the console, refused by the policy, and failed loads."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, most_s: float = WAIT_S) -> None:
        """Until it is true."""
        until = time.monotonic() + most_s
        while not self.evaluate(expression):
            text = self.evaluate("document.body ? document.body.innerText.slice(0, 500) : ''")
            assert time.monotonic() < until, f"{expression} is not true; errors: {self.errors}; the page says: {text}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Load it anew."""
        self.leave()
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def leave(self) -> None:
        """Open nothing: a page that asks for news asks no more."""
        self.call("Page.navigate", url="about:blank")

    def press(self, key: str) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def mouse(self, what: str, x: float, y: float, **more: Any) -> None:
        """`what`: mouseMoved, mousePressed, mouseReleased or mouseWheel, as the protocol has them."""
        button = {} if what in ("mouseMoved", "mouseWheel") else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=what, x=x, y=y, **button, **more)
        self.evaluate("new Promise(requestAnimationFrame)")


@contextmanager
def opened_browser(folder: Path) -> Iterator[Tab]:
    """`folder`: of its own, for the profile."""
    path = find_browser()
    assert path is not None
    command = [path, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            port = _port(folder / "DevToolsActivePort", process)
            targets = httpx.get(f"http://127.0.0.1:{port}/json").json()
            page = next(target for target in targets if target["type"] == "page")
            with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()


def _port(path: Path, process: subprocess.Popen[bytes]) -> int:
    until = time.monotonic() + START_S
    while not (path.exists() and path.read_text().strip()):
        assert process.poll() is None and time.monotonic() < until, "Chromium does not start"
        time.sleep(0.05)
    return int(path.read_text().split()[0])
