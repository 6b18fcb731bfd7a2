"""Makes the retriever that a config names."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rollout.agents.loop import at_end
from rollout.environments.search.corpus import Corpus
from rollout.environments.search.documents import RetrievalError, Retriever, check_whole
from rollout.environments.search.fts5 import Fts5Retriever
from rollout.environments.search.http import HttpRetriever
from rollout.environments.search.world import MIN_DOCUMENTS, NUM_DOCUMENTS, SEED, World

_made: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Task[Retriever]]] = WeakKeyDictionary()
"""The retrievers that the episodes of an event loop share, by what the config says of them."""


async def shared_retriever(spec: Mapping[str, Any] | Retriever) -> Retriever:
    """Return `make_retriever(spec)`, made once on each event loop, in a thread: reading a corpus takes seconds. A
    retriever stays as it is. Raises what `make_retriever` raises."""
    if not isinstance(spec, Mapping):
        return spec
    on_this_loop = _made.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(dict(spec), sort_keys=True, default=repr)
    if key not in on_this_loop:
        on_this_loop[key] = asyncio.create_task(asyncio.to_thread(make_retriever, spec))
        at_end(lambda: _close(on_this_loop, key))
    return await asyncio.shield(on_this_loop[key])  # an episode that is cancelled must not end what the others wait for


async def _close(made: dict[str, asyncio.Task[Retriever]], key: str) -> None:
    """Close what was made, if it could be."""
    making = made.pop(key)
    await asyncio.wait([making])
    if making.exception() is None:
        await making.result().close()


def world(*, seed: int = SEED, documents: int = NUM_DOCUMENTS) -> Retriever:
    """Search the articles of a generated world by FTS5, by default that of data.generated=search_world."""
    check_whole("retriever.seed", seed, 0)
    check_whole("retriever.documents", documents, MIN_DOCUMENTS)
    return Fts5Retriever(World(seed, documents).articles)


def fts5(*, corpus: str) -> Retriever:
    """Search the documents of a file or folder by FTS5, in memory."""
    return Fts5Retriever(Corpus(Path(corpus).expanduser()))


KINDS: dict[str, Callable[..., Retriever]] = {"http": HttpRetriever, "fts5": fts5, "world": world}
"""The makers of retrievers, by rollout.agent_args.retriever.kind."""
WORLD = inspect.signature(world).parameters
NOT_IN_A_CONFIG = frozenset({"transport"})


def what_is_searched(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server says of the retriever that it serves: its kind, and of a world which one.

    Example: what_is_searched({"kind": "world", "seed": 1}) == {"kind": "world", "seed": 1, "documents": 20000}
    """
    which = {name: spec.get(name, parameter.default) for name, parameter in WORLD.items()}
    return {"kind": spec.get("kind")} | (which if spec.get("kind") == "world" else {})


def make_retriever(spec: Mapping[str, Any] | Retriever) -> Retriever:
    """Make a retriever of a `kind` and its arguments, such as {"kind": "world", "seed": 0}; a retriever stays as it is.
    Raises ValueError, which names what is wrong in `spec`."""
    if isinstance(spec, Retriever):
        return spec
    if not isinstance(spec, Mapping):
        raise ValueError(f"retriever={spec}: must have a kind and its keys, such as {{kind: world}}")
    arguments = dict(spec)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"retriever.kind={kind}: must be one of {', '.join(KINDS)}")
    parameters = inspect.signature(KINDS[kind]).parameters
    allowed = [name for name in parameters if name not in NOT_IN_A_CONFIG]
    for name in arguments:
        if name not in allowed:
            raise ValueError(f"retriever.{name}: is no key; kind={kind} has {', '.join(allowed)}")
    for name in allowed:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            raise ValueError(f"retriever.{name}: must be set with kind={kind}")
    try:
        return KINDS[kind](**arguments)
    except (TypeError, RetrievalError) as error:
        raise ValueError(f"retriever={dict(spec)}: {error}") from error
