"""A marker in the queue of an engine's outputs: when it is answered, all outputs before it have been handed out."""

import asyncio
from typing import Any


class OutputMarkers:
    """Lets markers through the queue between vLLM's core client and its output handler.

    The handler, one task, takes an output, puts it into the queue of its request, which wakes up whoever waits there,
    and only then asks for the next one. So when it comes to a marker, everything before it has been handed out; and the
    event loop runs those that it woke up earlier before the one who waits for the marker.
    """

    def __init__(self, core: Any):
        """`core`: vLLM's core client, of which the handler has not asked anything yet."""
        self._queue = core.outputs_queue
        self._next_output = core.get_output_async
        core.get_output_async = self._next

    async def _next(self) -> Any:
        while isinstance(output := await self._next_output(), asyncio.Future):
            if not output.done():  # its flush was cancelled
                output.set_result(None)
        return output

    async def flush(self, handler: "asyncio.Task[None]") -> None:
        """Return when all that is in the queue now has been handed out, or when the handler has ended, as it does when
        the engine core dies."""
        marker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(marker)
        try:
            await asyncio.wait((marker, handler), return_when=asyncio.FIRST_COMPLETED)
        finally:
            marker.cancel()
