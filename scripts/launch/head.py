"""Watches the head of a Ray cluster, the machine with the service that all other machines need.

Without that service, the processes of a run work on for a while: Ray ends each of them, the driver too, without a word
when the service has not come back after RECONNECT seconds. That is time to save a checkpoint and to end with an error.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAYS_DEFAULT_S = 60.0
SAVE_AFTER, END_AFTER = 1 / 3, 2 / 3
"""Shares of that time after which a checkpoint is saved, which costs little if the head comes back, and after which the
run ends. In the rest it has to close."""
LOOK_S = 2.0
"""The seconds between two looks, and the deadline of one."""


class HeadLostError(RuntimeError):
    """The head of the Ray cluster is out of reach. The message names its address."""


@dataclass
class Head:
    """The head of the cluster, for the parts of a run that have something to save.

    Example:
        async with cluster(config, device) as head:
            head.save = checkpointer.save_next
    """

    save: Callable[[], Awaitable[bool]] | None = None
    """Saves the run as soon as it can, once the head is silent. Returns whether that went well."""
    is_lost: bool = False
    """True when the run ends because of it: a question to Ray's service would get no answer any more."""


@asynccontextmanager
async def watched(address: str) -> AsyncIterator[Head]:
    """Run the block while the service at host:port can be reached. Raises HeadLostError in a group of errors."""
    head = Head()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(head, address, float(os.environ.get(RECONNECT, RAYS_DEFAULT_S))))
        try:
            yield head
        finally:
            watching.cancel()


async def _watch(head: Head, address: str, reconnect_s: float) -> None:
    """Watch the head, and never return. Raise HeadLostError when it has been silent for too long."""
    clock, silent_s = asyncio.get_running_loop().time, 0.0
    looked, saving = clock(), None
    try:
        while True:
            is_there = await answers(address)
            # A longer gap says that the driver itself stood still.
            elapsed, looked = min(clock() - looked, 3 * LOOK_S), clock()
            silent_s = 0.0 if is_there else silent_s + elapsed
            if is_there:
                saving = None  # what was asked for is saved all the same
            elif silent_s >= SAVE_AFTER * reconnect_s and saving is None and head.save is not None:
                logger.warning("the head of the Ray cluster (%s) does not answer: a checkpoint is due", address)
                saving = asyncio.ensure_future(head.save())
            if silent_s >= END_AFTER * reconnect_s:
                head.is_lost = True
                raise HeadLostError(_lost(address, silent_s, saving))
            await asyncio.sleep(LOOK_S)
    finally:
        if saving is not None:
            saving.cancel()


def _lost(address: str, silent_s: float, saving: asyncio.Future[bool] | None) -> str:
    """Return the message. `saving`: None where there is nothing to save."""
    text = f"the head of the Ray cluster ({address}) has not answered for {silent_s:.0f} s"
    if saving is not None and not saving.done():
        text += ", in which no step ended to be saved"
    elif saving is not None:
        was_saved = saving.exception() is None and saving.result()
        text += ": a checkpoint was saved meanwhile" if was_saved else ", and a checkpoint could not be saved meanwhile"
    return f"{text} ({RECONNECT} in the driver's environment sets how long Ray waits for it)"


async def answers(address: str) -> bool:
    """Return whether the service at host:port can be reached now."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError:  # a TimeoutError is one
        return False
    writer.close()
    return True
