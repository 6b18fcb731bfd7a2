"""The text that Prometheus scrapes: the state of replicas, what their engines export, and the metrics of a run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

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
RUN_PREFIX = "slipstream_run_"
"""The beginning of the names of a run's metrics, which keeps them apart from those of replicas."""


def run_metric_name(key: str) -> str:
    """Return the name that Prometheus knows a metric of a run by.

    Example: run_metric_name("critic/rewards/mean") == "slipstream_run_critic_rewards_mean"
    """
    return RUN_PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", key)


def exposition(
    statuses: Sequence[ReplicaStatus],
    stats: Mapping[str, Mapping[str, float]],
    engines: Iterable[Metric],
    run: Mapping[str, float],
) -> bytes:
    """Return the text.

    Args:
        statuses: the state of each replica that answers.
        stats: the counters of each replica that answers.
        engines: what the engines of all replicas export (`merge_engine`).
        run: the latest metrics of the run, by the names that they have in metrics.jsonl.
    """
    of_run = (GaugeMetricFamily(run_metric_name(key), key, value=value) for key, value in run.items())
    return generate_latest(_Families([*_of_replicas(statuses, stats), *engines, *of_run]))


class _Families(Collector):
    """Metrics that are there already."""

    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _of_replicas(statuses: Sequence[ReplicaStatus], stats: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    gauges = {
        name: GaugeMetricFamily(f"slipstream_{name}", text, labels=["replica"])
        for name, text in (STATE | COUNTERS).items()
    }
    for status in statuses:
        gauges["global_steps"].add_metric([status.name], status.global_steps)
        gauges["paused"].add_metric([status.name], status.pause_mode is not None)
        gauges["torn"].add_metric([status.name], status.torn)
    for replica, counters in stats.items():
        for name in COUNTERS:
            gauges[name].add_metric([replica], counters[name])
    yield from gauges.values()


def merge_engine(families: dict[str, Metric], replica: str, text: str) -> None:
    """Add the text that a replica's engine exports, with the replica as a label. Engines have the same names, and each
    family must come once, with the samples of all."""
    for family in text_string_to_metric_families(text):
        merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        for sample in family.samples:
            merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
