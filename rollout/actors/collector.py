"""Python's garbage collector in processes with an event loop, which it holds up."""

import gc

RARELY = 1000
"""Collections of the middle generation between two of everything; Python's own is 10."""


def keep_what_is_loaded() -> None:
    """Leave what was imported out of all later collections: to walk it takes as long as hundreds of requests."""
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Collect everything a hundred times less often. With 256 sessions that takes 0.1 s each time; what dies young, or
    is in no cycle, is freed as ever."""
    keep_what_is_loaded()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, RARELY)
