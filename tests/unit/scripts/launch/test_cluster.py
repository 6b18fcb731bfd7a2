"""The device and the cluster of a run: device=auto is checked as what it becomes."""

import os
from pathlib import Path

import pytest

from configs.schema import Config, Transport
from configs.trainer import AttentionKind
from configs.validate import ConfigError
from scripts.launch import cluster
from scripts.launch.cluster import has_gpu, resolve_device
from scripts.plan.machine import smallest_gpu
from tests.support.compose import changed, resolve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer__attention": AttentionKind.flex}, "trainer.attention=flex: device=cpu needs dense or varlen"),
        ({"weight_sync__transport": Transport.cuda_ipc}, "weight_sync.transport=cuda_ipc: needs GPUs"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_device_auto_is_refused_as_the_device_that_it_becomes(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str, dry_run: bool
) -> None:
    config = changed(Config(), dry_run=dry_run, **changes)
    monkeypatch.setattr(cluster, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match=rf"^{message}.* \(device=auto is cpu here\)$"):
        resolve_device(config)
    assert resolve_device(Config()) == "cpu"
    monkeypatch.setattr(cluster, "has_gpu", lambda: True)
    assert resolve_device(config) == "cuda"


@pytest.mark.parametrize(("says", "gpus"), [("GPU 0: NVIDIA H100", True), ("No devices were found; exit 6", False)])
def test_a_machine_has_the_gpus_that_nvidia_smi_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, gpus: bool
) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, f"echo {says}")
    assert has_gpu() is gpus


def test_a_gpu_that_hangs_is_not_taken_for_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(cluster, "NVIDIA_SMI_S", 0.2)
    with pytest.raises(ConfigError, match=r"device: nvidia-smi -L has not answered for 0.2 s; a GPU or its driver"):
        resolve_device(Config())
    with pytest.raises(ConfigError, match="has not answered"):
        smallest_gpu()


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (program := folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.mark.parametrize(
    ("environment", "key", "address"),
    [
        (None, "null", None),
        ("10.0.0.1:6379", "null", "10.0.0.1:6379"),
        ("10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.2:6379"),
        ("10.0.0.1:6379", "local", None),
        ("http://10.0.0.1:8265", "null", None),  # for `ray job submit`
        ("", "null", None),
    ],
)
def test_a_run_joins_the_cluster_of_its_job(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, key: str, address: str | None
) -> None:
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    assert resolve(f"ray.address={key}").ray.address == address


def test_an_address_that_is_none_and_a_device_that_nobody_named_are_refused_with_where_they_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"ray.address=ray://10.0.0.1:10001: must be auto, local or host:port"):
        resolve_device(resolve("ray.address=ray://10.0.0.1:10001"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"with ray.address=10.0.0.1:6379 \(from RAY_ADDRESS\) say which one"):
        resolve_device(resolve())


def test_a_machine_without_room_for_the_most_replicas_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 64.0, "GPU": 4.0})
    refuse = cluster._refuse_too_small  # pyright: ignore[reportPrivateUsage]
    config = changed(Config(), rollout__num_replicas=2, rollout__autoscale__max_replicas=3)
    refuse(config, "cuda")  # and one for the trainer
    config = changed(config, rollout__autoscale__max_replicas=4)
    with pytest.raises(ConfigError, match=r"^rollout.autoscale.max_replicas=4 x .* need 5 GPUs .* the cluster has 4$"):
        refuse(config, "cuda")
    refuse(config, "cpu")
    refuse(cluster.without_trainer(config), "cuda")  # nothing is added where nothing trains
    with pytest.raises(ConfigError, match=r"^rollout.num_replicas=4 x .* need 5 GPUs"):
        refuse(changed(config, rollout__num_replicas=4), "cuda")
