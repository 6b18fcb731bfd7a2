"""Marks all tests here: they need hosts in namespaces, and take minutes."""

from pathlib import Path

import pytest

from tests.support.bed import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.is_relative_to(HERE)]
    reason = missing() if own else None
    for item in own:
        if item.get_closest_marker("nightly") is None:
            item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.cluster)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
