"""Whatever a reward does, its group gets results in time: on the real clock, since threads know no other."""

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollout.rewards.base import Reward, RewardResult
from rollout.types import Prompt
from tests.support.fakes import make_prompt, now
from tests.support.real_clock import on_real_clock
from tests.support.rewards import CountsCalls, UnprintableError, threaded

TEXTS = ["ab", "c", ""]
NUMBERS = {"ab": np.int64(1), "c": np.float32(0.5), "": np.bool_(False)}


def results(reward: Any, texts: list[str] = TEXTS, timeout_s: float = 30.0) -> list[RewardResult]:
    return asyncio.run(threaded(reward, timeout_s).score([(make_prompt(17), text) for text in texts]))


def outcomes(reward: Any, texts: list[str] = TEXTS, timeout_s: float = 30.0) -> list[float | str | None]:
    """The reward, or the error without the words that name the reward and the prompt."""
    where = "own_reward of prompt 17: "
    return [
        result.reward if result.error is None else result.error.removeprefix(where)
        for result in results(reward, texts, timeout_s)
    ]


# -- what a reward may be ----------------------------------------------------------------------------------------------


def of_length(prompt: Prompt, text: str) -> float:
    assert prompt.ordinal == 17
    return len(text) / 2


async def later(prompt: Prompt, text: str) -> RewardResult:
    await asyncio.sleep(0)
    return RewardResult(reward=len(text) / 2, metrics={"format": np.float32(1)})  # pyright: ignore


class AsyncCallable:
    """`inspect.iscoroutinefunction` says no."""

    async def __call__(self, prompt: Prompt, text: str) -> float:
        return len(text) / 2


def gives_an_awaitable(prompt: Prompt, text: str) -> Awaitable[RewardResult]:
    return later(prompt, text)


@pytest.mark.parametrize(
    "reward",
    [of_length, later, AsyncCallable(), gives_an_awaitable, partial(later), lambda prompt, text: NUMBERS[text]],
)
def test_a_reward_may_be_a_number_a_result_or_either_of_them_later(reward: Reward) -> None:
    scored = results(reward)
    assert [result.reward for result in scored] == [1.0, 0.5, 0.0]
    assert {type(number) for result in scored for number in [result.reward, *result.metrics.values()]} == {float}
    assert results(reward, []) == []


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def reward(prompt: Prompt, text: str) -> float:
        if text == "c":
            raise error
        return 1.0

    return reward


def answers(value: object) -> Any:
    return lambda prompt, text: value if text == "c" else 1.0


raises = raising(ValueError("c is no answer"))
stops = raising(StopIteration())


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("reward", "error"),
    [
        (raises, "ValueError: c is no answer"),
        (raising(SystemExit("by the code under test")), "SystemExit: by the code under test"),
        (stops, "StopIteration: "),
        (raising(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (raising(asyncio.CancelledError("inside")), "CancelledError: inside"),
        (answers(None), "TypeError: a reward must be a finite number, not None"),
        (answers("1.0"), "TypeError: a reward must be a finite number, not '1.0'"),
        (answers((1.0, {})), "TypeError: a reward must be a finite number, not (1.0, {})"),
        (answers(float("nan")), "ValueError: a reward must be a finite number, not nan"),
        (answers(1e39), "ValueError: a reward must be from -1e+30 to 1e+30, not 1e+39"),
        (answers(RewardResult(reward=-np.inf)), "ValueError: a reward must be a finite number, not -inf"),
        (answers(RewardResult(reward="x")), "TypeError: a reward must be a finite number, not 'x'"),  # pyright: ignore
        (answers(RewardResult(reward=1, metrics={"k": None})), "TypeError: the metric k must be"),  # pyright: ignore
        (answers(RewardResult(reward=1, metrics=None)), "AttributeError: "),  # pyright: ignore
        (answers(RewardResult(reward=1, error="sandbox down")), "sandbox down"),
        (answers(RewardResult(reward=1, error=OSError("sandbox down"))), "OSError: sandbox down"),  # pyright: ignore
        (answers(RewardResult(reward=1, error=3)), "TypeError: an error must be text, not 3"),  # pyright: ignore
        (answers(RewardResult(reward=1, answer=18)), "TypeError: an answer must be text, not 18"),  # pyright: ignore
        (raising(UnprintableError()), "UnprintableError, whose text cannot be shown: its __str__ raised RuntimeError"),
        (raising(ValueError("a \ud800")), r"ValueError: a \ud800"),
        (answers(RewardResult(reward=1, error="a \ud800")), r"a \ud800"),
    ],
)
def test_what_goes_wrong_is_the_error_of_its_response_alone(reward: Any, error: str, is_async: bool) -> None:
    async def as_coroutine(prompt: Prompt, text: str) -> Any:
        return reward(prompt, text)

    if is_async and reward is stops:
        error = "RuntimeError: coroutine raised StopIteration"
    first, failed, last = outcomes(as_coroutine if is_async else reward)
    assert (first, last) == (1.0, 1.0)
    assert str(failed).startswith(error)


def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    outcomes(raises)
    [record] = caplog.records
    assert record.getMessage().startswith("own_reward of prompt 17 failed:\nTraceback (most recent call last)")
    assert "line" in caplog.text and "c is no answer" in caplog.text


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@on_real_clock
async def test_a_synchronous_reward_that_hangs_delays_neither_the_others_nor_the_loop(release: threading.Event) -> None:
    def hangs(prompt: Prompt, text: str) -> float:
        if text == "hang":
            release.wait(30)
        return 1.0

    responses = [(make_prompt(0), text) for text in ("a", "hang", "hang", "b")]
    scoring_task = asyncio.create_task(threaded(hangs, 1.5).score(responses))
    ticks = 0
    while not scoring_task.done():
        ticks += 1
        await asyncio.sleep(0)
    late = "own_reward of prompt 0: TimeoutError: took longer than rollout.reward_timeout_s=1.5"
    assert [result.error for result in scoring_task.result()] == [None, late, late, None]
    assert ticks > 10


def test_rewards_that_wait_for_a_thread_have_a_deadline_of_their_own(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.rewards.places.MAX_THREADS", 2)

    def hangs_on_a(prompt: Prompt, text: str) -> float:
        if text == "a":
            release.wait()
        return 1.0

    assert outcomes(hangs_on_a, list("aab"), timeout_s=0.5)[2] == 1.0


@on_real_clock
async def test_responses_of_a_group_that_come_one_by_one_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.places.MAX_THREADS", 2)
    reward = CountsCalls()
    group = threaded(reward).for_group()
    await asyncio.gather(*(group.score([(make_prompt(0), "")]) for _ in range(6)))
    assert reward.most == 2


async def test_an_async_reward_that_hangs_is_given_up_even_if_it_refuses_to_be_cancelled() -> None:
    async def hangs(prompt: Prompt, text: str) -> float:
        for _ in range(3 if text == "c" else 0):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue
        return 1.0

    scored = await threaded(hangs, 60).score([(make_prompt(0), text) for text in TEXTS])
    assert [result.error is None for result in scored] == [True, False, True]
    assert now() == pytest.approx(60)


def test_slow_synchronous_rewards_have_a_thread_each() -> None:
    """Test with rewards that wait for one another."""
    barrier = threading.Barrier(4, timeout=30)

    def meets(prompt: Prompt, text: str) -> float:
        barrier.wait()
        return 1.0

    assert outcomes(meets, list("abcd")) == [1.0] * 4


async def test_slow_async_rewards_run_side_by_side() -> None:
    async def sleeps(prompt: Prompt, text: str) -> float:
        await asyncio.sleep(3600)
        return 1.0

    await threaded(sleeps, 4000).score([(make_prompt(0), "")] * 4)
    assert now() == pytest.approx(3600)


@on_real_clock
async def test_a_cancelled_group_is_cancelled(release: threading.Event) -> None:
    begun = threading.Event()

    def hangs(prompt: Prompt, text: str) -> float:
        begun.set()
        release.wait(30)
        return 1.0

    task = asyncio.create_task(threaded(hangs, 30).score([(make_prompt(0), "a")]))
    await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_reward_whose_thread_cannot_start_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    assert outcomes(of_length, ["ab"]) == ["RuntimeError: can't start new thread"]
