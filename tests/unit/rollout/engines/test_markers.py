"""Markers in the queue of outputs, with a core client and an output handler that work as vLLM's do."""

import asyncio
from typing import Any

import pytest

from rollout.engines.vllm.markers import OutputMarkers
from tests.support.fakes import settle


class Core:
    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()


class Stream:
    """The outputs that one client waits for."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._outputs: asyncio.Queue[int] = asyncio.Queue()
        self.put = self._outputs.put_nowait

    async def read(self) -> None:
        while True:
            self.received.append(await self._outputs.get())


async def handle(core: Core, stream: Stream) -> None:
    """Slowly, and in small pieces, as where one step has the outputs of hundreds of requests."""
    while True:
        for token in await core.get_output_async():
            await asyncio.sleep(1)
            stream.put(token)


async def test_a_flush_returns_when_all_before_it_has_been_received_and_not_later() -> None:
    core, stream = Core(), Stream()
    markers = OutputMarkers(core)
    tasks = [asyncio.create_task(handle(core, stream)), asyncio.create_task(stream.read())]
    for outputs in ([1, 2], [3]):
        core.outputs_queue.put_nowait(outputs)
    flushing = [asyncio.create_task(markers.flush(tasks[0])) for _ in range(2)]
    await settle()
    core.outputs_queue.put_nowait([4])
    await asyncio.gather(*flushing)
    assert stream.received == [1, 2, 3]
    await markers.flush(tasks[0])
    assert stream.received == [1, 2, 3, 4]
    for task in tasks:
        task.cancel()


async def test_a_flush_that_is_given_up_and_a_handler_that_ends_disturb_nobody() -> None:
    core, stream = Core(), Stream()
    markers = OutputMarkers(core)
    handler = asyncio.create_task(handle(core, stream))
    core.outputs_queue.put_nowait([1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await markers.flush(handler)
    core.outputs_queue.put_nowait([2])
    await markers.flush(handler)
    assert not handler.done()
    handler.cancel()
    core.outputs_queue.put_nowait([3])
    await markers.flush(handler)
