"""Threads for rewards that are plain functions, kept between calls: to start one costs more than a simple reward."""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

MAX_IDLE = 8


class RewardThreads:
    """Work never waits for a thread that is busy, but gets another. So a thread whose work never ends is left behind;
    it does not keep the process from ending."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Callable[[], None]]] = deque()  # what each idle thread takes its work from

    def run(self, work: Callable[[], None]) -> None:
        """`work` must not raise."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            threading.Thread(target=self._serve, args=(inbox,), name="reward", daemon=True).start()
        inbox.put(work)

    def _serve(self, inbox: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            inbox.get()()
            if len(self._idle) >= MAX_IDLE:
                return
            self._idle.append(inbox)
