"""Which retriever a config names."""

from collections.abc import Callable, Mapping
from typing import Any

from rollout.search.documents import Retriever
from rollout.search.fts5 import Fts5Retriever
from rollout.search.world import NUM_DOCUMENTS, SEED, World


def world(*, seed: int = SEED, documents: int = NUM_DOCUMENTS) -> Retriever:
    """FTS5 over the articles of a generated world: by default that of data.generated=search_world."""
    return Fts5Retriever(World(seed, documents).articles)


KINDS: dict[str, Callable[..., Retriever]] = {"world": world}
"""By rollout.agent_args.retriever.kind: what makes one of the other values."""


def make_retriever(spec: Mapping[str, Any] | Retriever) -> Retriever:
    """`spec`: a `kind` and its arguments, such as {"kind": "world", "seed": 0}; a retriever stays as it is. Raises
    ValueError, which names what is wrong in it."""
    if not isinstance(spec, Mapping):
        return spec
    arguments = dict(spec)
    kind = arguments.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"retriever.kind={kind}: must be one of {', '.join(KINDS)}")
    try:
        return KINDS[kind](**arguments)
    except TypeError as error:
        raise ValueError(f"retriever={dict(spec)}: {error}") from error
