"""State and counters of replicas as Prometheus text, labelled with the replica's name."""

from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest

from weight_sync.protocol import ReplicaStatus

STATE = {
    "global_steps": "Version of the weights that the replica serves",
    "paused": "1 while a client keeps the replica paused",
    "torn": "1 while an update that failed half-way has not been made whole",
}
COUNTERS = {
    "running_requests": "Requests inside the engine",
    "waiting_requests": "Requests that wait for a seat in the engine, or for a resume",
    "engine_requests": "Requests given to the engine since the start",
    "trajectories": "Trajectories of agent loops since the start",
    "aborted": "Trajectories that were aborted since the start",
    "busy_s": "Seconds with at least one request since the start",
}
"""The entries of RolloutReplica.stats that are exported."""


def exposition(statuses: Sequence[ReplicaStatus], stats: Mapping[str, Mapping[str, float]], with_engine: bool) -> bytes:
    """`stats`: counters of each replica by its name. `with_engine`: also what the engine in this process exports."""
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"slipstream_{name}", text, ["replica"], registry=registry)
        for name, text in {**STATE, **COUNTERS}.items()
    }
    for status in statuses:
        gauges["global_steps"].labels(status.name).set(status.global_steps)
        gauges["paused"].labels(status.name).set(status.pause_mode is not None)
        gauges["torn"].labels(status.name).set(status.torn)
    for replica, counters in stats.items():
        for name in COUNTERS:
            gauges[name].labels(replica).set(counters[name])
    return generate_latest(registry) + (generate_latest(REGISTRY) if with_engine else b"")
