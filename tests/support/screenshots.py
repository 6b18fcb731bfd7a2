"""Pictures of the page's screens, by a real headless Chromium: `python -m tests.support.screenshots run=FOLDER OUTPUT`.

run=FOLDER       the run, and another run=FOLDER to compare it with
screens=A,B      of the page, with parameters if need be [all]
schemes=light    or dark, or light,dark [both]
size=1280x900    of the window; tall=true takes the whole screen, however long it is
do=SCRIPT        run in the page before the picture, such as a click
"""

import base64
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.browser import Tab, opened_browser, served

SCREENS = ("pulse", "timeline", "anatomy", "groups", "trajectory", "fleet", "files", "compare")
SETTLE_S = 1.0
"""Live screens ask for more after they are shown."""


def main(words: Sequence[str]) -> None:
    given = [word.partition("=")[::2] for word in words if "=" in word]
    (output,) = [Path(word) for word in words if "=" not in word]
    one = dict(given)
    screens = one.get("screens", ",".join(SCREENS)).split(",")
    width, height = map(int, one.get("size", "1280x900").split("x"))
    output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        served([Path(value) for key, value in given if key == "run"]) as page,
        opened_browser(Path(profile)) as tab,
    ):
        for scheme in one.get("schemes", "light,dark").split(","):
            tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            for screen in screens:
                show(tab, page, screen, width, height)
                if "do" in one:
                    tab.evaluate(one["do"])
                if one.get("tall") == "true":
                    resize(tab, width, tab.evaluate("document.documentElement.scrollHeight"))
                path = output / f"{screen.partition('?')[0]}-{scheme}.png"
                path.write_bytes(base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))
                sys.stdout.write(f"{path}: {path.stat().st_size / 1e3:.0f} kB\n")


def show(tab: Tab, page: str, screen: str, width: int, height: int) -> None:
    resize(tab, width, height)
    tab.open(f"{page}#{screen}")
    name = screen.partition("?")[0]
    tab.wait(f"document.body.dataset.screen === '{name}' && document.getElementById('main').ariaBusy === 'false'")
    tab.evaluate(f"new Promise((done) => setTimeout(done, {1000 * SETTLE_S}))")
    assert tab.errors == [], tab.errors


def resize(tab: Tab, width: int, height: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    tab.evaluate(f"new Promise((done) => setTimeout(done, {1000 * SETTLE_S}))")


if __name__ == "__main__":
    main(sys.argv[1:])
