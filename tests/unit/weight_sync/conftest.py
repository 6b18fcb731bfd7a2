"""Shared between the tests of the transports: a folder in the place of shared memory."""

from pathlib import Path

import pytest

from tests.support.transport_cases import local_store  # noqa: F401  (a fixture)
from weight_sync.transports import cleanup


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which weights are published."""
    monkeypatch.setattr(cleanup, "DIRECTORY", tmp_path)
    return tmp_path
