"""Spare processes of train workers, in real Ray actors on GPUs that Ray is only told of: which of them takes over."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group

from configs.schema import Config, TrainerConfig
from tests.support.actors import no_redirect
from trainer.worker.worker_group import TrainWorkerGroup

CONFIG = Config(trainer=TrainerConfig(num_ranks=2, spare_processes=True))


class Worker:
    """Knows where it runs, and what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def setup(self, *_: Any) -> int:
        self.calls.append("setup")
        return 0

    def import_model(self, model_path: str) -> None:
        self.calls.append(f"import {model_path}")

    def told(self) -> tuple[int, str, list[str]]:
        return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], self.calls


def make_worker(**_: Any) -> Any:
    return Worker()


@pytest.fixture
def group() -> Iterator[TrainWorkerGroup]:
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    options: Any = {"make_sender": None, "make_worker": make_worker}
    placement = placement_group([{"CPU": 1, "GPU": 1}] * 2)
    group = TrainWorkerGroup(config=CONFIG, device="cuda", on_start=no_redirect, placement=placement, **options)
    yield group
    group.kill()
    ray.shutdown()


@pytest.mark.slow
def test_a_spare_has_the_gpu_of_its_rank_and_takes_over_and_one_that_died_is_replaced(group: TrainWorkerGroup) -> None:
    async def told(actors: list[Any]) -> list[tuple[int, str, list[str]]]:
        return await asyncio.gather(*(actor.call.remote(lambda worker: worker.told()) for actor in actors))

    async def scenario() -> None:
        await group.setup("a-model")
        assert group.spares == [], "nothing imports beside the start"
        group.keep_spares()
        ranks, spares = await told(group.actors), await told(group.spares)
        assert {gpu for _, gpu, _ in ranks} == {"0", "1"}, "each rank has its own"
        assert [gpu for _, gpu, _ in spares] == [gpu for _, gpu, _ in ranks]
        assert [calls for _, _, calls in spares] == [["import a-model"]] * 2
        dead = psutil.Process(spares[1][0])
        dead.kill()
        await asyncio.to_thread(dead.wait, 60)
        await group.start_again()
        group.keep_spares()
        now = await told(group.actors)
        assert now[0] == (spares[0][0], spares[0][1], ["import a-model", "setup"]), "the spare"
        assert now[1][0] not in {ranks[1][0], spares[1][0]} and now[1][1:] == (ranks[1][1], ["setup"]), "a new process"
        assert len({pid for pid, _, _ in [*now, *await told(group.spares)]}) == 4, "with new spares"

    asyncio.run(asyncio.wait_for(scenario(), 300))
