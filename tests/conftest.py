"""What makes every test run cheaper: one thread of torch, no garbage collection among imports, and a short end. And
what keeps tests out of the home of the person who runs them."""

import atexit
import gc
import inspect
import os
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import settings

from rollout.engines.virtual_clock import run_virtual

# Before torch is imported. As in every process of a run; two test processes on two cores would spin for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Ray starts. It would give its actors a niceness of 15, and the other test process would leave them no time.
os.environ.setdefault("RAY_worker_niceness", "0")

# What an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

SHARES_ENGINES = "tests/system/rollout/engines/"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Registered first, so that it runs last: all that is left is to free what was imported, which takes two seconds.
    atexit.register(os._exit, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports make millions of objects and hardly any garbage: collections among them took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # what is imported stays: no later collection looks at it again
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Give the tests that share an engine to one process: every other process would start an engine of its own, which
    takes half a minute. All other tests are divided by file, as `--dist loadfile` says."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SHARES_ENGINES if nodeid.startswith(SHARES_ENGINES) else super()._split_scope(nodeid)

    return ByFileOrEngine(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are coroutines run on the virtual clock."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run_virtual(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no slow test after the time that CI names, where a slow machine would not come to its end."""
    until = float(os.environ.get("SLOW_TESTS_BEGIN_UNTIL", "inf"))
    if time.time() > until and item.get_closest_marker("slow") is not None:
        pytest.skip("no time is left for it: SLOW_TESTS_BEGIN_UNTIL is over")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the files that commands remember for a user, such as tokens of the dashboard, out of the real home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(gc.unfreeze)  # after pytest's own last collections: the interpreter ends as always
