"""Which retriever a config names."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout.search.bm25s import Bm25sRetriever
from rollout.search.checks import check_whole
from rollout.search.corpus import Corpus
from rollout.search.documents import RetrievalError, Retriever
from rollout.search.fts5 import Fts5Retriever
from rollout.search.http import HttpRetriever
from rollout.search.world import MIN_DOCUMENTS, NUM_DOCUMENTS, SEED, World


def world(*, seed: int = SEED, documents: int = NUM_DOCUMENTS) -> Retriever:
    """FTS5 over the articles of a generated world: by default that of data.generated=search_world."""
    check_whole("retriever.seed", seed, 0)
    check_whole("retriever.documents", documents, MIN_DOCUMENTS)
    return Fts5Retriever(World(seed, documents).articles)


def fts5(*, corpus: str) -> Retriever:
    """FTS5 over the documents of a file or folder, in memory."""
    return Fts5Retriever(Corpus(Path(corpus).expanduser()))


KINDS: dict[str, Callable[..., Retriever]] = {
    "http": HttpRetriever,
    "fts5": fts5,
    "bm25s": Bm25sRetriever,
    "world": world,
}
"""By rollout.agent_args.retriever.kind: what makes one of the other values."""
WORLD = inspect.signature(world).parameters
NOT_IN_A_CONFIG = frozenset({"transport"})


def what_is_searched(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a server says of the retriever that it serves: its kind, and of a world which one.

    Example: what_is_searched({"kind": "world", "seed": 1}) == {"kind": "world", "seed": 1, "documents": 20000}
    """
    which = {name: spec.get(name, one.default) for name, one in WORLD.items()}
    return {"kind": spec.get("kind")} | (which if spec.get("kind") == "world" else {})


def make_retriever(spec: Mapping[str, Any] | Retriever) -> Retriever:
    """`spec`: a `kind` and its arguments, such as {"kind": "world", "seed": 0}; a retriever stays as it is. Raises
    ValueError, which names what is wrong in it."""
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
