"""Pictures of the page's screens by a real headless Chromium: `python -m tests.support.screenshots RUN OUTPUT`."""

import argparse
import base64
import sys
import tempfile
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.support.browser import Tab, opened_browser
from tests.support.page import SCREENS, served, show

COLOURS = 256
"""Of a picture: it takes a third of the bytes."""


def main(words: Sequence[str]) -> None:
    given = parsed(words)
    width, height = map(int, given.size.split("x"))
    given.output.mkdir(parents=True, exist_ok=True)
    runs = [given.run, *given.compare]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        served(runs) as page,
        opened_browser(Path(profile)) as tab,
    ):
        for scheme in given.schemes.split(","):
            tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            for screen in given.screens.split(","):
                resize(tab, width, height)
                show(tab, page, screen)
                settle(tab, given.settle)
                assert tab.errors == [], tab.errors
                if given.do:
                    tab.evaluate(given.do)
                if given.tall:
                    resize(tab, width, tab.evaluate("document.documentElement.scrollHeight"))
                path = given.output / f"{screen.partition('?')[0]}{'' if scheme == 'light' else '-' + scheme}.png"
                write(path, base64.b64decode(tab.call("Page.captureScreenshot", format="png")["data"]))
                sys.stdout.write(f"{path}: {path.stat().st_size / 1e3:.0f} kB\n")


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.screenshots", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("output", type=Path, help="folder of the pictures")
    parser.add_argument("--compare", type=Path, action="append", default=[], help="another run")
    parser.add_argument(
        "--screens", default=",".join(SCREENS), help="of the page, with parameters after a ? if need be"
    )
    parser.add_argument("--schemes", default="light,dark")
    parser.add_argument("--size", default="1280x800", help="of the window")
    parser.add_argument("--tall", action="store_true", help="the whole screen, however long it is")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds that a screen has to ask for more")
    parser.add_argument("--do", default="", help="JavaScript before the picture, such as a click")
    return parser.parse_args(words)


def resize(tab: Tab, width: int, height: int) -> None:
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    settle(tab)


def settle(tab: Tab, seconds: float = 1.0) -> None:
    """Canvases are drawn anew when their width changes."""
    time.sleep(seconds)
    tab.evaluate("new Promise(requestAnimationFrame)")


def write(path: Path, png: bytes) -> None:
    Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
