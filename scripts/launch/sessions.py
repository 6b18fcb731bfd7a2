"""The recording of sessions by `scripts.serve`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from configs.rollout import Speculation
from configs.schema import Config
from rollout.agents.worker_group import load_tokenizer
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle
from rollout.sessions.archive import SessionArchive, SessionRecord
from rollout.sessions.budget import make_limits
from rollout.sessions.codec import ChatCodec, make_codec
from rollout.sessions.routing import Replicas, Route
from scripts.launch.driver import training_sampling
from scripts.launch.models import chat_template
from trainer.tracking.sinks import write_atomically

SESSIONS_FOLDER = "sessions"


async def session_words(config: Config, model_path: str) -> ChatCodec | str:
    """Return what makes tokens of messages; a text says why nothing can. Takes seconds, because it loads
    transformers."""
    return await asyncio.to_thread(_words, config, model_path)


def _words(config: Config, model_path: str) -> ChatCodec | str:
    tokenizer = load_tokenizer(model_path)
    if (template := chat_template(config)) is not None:
        tokenizer.chat_template = template
    try:
        return make_codec(config.sessions, tokenizer)
    except ValueError as error:
        return str(error)


def recorded_sessions(
    config: Config, words: ChatCodec | str, fleet: ReplicaFleet, replicas: Sequence[ReplicaHandle], run_dir: Path
) -> SessionArchive:
    routes = Replicas(
        router=fleet.router,
        progress=fleet.progress,
        generate={replica.name: replica.client for replica in replicas},
        route_timeout_s=config.serve.route_timeout_s,
    )
    return SessionArchive(
        codec=words,
        limits=make_limits(config),
        sampling=training_sampling(config),
        model=config.model.path or "policy",
        route=lambda: Route(routes),
        max_open=config.sessions.max_open,
        write=lambda record: write_record(run_dir / SESSIONS_FOLDER, record),
        is_drafted=config.rollout.speculative.method is not Speculation.none,
    )


def write_record(folder: Path, record: SessionRecord) -> None:
    """Write the record of a session that has ended. Raises OSError."""
    write_atomically(folder / f"{record.id}.json", record.to_json())


def session_usage(words: ChatCodec | str, url: str, run_dir: Path) -> str:
    """Return how sessions are opened and where they are kept, for the console."""
    if isinstance(words, str):
        return f"no sessions: {words}"
    return f"POST {url}/sessions opens a session, which is recorded in {run_dir / SESSIONS_FOLDER} when it ends"
