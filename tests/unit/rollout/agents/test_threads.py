"""Blocking code in threads: bounded, with a deadline, and never a reason for the event loop to stop."""

import asyncio
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rollout.agents import threads
from rollout.agents.threads import called, in_thread


def run(call: Callable[[], Any], timeout_s: float = 5.0) -> Any:
    return asyncio.run(called(call, timeout_s, "some_key", "the call"))


async def awaits(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_a_plain_function_runs_in_a_thread_and_an_async_one_on_the_event_loop() -> None:
    assert run(threading.current_thread).name == "the call"
    assert run(partial(awaits, 3)) == 3
    assert run(lambda: awaits(4)) == 4, "one that returns an awaitable is awaited"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no"), ValueError("no")),
        (SystemExit(2), RuntimeError("SystemExit: 2")),
        (StopIteration(7), RuntimeError("StopIteration: 7")),
        (asyncio.CancelledError("me"), RuntimeError("CancelledError: me")),
    ],
)
def test_what_it_raises_is_raised(error: BaseException, expected: Exception) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(type(expected)) as raised:
        run(fails)
    assert str(raised.value) == str(expected)


@pytest.mark.parametrize("call", [lambda: asyncio.sleep(9), threading.Event().wait], ids=["async", "plain"])
def test_a_call_has_a_deadline(call: Callable[[], Any]) -> None:
    with pytest.raises(TimeoutError, match="the call took longer than some_key=0.05"):
        run(call, timeout_s=0.05)


def test_calls_beyond_the_threads_wait_and_an_abandoned_one_keeps_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_THREADS", 2)
    may_end, most, running = threading.Event(), 0, 0
    lock = threading.Lock()

    def counted() -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    async def scenario() -> None:
        await asyncio.gather(*(in_thread(counted, 5.0, "key", "a call") for _ in range(10)))
        hangs = [in_thread(may_end.wait, 0.05, "key", "a call that hangs") for _ in range(2)]
        assert all(
            isinstance(outcome, TimeoutError) for outcome in await asyncio.gather(*hangs, return_exceptions=True)
        )
        with pytest.raises(TimeoutError, match="waiting for one of 2 threads for a call took longer than key=0.05"):
            await in_thread(counted, 0.05, "key", "a call")
        may_end.set()
        await in_thread(counted, 5.0, "key", "a call")

    asyncio.run(scenario())
    assert most == 2


def test_a_call_that_outlives_its_event_loop_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    may_end = threading.Event()
    with pytest.raises(TimeoutError):
        asyncio.run(in_thread(may_end.wait, 0.01, "key", "outlives the loop"))
    (thread,) = [each for each in threading.enumerate() if each.name == "outlives the loop"]
    may_end.set()
    thread.join(5)
    assert not thread.is_alive() and thread.daemon
    sys.stderr.flush()
    assert capfd.readouterr().err == ""


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_start_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_THREADS", 1)

    async def scenario() -> int:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
            patch.setattr(threading.Thread, "start", no_more_threads)
            await in_thread(lambda: 1, 5.0, "key", "a call")
        return await in_thread(lambda: 2, 5.0, "key", "a call")

    assert asyncio.run(scenario()) == 2
