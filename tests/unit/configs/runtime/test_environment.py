"""The variables that the processes of a run get of the shell of its command."""

import os

import pytest

from configs.runtime.environment import forwarded_environment, take_environment
from configs.schema import Config, Device, RayConfig
from configs.validate import ConfigError, check
from tests.support.compose import changed


def test_on_a_cluster_the_documented_variables_and_those_that_are_named_are_forwarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name in ("HF_TOKEN", "NCCL_DEBUG", "GLOO_X", "TORCH_LOGS", "VLLM_USE_V1", "JUDGE_KEY", "OTHER", "VLLM_HOST_IP"):
        monkeypatch.setenv(name, f"my {name}")
    names = {"HF_TOKEN", "NCCL_DEBUG", "GLOO_X", "TORCH_LOGS", "VLLM_USE_V1", "JUDGE_KEY"}
    assert forwarded_environment(["JUDGE_KEY"]) == {name: f"my {name}" for name in names}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("JUDGE_KEY", r"ray\.forward_env=\['JUDGE_KEY'\]: JUDGE_KEY is not set in this shell"),
        ("JUDGE_KEY=abc", r"ray\.forward_env=\(not shown\): must have names of environment variables, without"),
    ],
)
def test_what_cannot_be_forwarded_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    config = Config(device=Device.cpu, ray=RayConfig(address="auto", forward_env=[name]))
    with pytest.raises(ConfigError, match=problem):
        check(config)
    monkeypatch.setenv("JUDGE_KEY", "mine")
    check(changed(config, ray__forward_env=["JUDGE_KEY"]))


def test_what_is_forwarded_goes_before_what_the_machine_has_but_for_its_interfaces_and_what_a_process_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of ray start")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "restored")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    forwarded = {"HF_TOKEN": "mine", "VLLM_PLUGINS": "mine"}
    take_environment(forwarded | {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}, own={"VLLM_PLUGINS": ""})
    names = ("HF_TOKEN", "VLLM_PLUGINS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    assert [os.environ[name] for name in names] == ["mine", "", "ib0", "eth0"]
