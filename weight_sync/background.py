"""Work in a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(name: str, call: Callable[[], T]) -> Future[T]:
    """Call it in a daemon thread, which a process does not wait for at its end as it does for an executor's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # for whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
