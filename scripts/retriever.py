"""Serves a retriever over HTTP, with the API of Search-R1's retrieval server, until Ctrl-C or SIGTERM.

`make retriever ARGS="corpus=FOLDER"`, `slipstream retriever corpus=FOLDER [kind=fts5] [port=8000]`.

    kind=fts5         the retriever: fts5, world, or http, which passes on what another server finds
    host=127.0.0.1    the address to listen on; anybody who reaches another address may search
    port=8000         0 takes a free one
    topk=3            documents per query, of requests that say none

Everything else is an argument of the kind, as in rollout.agent_args.retriever: corpus, seed, url, ...
Exit code: 0, or 1 after an error.
"""

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.serve import ServeConfig, is_loopback
from configs.validate import ConfigError
from scripts.command.command import run_async

DEFAULTS = {"kind": "fts5", "host": "127.0.0.1", "port": 8000, "topk": 3}


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(__doc__ or "")
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        run_async(serve_retriever(arguments(sys.argv[1:])))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stdout.write("stopped\n")
    except ValueError as error:  # ConfigError is one
        sys.stderr.write(f"config error: {error}\n")
        sys.exit(1)


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` words, and the defaults of those that are left out. Raises ConfigError."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word}: must be key=value, such as corpus=FOLDER")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from error
    assert isinstance(values, dict)
    return DEFAULTS | {str(key): value for key, value in values.items()}


async def serve_retriever(values: Mapping[str, Any]) -> None:
    """Serve until it is cancelled. Raises ValueError, which names the key."""
    from rollout.environments.search.documents import check_whole
    from rollout.environments.search.retrievers import make_retriever, what_is_searched
    from rollout.environments.search.server import PATH, retriever_app
    from rollout.environments.search.wire import MAX_TOPK
    from rollout.http.access import Access
    from rollout.http.server import listen, listener_url, served

    host, port, topk = str(values["host"]), values["port"], values["topk"]
    check_whole("port", port, 0, 65535)
    check_whole("topk", topk, 1, MAX_TOPK)
    spec = {key: value for key, value in values.items() if key not in ("host", "port", "topk")}
    retriever = make_retriever(spec)
    try:
        listener = listen(host, port)
    except (ConfigError, OverflowError) as error:
        raise ConfigError(str(error).replace("serve.", "")) from error
    serve = ServeConfig(host=host, port=port)
    access = Access.of(serve, None, on_loopback=True) if is_loopback(host) else None
    try:
        async with served(retriever_app(retriever, topk, what_is_searched(spec)), listener, serve, access):
            sys.stdout.write(f"retriever.url={listener_url(listener)}{PATH}\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
    finally:
        await retriever.close()


if __name__ == "__main__":
    main()
