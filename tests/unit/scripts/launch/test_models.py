"""Models that are made before a run: a warm-up may take longer than a replica may take to start."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest

from configs.schema import Config
from scripts.launch import models
from tests.support.compose import changed
from tests.support.fakes import run_virtual
from trainer.tracking.console import PlainConsole

STEP_S = 10.0


class SlowWarmUp:
    """A task of Ray that yields a reference for each step, and then one of the folder."""

    def remote(self, config: Config, kept: object) -> AsyncIterator[Any]:
        async def answer(event: object) -> object:
            return event

        async def steps() -> AsyncIterator[Any]:
            for step in range(1, config.model.warmup_steps + 1):
                await asyncio.sleep(STEP_S)
                yield answer((step, 0.5))
            yield answer("/cache/warm")

        return steps()


@pytest.mark.parametrize(("timeout_s", "is_made"), [(3600.0, True), (660.0, False)])
def test_a_warm_up_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch, timeout_s: float, is_made: bool) -> None:
    """Beside other work 1,000 steps took eleven minutes, which were counted against rollout.start_timeout_s."""
    monkeypatch.setattr(models, "driver_task", lambda *_, **__: SlowWarmUp())
    config = changed(Config(), model__warmup_steps=67, model__warmup_timeout_s=timeout_s)
    assert config.rollout.start_timeout_s < config.model.warmup_steps * STEP_S < Config().model.warmup_timeout_s
    making = models.policy_model(config, "untrained", PlainConsole(60, io.StringIO()))
    if is_made:
        assert run_virtual(making) == "/cache/warm"
    else:
        with pytest.raises(TimeoutError, match=r"warm-up of the tiny model took longer than model.warmup_timeout_s="):
            run_virtual(making)
