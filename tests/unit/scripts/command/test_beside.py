"""The commands that look at a run, as the run has them beside it."""

import sys
import time
from pathlib import Path

import pytest

from scripts.command.beside import dashboard_beside

TALKS = """#!/bin/sh
echo the address
head -c 300000 /dev/zero | tr '\\0' x >&2
touch {ready}
cat > /dev/null
"""


def test_a_page_that_complains_much_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads is full after 64 KiB, and then the page answers nobody."""
    python, ready = tmp_path / "python", tmp_path / "ready"
    python.write_text(TALKS.format(ready=ready))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    said: list[str] = []
    with dashboard_beside(True, tmp_path, said.append):
        deadline = time.monotonic() + 5
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert said == ["the address"] and ready.exists()
