"""The text that Prometheus scrapes, read back by its own parser."""

import math

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout.http.exposition import exposition, merge_engine, run_metric_name
from trainer.tracking.metric_list import metric_list

Samples = dict[tuple[str, str, str], float]


def scraped(engines: dict[str, str], run: dict[str, float]) -> Samples:
    """Return the values by name, replica and the other label of each sample."""
    merged: dict[str, Metric] = {}
    for replica, text in engines.items():
        merge_engine(merged, replica, text)
    families = list(text_string_to_metric_families(exposition([], {}, merged.values(), run).decode()))
    assert len({family.name for family in families}) == len(families), "Prometheus refuses a family that comes twice"
    samples: Samples = {}
    for sample in (sample for family in families for sample in family.samples):
        replica, *others = sample.labels.pop("replica", ""), *sample.labels.values()
        samples[sample.name, replica, ",".join(others)] = sample.value
    return samples


def engine(num_requests: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:requests", "Requests", ["engine"], registry=registry).labels("0").inc(num_requests)
    seconds = Histogram("vllm:seconds", "Seconds", buckets=(1, 2), registry=registry)
    for _ in range(num_requests):
        seconds.observe(1.5)
    return generate_latest(registry).decode()


def test_metrics_of_a_run_have_their_values_and_names_that_prometheus_takes() -> None:
    samples = scraped({}, {"critic/rewards/mean": 0.25, "reward/a b-é": 2, "actor/loss": math.nan, "perf/x": math.inf})
    assert samples["slipstream_run_critic_rewards_mean", "", ""] == 0.25
    assert samples["slipstream_run_reward_a_b__", "", ""] == 2
    assert math.isnan(samples["slipstream_run_actor_loss", "", ""])
    assert samples["slipstream_run_perf_x", "", ""] == math.inf


def test_no_two_metrics_share_a_name() -> None:
    names = [run_metric_name(entry.name) for entry in metric_list()]
    assert len(set(names)) == len(names)


def test_engines_are_told_apart_by_the_replica_and_each_family_comes_once() -> None:
    samples = scraped({"replica-0": engine(2), "replica-1": engine(3), "replica-2": ""}, {})
    assert samples["vllm:requests_total", "replica-0", "0"] == 2
    assert samples["vllm:requests_total", "replica-1", "0"] == 3
    assert samples["vllm:seconds_bucket", "replica-1", "2.0"] == 3 == samples["vllm:seconds_count", "replica-1", ""]
