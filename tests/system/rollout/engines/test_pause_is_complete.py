"""A pause is complete when it returns: on a real engine nothing that was sampled before it arrives after it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from configs.schema import PauseMode, WeightSyncConfig
from rollout.replica.replica import RolloutReplica
from tests.support.engines import BOTH_SCHEDULERS, EngineHost

NUM_STREAMS, LOOK_S = 6, 0.005
PAUSE_S = 0.05
STORY = 300  # tokens: enough that it is not over when a busy machine lets the pause wait for a core
PROMPT = "Write a story about a dragon. Once upon a time"
names = map("stream-{}".format, count())


def replica_of(host: EngineHost) -> RolloutReplica:
    return RolloutReplica("replica-0", host.engine, WeightSyncConfig())


@asynccontextmanager
async def streaming(llm: Any) -> AsyncIterator[list[int]]:
    """Count the tokens that each of some clients receives. When a request ends, its client sends the next one."""
    counts = [0] * NUM_STREAMS
    params = SamplingParams(max_tokens=300, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def client(index: int) -> None:
        while True:
            async for output in llm.generate(PROMPT, params, next(names)):
                counts[index] += len(output.outputs[0].token_ids)

    clients = [asyncio.create_task(client(index)) for index in range(NUM_STREAMS)]
    yield counts
    for task in clients:
        task.cancel()
    await asyncio.wait(clients)


async def late_tokens(host: EngineHost, num_pauses: int) -> tuple[list[int], int]:
    """Pauses and resumes. Returns how many tokens came late, after each pause, and how many came in all."""
    replica, late, chance = replica_of(host), [], random.Random(0)
    async with streaming(host.engine._llm) as counts:
        for _ in range(num_pauses):
            before = sum(counts)
            while sum(counts) == before:
                await asyncio.sleep(0)
            await asyncio.sleep(0.006 * chance.random())  # some steps: it comes anywhere in one
            await replica.pause(PauseMode.keep)
            seen = sum(counts)
            await asyncio.sleep(LOOK_S)
            late.append(sum(counts) - seen)
            await replica.resume()
        return late, sum(counts)


@BOTH_SCHEDULERS
@pytest.mark.parametrize("num_pauses", [30, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_no_token_arrives_after_a_pause_has_returned(host: EngineHost, num_pauses: int) -> None:
    late, in_all = host.run(late_tokens(host, num_pauses))
    assert late == [0] * num_pauses and in_all > num_pauses


async def pause_of_a_story(host: EngineHost) -> tuple[list[float], int]:
    """Pause after the fifth token, as vLLM's own offline example does. Return when each token came, and how many had
    come when the pause returned."""
    replica, times, fifth = replica_of(host), [], asyncio.Event()

    async def generate() -> None:
        params = SamplingParams(max_tokens=STORY, ignore_eos=True)
        async for output in host.engine._llm.generate(PROMPT, params, next(names)):
            times.extend([time.monotonic()] * (len(output.outputs[0].token_ids) - len(times)))
            if len(times) >= 5:
                fifth.set()

    generating = asyncio.create_task(generate())
    await fifth.wait()
    await asyncio.sleep(0.006 * random.random())
    await replica.pause(PauseMode.keep)
    paused_at = len(times)
    await asyncio.sleep(PAUSE_S)
    await replica.resume()
    await generating
    return times, paused_at


@pytest.mark.slow
def test_the_gap_of_a_pause_is_at_its_token(host: EngineHost) -> None:
    for _ in range(10):
        times, paused_at = host.run(pause_of_a_story(host))
        assert len(times) == STORY and 5 <= paused_at < STORY
        assert times[paused_at] - times[paused_at - 1] >= PAUSE_S


@pytest.mark.parametrize("prompt", [PROMPT, [5, 6, 7], {"prompt": PROMPT}, {"prompt_token_ids": [5, 6, 7]}])
def test_every_form_of_a_prompt_is_taken_and_keeps_to_its_version(host: EngineHost, prompt: Any) -> None:
    async def scenario() -> tuple[str, int]:
        params, name = SamplingParams(max_tokens=3, ignore_eos=True), next(names)
        async for output in host.engine._llm.generate(prompt, params, name):
            final = output
        return final.request_id, len(final.outputs[0].token_ids)

    assert host.run(scenario())[1] == 3


def test_what_is_no_prompt_is_refused(host: EngineHost) -> None:
    async def scenario() -> None:
        async for _ in host.engine._llm.generate(7, SamplingParams(), next(names)):
            pass

    with pytest.raises(TypeError, match="a prompt is a text, a list of token ids or .*, and not int 7"):
        host.run(scenario())
