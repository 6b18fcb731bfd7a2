"""Checks that a run over the generated world searches that world. Another one has other names: no answer would be in
it."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urljoin

import httpx

from configs.data import Generated
from configs.mixture import sources_of
from configs.schema import Config
from configs.validate import ConfigError
from rollout.environments.search.retrievers import what_is_searched
from rollout.environments.search.server import CORPUS
from scripts.launch.data import naming

KEY = "rollout.agent_args.retriever"
TIMEOUT_S = 5.0


def check_world(config: Config, needed_files: Sequence[str]) -> None:
    """Ask a retrieval server which world it serves. One that does not say, or does not answer, is left alone.

    Raises:
        ConfigError: the retriever searches another world than data.generated=search_world asks about.
    """
    for source in sources_of(config):
        with naming(source.name):
            _check_source(source.config, needed_files)


def _check_source(config: Config, needed_files: Sequence[str]) -> None:
    is_asked_about = any(getattr(config.data, name) is None for name in needed_files)
    retriever = config.rollout.agent_args.get("retriever")
    if config.data.generated is not Generated.search_world or not is_asked_about or not isinstance(retriever, Mapping):
        return
    right = what_is_searched({"kind": "world"})
    if retriever.get("kind") == "world":
        for name, value in what_is_searched(retriever).items():
            if value != right.get(name, value):
                raise ConfigError(f"{KEY}.{name}={value}: must be {right[name]}, {_why(right)}")
    if retriever.get("kind") == "http" and isinstance(url := retriever.get("url"), str):
        served = _served(url)
        if served.get("kind") == "world" and served != right:
            start = f'start `make retriever ARGS="{_words(right)}"`'
            raise ConfigError(f"{KEY}.url={url}: serves {_words(served)}; {_why(right)}: {start}")


def _served(url: str) -> Mapping[str, Any]:
    """Return what the server says that it searches; empty where it says nothing."""
    try:
        answer = httpx.get(urljoin(url, CORPUS.removeprefix("/")), timeout=TIMEOUT_S, trust_env=False)
        reply = answer.json() if answer.status_code == httpx.codes.OK else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


def _words(world: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in world.items())


def _why(right: Mapping[str, Any]) -> str:
    seed, size = right["seed"], right["documents"]
    return f"data.generated=search_world asks about the world of seed={seed} and documents={size}"
