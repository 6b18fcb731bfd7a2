"""The engine that a test runs on: as vLLM schedules on a CPU, or ahead, as it does on GPUs."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollout.engines.base import EngineSpec
from tests.support.engines import EngineHost, hosted


@pytest.fixture
def host(request: pytest.FixtureRequest) -> EngineHost:
    """Return a CPU's engine or, where a test asks for it by BOTH_SCHEDULERS, also one that schedules ahead."""
    return request.getfixturevalue(getattr(request, "param", "engine_host"))


@pytest.fixture(scope="session")
def engine_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with hosted(engine_spec) as host:
        yield host


@pytest.fixture(scope="session")
def async_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    """Asynchronous scheduling, vLLM's default on GPUs: the next step is under way before the tokens of the last are
    known. vLLM switches it off on a CPU for want of a use, so it is switched on again behind vLLM's back: the
    scheduler, the queue of steps and the model runner are the real ones, and tests.support.async_on_cpu stands in for
    CUDA's streams and events."""
    from vllm.platforms.cpu import CpuPlatform

    from rollout.engines.vllm import engine as vllm

    update_config = CpuPlatform.check_and_update_config

    def with_async_scheduling(_platform: type[CpuPlatform], config: Any) -> None:
        update_config(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(with_async_scheduling))
        patch.setattr(vllm, "RECEIVER", "tests.support.async_on_cpu.AsyncReceiver")
        with hosted(engine_spec) as host:
            patch.undo()
            scheduler = host.engine._llm.vllm_config.scheduler_config
            assert scheduler.get_scheduler_cls().__name__ == "AsyncScheduler"
            assert host.engine._llm.vllm_config.max_concurrent_batches == 2
            assert host.run(host.engine._llm.on_every_worker("runs_async")) == [True]
            yield host


@pytest.fixture(params=[True, False], ids=["labels-of-the-core", "counts-behind-the-barrier"])
def native(host: EngineHost, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Choose whose labels tell the version of a token: vLLM's own (0.32 and later), or our counts, which older ones
    need."""
    from rollout.engines.vllm import client as gated_llm

    if request.param and not gated_llm.HAS_NATIVE_VERSIONS:
        pytest.skip("this vLLM has no labels of its own")
    monkeypatch.setattr(host.engine, "_native_versions", request.param)
    monkeypatch.setattr(gated_llm, "HAS_NATIVE_VERSIONS", request.param)
    return request.param
