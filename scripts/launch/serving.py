"""Starts what `scripts.serve` needs: replicas that each serve HTTP, and the gateway in front of them, with sessions."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from configs.checkpoint import INITIAL_MODEL
from configs.rollout import Speculation
from configs.runtime.deadline import within
from configs.schema import Config
from configs.serve import ADDRESS_FILE
from rollout.agents.worker_group import load_tokenizer
from rollout.events.driver import DriverEvents, reporting
from rollout.fleet.control import FleetControl
from rollout.fleet.fleet import ReplicaFleet
from rollout.http.access import Access
from rollout.http.gateway import Proxy, gateway_app, upstream_client
from rollout.http.replica_app import ReplicaServer
from rollout.http.server import listen, listener_url, served
from rollout.http.token import Token, usage
from rollout.replica.replica_group import ReplicaHandle
from rollout.sessions.app import SessionGateway, SessionGatewayAccess, session_app
from rollout.sessions.archive import SessionArchive, SessionRecord
from rollout.sessions.budget import make_limits
from rollout.sessions.codec import ChatCodec, make_codec
from rollout.sessions.routing import Replicas, Route
from scripts.launch.cluster import cluster, set_up_in
from scripts.launch.driver import make_monitor, training_sampling
from scripts.launch.models import boot_model, chat_template, engine_spec, policy_model
from scripts.launch.nodes import check_nodes
from scripts.launch.placement import reserve
from scripts.launch.replicas import ReplicaStarter
from trainer.tracking.console import Console, PlainConsole
from trainer.tracking.events.writer import EventWriter
from trainer.tracking.sinks import FailedWrites, write_atomically

UNBOUNDED = sys.maxsize
"""The most requests per replica: the gateway holds none back, so they wait at a replica, where pause and abort reach
them."""
SESSIONS_FOLDER = "sessions"


async def serve_model(config: Config, device: str, run_dir: Path, token: Token | None) -> None:
    """Serve until cancelled. An error anywhere is raised here, after every process has ended."""
    listener = listen(config.serve.host, config.serve.port)  # an address in use is an error before anything starts
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every request
    console = PlainConsole(0, sys.stdout)
    console.stage("starting Ray")
    with EventWriter(run_dir=run_dir, failed=FailedWrites(console.message)) as writer:
        report = reporting(DriverEvents(writer.put, is_on=False), console.message)
        async with cluster(config, device), upstream_client(token, config.serve.route_timeout_s) as client:
            model_path, replicas = await start_replicas(config, device, run_dir, console, log_stats=True)
            async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "serving from replicas"):
                loading = asyncio.to_thread(session_words, config, model_path)
                urls, words = await asyncio.gather(replica_urls(config, token, replicas), loading)
            fleet = ReplicaFleet(
                replicas,
                UNBOUNDED,
                config.rollout.min_replicas,
                report,
                serving=0,
                answer_timeout_s=config.rollout.answer_timeout_s,
            )
            control = FleetControl(fleet, config.weight_sync.pause_timeout_s)
            proxy = Proxy(client, fleet.router, urls, config.serve.route_timeout_s)
            sessions = recorded_sessions(config, words, fleet, replicas, run_dir)
            app = SessionGateway(session_app(sessions), gateway_app(control, proxy))
            access = SessionGatewayAccess.of(config.serve, token, on_loopback=config.serve.is_loopback)
            async with served(app, listener, config.serve, access), sessions.watched():
                for name, url in urls.items():
                    console.message(f"{name}: {url}")
                console.message(usage(token, config.serve, run_dir))
                console.message(session_usage(words, listener_url(listener), run_dir))
                console.message(f"serving at {listener_url(listener)} until Ctrl-C; logs are in {run_dir}")
                with _address_file(run_dir, listener_url(listener)):
                    await make_monitor(config, fleet).run()


@contextmanager
def _address_file(run_dir: Path, url: str) -> Iterator[None]:
    """Leave the address in a file of the run folder while the block runs, for programs that have started the server."""
    write_atomically(run_dir / ADDRESS_FILE, url.encode())
    try:
        yield
    finally:
        (run_dir / ADDRESS_FILE).unlink(missing_ok=True)


def session_words(config: Config, model_path: str) -> ChatCodec | str:
    """Return what makes tokens of messages; a text says why nothing can. Takes seconds, because it loads
    transformers."""
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
    def write(record: SessionRecord) -> None:
        write_atomically(run_dir / SESSIONS_FOLDER / f"{record.id}.json", record.to_json())

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
        write=write,
        is_drafted=config.rollout.speculative.method is not Speculation.none,
    )


def session_usage(words: ChatCodec | str, url: str, run_dir: Path) -> str:
    """Return how sessions are opened and where they are kept, for the console."""
    if isinstance(words, str):
        return f"no sessions: {words}"
    return f"POST {url}/sessions opens a session, which is recorded in {run_dir / SESSIONS_FOLDER} when it ends"


async def replica_urls(config: Config, token: Token | None, replicas: Sequence[ReplicaHandle]) -> dict[str, str]:
    """Let every replica serve HTTP. Returns replica -> URL."""
    # Without an address the cluster is this machine.
    access = Access.of(config.serve, token, on_loopback=config.ray.address is None)
    server = ReplicaServer(limits=config.serve, access=access)
    serving = (replica.serve(server.start, chat_template(config)) for replica in replicas)
    return dict(zip([replica.name for replica in replicas], await asyncio.gather(*serving), strict=True))


async def start_replicas(
    config: Config, device: str, run_dir: Path, console: Console, *, log_stats: bool = False
) -> tuple[str, list[ReplicaHandle]]:
    """Start replicas of the model, as version 0. Returns the model's path, too."""
    placement = await reserve(config, device, console.message)
    await check_nodes(config, device, run_dir, console.message)
    kept = None
    if config.ray.address is not None:  # other machines have not the cache of this one
        kept = run_dir / INITIAL_MODEL
        shutil.rmtree(kept, ignore_errors=True)
    model_path = await policy_model(config, await boot_model(config, run_dir), console, kept)
    console.stage(f"starting {config.rollout.num_replicas} replica(s) on {model_path}")
    starter = ReplicaStarter(
        config=config,
        spec=replace(
            engine_spec(config, device, model_path), log_stats=log_stats, replay_routes=False, transfer_backend=None
        ),
        on_start=set_up_in(run_dir, config.ray),
        report=lambda event: console.message(event.text),
        loaded_version=0,
    )
    replicas = starter.create_first(placement.replicas)
    async with within(config.rollout.start_timeout_s, "rollout.start_timeout_s", "starting replicas"):
        await asyncio.gather(*map(starter.load, replicas))
    return model_path, replicas
