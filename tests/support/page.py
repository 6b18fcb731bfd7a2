"""The page of a run in a browser: served by the real command, its screens, its first paint."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.browser import Tab
from tests.support.paths import ROOT

SCREENS = (
    "pulse",
    "timeline",
    "anatomy",
    "groups",
    "trajectory",
    "fleet",
    "files",
    "compare",
    "metrics",
    "evaluations",
    "runs",
)


@contextmanager
def served(runs: Sequence[Path]) -> Iterator[str]:
    """The address of the page of these runs."""
    command = [sys.executable, "-m", "scripts.dashboard", *(f"run={run}" for run in runs), "port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rpartition(" ")[2].strip()
        finally:
            process.terminate()


def show(tab: Tab, address: str, screen: str) -> str:
    """Load a screen, wait until it is whole, and return its text. `screen`: with parameters, as "groups?step=8"."""
    tab.open(f"{address}#{screen}")
    wait_for(tab, screen)
    return tab.evaluate("document.getElementById('main').textContent")


def wait_for(tab: Tab, screen: str) -> None:
    """Wait until the whole of it is shown."""
    name = screen.partition("?")[0]
    tab.wait(f"document.body.dataset.screen === '{name}' && document.getElementById('main').ariaBusy === 'false'")


def first_paint(tab: Tab, address: str) -> tuple[float, float]:
    """Milliseconds from the start of the navigation to the first paint with content in it, and until the screen that
    opens first is whole, by the browser's own clock."""
    tab.open(address)
    tab.wait("performance.getEntriesByName('shown').length > 0")
    tab.wait("performance.getEntriesByName('first-contentful-paint').length > 0")
    paint, shown = (
        float(tab.evaluate(f"performance.getEntriesByName('{name}')[0].startTime"))
        for name in ("first-contentful-paint", "shown")
    )
    return paint, shown
