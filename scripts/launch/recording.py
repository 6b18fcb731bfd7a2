"""The sessions that `scripts.serve` records."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from configs.schema import Config
from rollout.agents.worker_group import load_tokenizer
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.replica_group import ReplicaHandle
from rollout.sessions.harness_loop import make_limits, make_words
from rollout.sessions.record import SessionRecord
from rollout.sessions.recorded import RecordedSessions
from rollout.sessions.routing import Replicas, Route
from rollout.sessions.session import Words
from scripts.launch.driver import training_sampling
from scripts.launch.models import chat_template
from trainer.tracking.sinks import write_atomically

SESSIONS_FOLDER = "sessions"


async def session_words(config: Config, model_path: str) -> Words | str:
    """What makes tokens of messages; a text says why nothing does. Takes seconds: it loads transformers."""
    return await asyncio.to_thread(_words, config, model_path)


def _words(config: Config, model_path: str) -> Words | str:
    tokenizer = load_tokenizer(model_path)
    if (template := chat_template(config)) is not None:
        tokenizer.chat_template = template
    try:
        return make_words(config.sessions, tokenizer)
    except ValueError as error:
        return str(error)


def recorded_sessions(
    config: Config, words: Words | str, fleet: ReplicaFleet, replicas: Sequence[ReplicaHandle], run_dir: Path
) -> RecordedSessions:
    routes = Replicas(
        router=fleet.router,
        progress=fleet.progress,
        generate={replica.name: replica.client for replica in replicas},
        route_timeout_s=config.serve.route_timeout_s,
    )
    return RecordedSessions(
        words=words,
        limits=make_limits(config),
        sampling=training_sampling(config),
        model=config.model.path or "policy",
        route=partial(Route, routes),
        config=config.sessions,
        write=partial(write_record, run_dir / SESSIONS_FOLDER),
    )


def write_record(folder: Path, record: SessionRecord) -> None:
    """Raises OSError."""
    write_atomically(folder / f"{record.id}.json", record.to_json())


def session_usage(words: Words | str, url: str, run_dir: Path) -> str:
    """How sessions are opened and where they are kept, for the console."""
    if isinstance(words, str):
        return f"no sessions: {words}"
    return f"POST {url}/sessions opens a session, which is recorded in {run_dir / SESSIONS_FOLDER} when it ends"
