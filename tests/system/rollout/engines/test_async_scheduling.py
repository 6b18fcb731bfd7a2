"""Asynchronous scheduling, vLLM's default on GPUs: the next step is under way before the tokens of the last are known.

vLLM switches it off on a CPU for want of a use, so it is switched on again behind vLLM's back: the scheduler, the queue
of steps and the model runner are the real ones, and tests.support.async_on_cpu stands in for CUDA's streams and events.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.base import EngineSpec
from rollout.replica.replica_group import engine_env
from tests.system.conftest import EngineHost, start_as_if_busy
from tests.system.rollout.engines import test_engine, test_pause_modes, test_versions


@pytest.fixture(scope="module")
def host(engine_spec: EngineSpec, tiny_model: Path) -> Iterator[EngineHost]:
    os.environ.update(engine_env(engine_spec))
    from vllm.platforms.cpu import CpuPlatform

    from rollout.engines.vllm import engine as vllm

    update_config = CpuPlatform.check_and_update_config

    def with_async_scheduling(_platform: type[CpuPlatform], config: Any) -> None:
        update_config(config)
        config.scheduler_config.async_scheduling = True

    with asyncio.Runner() as runner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuPlatform, "check_and_update_config", classmethod(with_async_scheduling))
            patch.setattr(vllm, "RECEIVER", "tests.support.async_on_cpu.AsyncReceiver")
            engine = runner.run(start_as_if_busy(engine_spec))
        yield EngineHost(engine, runner, tiny_model)
        engine.shutdown()


def test_steps_are_scheduled_ahead(host: EngineHost) -> None:
    """Else the tests below would hold for nothing."""
    scheduler = host.engine._llm.vllm_config.scheduler_config
    assert scheduler.get_scheduler_cls().__name__ == "AsyncScheduler"
    assert host.engine._llm.vllm_config.max_concurrent_batches == 2
    assert test_engine.run(host, host.engine._llm.on_every_worker("runs_async")) == [True]


@pytest.mark.parametrize("native", [True, False], ids=["labels-of-the-core", "counts-behind-the-barrier"])
def test_every_token_equals_its_tag(host: EngineHost, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    test_engine.test_every_token_equals_its_tag(host, native, monkeypatch)


def test_logprobs_are_those_of_the_live_weights(host: EngineHost) -> None:
    test_engine.test_logprobs_are_those_of_the_live_weights(host)


def test_keep_changes_nothing_of_what_is_generated(host: EngineHost) -> None:
    test_engine.test_keep_changes_nothing_of_what_is_generated(host)


def test_a_prefill_split_over_steps_is_of_one_version(host: EngineHost) -> None:
    test_versions.test_a_prefill_split_over_steps_is_of_one_version(host)


def test_pause_abort_ends_requests_with_the_tokens_they_have(host: EngineHost) -> None:
    test_pause_modes.test_pause_abort_ends_requests_with_the_tokens_they_have(host)
