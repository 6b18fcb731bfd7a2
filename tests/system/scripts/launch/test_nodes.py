"""A Ray cluster of three nodes, of which the driver's offers no CPU: what is asked and done on each."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from configs.schema import Config, RayConfig
from configs.validate import ConfigError
from scripts.launch import nodes as launch_nodes
from scripts.launch.cluster import set_up_in
from scripts.launch.nodes import check_nodes, driver_task, release_elsewhere
from tests.support.compose import changed
from weight_sync.transports.cleanup import MIN_AGE_S, shared_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def config(nodes: Cluster) -> Config:
    return changed(Config(), ray=RayConfig(address=nodes.address, start_timeout_s=300, forward_env=["JUDGE_KEY"]))


def test_machines_are_looked_at_and_swept(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = shared_path("killed", 3, "abc0")
    left.touch()
    os.utime(left, (time.time() - 2 * MIN_AGE_S,) * 2)
    said: list[str] = []
    asyncio.run(check_nodes(config, "cpu", tmp_path / "run", said.append))
    assert not left.exists()
    assert list((tmp_path / "run").iterdir()) == []
    wrong = changed(config, ray__network_interface="eth77")
    with pytest.raises(ConfigError, match=r"^ray\.network_interface=eth77: .* has no interface of that name"):
        asyncio.run(check_nodes(wrong, "cpu", tmp_path / "run", said.append))
    monkeypatch.setattr(launch_nodes, "look", no_look)
    with pytest.raises(ConfigError, match=r"does not answer: .*no such module.*\n.*does not answer: .* must be at "):
        asyncio.run(check_nodes(config, "cpu", tmp_path / "run", said.append))


def no_look(question: Any) -> Any:
    if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        raise ModuleNotFoundError("no such module")
    return launch_nodes.Look(host="here", address="10.77.0.1")


def test_weights_are_released_on_other_machines(config: Config) -> None:
    left = shared_path("run1", 3, "abc1")
    left.touch()
    said: list[str] = []
    asyncio.run(release_elsewhere(config, "run1", said.append))
    assert not left.exists() and said == []


def test_a_task_of_the_driver_is_beside_it_with_its_folder_and_variables(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "mine")
    node = ray.get_runtime_context().get_node_id()
    task = driver_task(lambda name: (ray.get_runtime_context().get_node_id(), os.getcwd(), os.environ[name]), config)
    assert ray.get(task.remote("JUDGE_KEY"), timeout=300) == (node, str(tmp_path), "mine")


class Actor:
    def __init__(self, on_start: Any):
        on_start()

    def environment(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]


def test_an_actor_has_the_variables_of_the_command_and_its_own(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUDGE_KEY", "HF_TOKEN", "VLLM_PLUGINS", "OTHER_KEY"):
        monkeypatch.setenv(name, "mine")
    on_start = set_up_in(tmp_path, config.ray)("agent-worker-0")
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"VLLM_PLUGINS": ""}}}
    actor: Any = ray.remote(**options)(Actor).remote(on_start)
    names = ["JUDGE_KEY", "HF_TOKEN", "VLLM_PLUGINS", "OTHER_KEY"]
    assert ray.get(actor.environment.remote(names), timeout=300) == ["mine", "mine", "", None]
    assert "agent-worker-0 is process" in (tmp_path / "logs" / "agent-worker-0.log").read_text()
