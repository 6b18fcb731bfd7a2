"""The simulated engine keeps the contract of `engines.base.Engine`: every token carries the version that sampled it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engines.simulated import EngineDiedError
from rollout.types import Completion
from tests.support.fakes import (
    AsyncTest,
    ClockedEngine,
    as_test,
    make_request,
    now,
    settle,
    start,
    update_engine,
)


def on_engine(max_num_seqs: int = 8, swap_s: float = 0.0) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(engine, ...)`, on an engine that serves version 0."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[ClockedEngine]]:
        engine = ClockedEngine(max_num_seqs, swap_s)
        await update_engine(engine, 0)
        yield (engine,)

    return partial(as_test, 1, given)


async def stop(engine: ClockedEngine, clear_cache: bool = False) -> None:
    await engine.admission.hold()
    await engine.freeze(clear_cache)


async def go_on(engine: ClockedEngine) -> float:
    frozen_s = await engine.thaw()
    engine.admission.release()
    return frozen_s


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.tuples(st.floats(0, 8), st.integers(1, 8)), min_size=1, max_size=5),
    waits=st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), max_size=6),
    max_num_seqs=st.integers(1, 4),
    swap_s=st.sampled_from([0.0, 0.7]),
)
def test_every_token_is_of_the_version_that_was_live_when_its_step_began(
    starts: list[tuple[float, int]], waits: list[tuple[float, float]], max_num_seqs: int, swap_s: float
) -> None:
    async def test(engine: ClockedEngine) -> None:
        async def generate_later(name: str, delay: float, num_tokens: int) -> tuple[Completion, int]:
            await asyncio.sleep(delay)
            completion = await engine.generate(make_request(name, num_tokens))
            return completion, len(engine.step_versions)

        tasks = [asyncio.create_task(generate_later(f"{index}", *spec)) for index, spec in enumerate(starts)]
        for version, (delay, paused_s) in enumerate(waits, 1):
            await asyncio.sleep(delay)
            await update_engine(engine, version, paused_s)
        for (_, num_tokens), task in zip(starts, tasks, strict=True):
            completion, end = await task
            expected = engine.step_versions[end - num_tokens : end]  # a request that runs gets a token of every step
            assert completion.token_ids.tolist() == expected
            assert [completion.spans[0].start, completion.spans[-1].end] == [0, num_tokens]
            for before, after in zip(completion.spans, completion.spans[1:], strict=False):
                assert before.end == after.start and before.global_steps < after.global_steps
            from_spans = np.concatenate([np.full(s.end - s.start, s.global_steps) for s in completion.spans])
            assert from_spans.tolist() == expected

    on_engine(max_num_seqs, swap_s)(test)()


@on_engine()
async def test_a_pause_right_after_a_resume_freezes(engine: ClockedEngine) -> None:
    """The engine has been woken up but has not run yet."""
    task = start(engine, "a", 2)
    await asyncio.sleep(0.5)
    await stop(engine)
    await settle()
    await go_on(engine)
    await stop(engine)
    await asyncio.sleep(10)
    assert engine.step_starts == [0]
    await go_on(engine)
    assert len((await task).token_ids) == 2


@pytest.mark.parametrize("paused", [False, True])
@on_engine(max_num_seqs=1)
async def test_a_cancelled_request_frees_its_place(engine: ClockedEngine, paused: bool) -> None:
    running, waiting, last = start(engine, "a", 100), start(engine, "b", 100), start(engine, "c", 2)
    await asyncio.sleep(2.5)
    if paused:
        await stop(engine)
    running.cancel()
    waiting.cancel()
    await asyncio.wait([running, waiting])
    if paused:
        await go_on(engine)
    assert len((await last).token_ids) == 2
    assert now() == 5  # the step that was under way, and two more


@pytest.mark.parametrize("paused", [False, True])
@on_engine(max_num_seqs=2)
async def test_a_killed_engine_fails_every_request_now_and_later(engine: ClockedEngine, paused: bool) -> None:
    watcher = asyncio.create_task(engine.wait_dead())
    tasks = [start(engine, name, 5) for name in "abc"]
    await asyncio.sleep(1.5)
    if paused:
        await stop(engine)
    assert not watcher.done()
    engine.kill()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDiedError] * 3
    assert isinstance(await watcher, EngineDiedError)
    with pytest.raises(EngineDiedError):
        await engine.generate(make_request("d", 1))
    engine.kill()  # twice is once


@on_engine()
async def test_it_refuses_what_it_cannot_do(engine: ClockedEngine) -> None:
    request = make_request("r", 3)
    with pytest.raises(ValueError, match="the simulated engine has no texts"):
        await engine.generate(replace(request, sampling=replace(request.sampling, stop=("END",))))
