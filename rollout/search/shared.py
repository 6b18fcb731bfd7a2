"""One retriever per process, however many episodes ask for it, until the run ends."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rollout.agents.closing import at_end
from rollout.search.documents import Retriever
from rollout.search.retrievers import make_retriever

_made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Retriever]]] = WeakKeyDictionary()
"""By what the config says of them."""


async def shared_retriever(spec: Mapping[str, Any] | Retriever) -> Retriever:
    """`make_retriever(spec)`, made once on each event loop, in a thread: reading a corpus takes seconds. A retriever
    stays as it is. Raises what `make_retriever` raises."""
    if not isinstance(spec, Mapping):
        return spec
    of_loop = _made.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(dict(spec), sort_keys=True, default=repr)
    if key not in of_loop:
        of_loop[key] = asyncio.create_task(asyncio.to_thread(make_retriever, spec))
        at_end(partial(_close, of_loop, key))
    return await asyncio.shield(of_loop[key])  # an episode that is cancelled must not end what the others wait for


async def _close(made: dict[str, asyncio.Task[Retriever]], key: str) -> None:
    """Close what was made, if it could be."""
    making = made.pop(key)
    await asyncio.wait([making])
    if making.exception() is None:
        await making.result().close()
