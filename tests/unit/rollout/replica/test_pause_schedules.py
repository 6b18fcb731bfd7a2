"""Pauses, resumes, aborts and updates of one engine at any moment, side by side, some of them given up by their caller.

None may wait for ever, and after a whole update and a resume every request gets its answer.
"""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PauseMode
from rollout.replica.pause import PauseConflictError, PauseControl
from rollout.types import Completion
from tests.support.fakes import ClockedEngine, make_request, run_virtual, update_engine

PATIENCE_S = st.sampled_from([0.0, 0.6, 3.0, 1e6])
CALLS = st.one_of(
    st.tuples(st.just("pause"), st.sampled_from(PauseMode), st.booleans()),
    st.tuples(st.just("resume")),
    st.tuples(st.just("abort"), st.sampled_from([None, frozenset({"0"}), frozenset({"1", "2"})])),
    st.tuples(st.just("update"), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.5])),
)
MOMENTS_S = st.floats(0, 8).map(lambda seconds: round(2 * seconds) / 4)  # many at once, and between steps


class TornError(Exception):
    """An update that failed half-way."""


async def call(control: PauseControl, name: str, *args: object) -> None:
    match name, args:
        case "pause", [PauseMode() as mode, bool(clear_cache)]:
            await control.pause(mode, clear_cache)
        case "resume", []:
            await control.resume()
        case "abort", [None | frozenset() as request_ids]:
            await control.abort(request_ids)
        case "update", [bool(torn), bool(interrupts), float(seconds)]:
            async with control.update_window(False, [].extend if interrupts else None) as window:
                window.torn = True
                await asyncio.sleep(seconds)
                if torn:
                    raise TornError
                window.torn = False
        case _:
            raise AssertionError(name)


async def call_at(control: PauseControl, moment_s: float, patience_s: float, what: tuple[object, ...]) -> None:
    await asyncio.sleep(moment_s)
    try:
        async with asyncio.timeout(patience_s):
            await call(control, *what)  # pyright: ignore
    except TimeoutError as error:
        assert not str(error), "the caller's, and none of the engine's own deadlines"
    except (PauseConflictError, TornError):
        pass


async def generate_at(engine: ClockedEngine, moment_s: float, name: str, num_tokens: int) -> Completion:
    await asyncio.sleep(moment_s)
    return await engine.generate(make_request(name, num_tokens))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(MOMENTS_S, st.integers(1, 6)), max_size=5),
    calls=st.lists(st.tuples(MOMENTS_S, PATIENCE_S, CALLS), max_size=8),
    max_num_seqs=st.integers(1, 3),
)
def test_every_schedule(
    requests: list[tuple[float, int]], calls: list[tuple[float, float, tuple[object, ...]]], max_num_seqs: int
) -> None:
    async def main() -> None:
        engine = ClockedEngine(max_num_seqs)
        await update_engine(engine, 0)
        control = PauseControl(engine, timeout_s=30)
        tasks = [
            asyncio.create_task(generate_at(engine, moment_s, f"{index}", num_tokens))
            for index, (moment_s, num_tokens) in enumerate(requests)
        ]
        await asyncio.gather(*(call_at(control, *what) for what in calls))
        if control.paused:
            num_steps = len(engine.step_starts)
            await asyncio.sleep(20)
            assert len(engine.step_starts) == num_steps, "paused is frozen"
        else:
            await asyncio.gather(*tasks)
        await call(control, "update", False, False, 0.0)
        await control.resume()
        for (_, num_tokens), task in zip(requests, tasks, strict=True):
            completion = await task
            length = len(completion.token_ids)
            assert completion.finish_reason == ("stop" if length == num_tokens else "abort")
        assert len((await engine.generate(make_request("later", 2))).token_ids) == 2
        await control.pause(PauseMode.keep)  # and no release too many: it can still be held
        frozen = asyncio.create_task(engine.generate(make_request("frozen", 2)))
        await asyncio.sleep(20)
        assert not frozen.done()
        await control.resume()
        assert len((await frozen).token_ids) == 2

    run_virtual(main())
