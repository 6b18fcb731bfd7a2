"""What makes every test run cheaper: one thread of torch, and no garbage collection while the tests are imported."""

import gc
import os
from collections.abc import Generator

import pytest

# Before torch is imported. As in every process of a run; two test processes on two cores would spin for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make millions of objects and hardly any garbage: collections among them took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what is imported stays: no later collection looks at it again
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # the interpreter ends as always
