"""Shared between the system tests: one tiny model, one engine in this process, a Ray cluster for each module."""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engines.base import EngineSpec
from rollout.replica.replica_group import engine_env
from trainer.tiny.model import save_tiny_model

MAX_NUM_SEQS = 16


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, ["Question: Tom has 3 pens and buys 4 more.\nAnswer: 3+4=7\n#### 7"] * 4, seed=0)
    return folder


@pytest.fixture(scope="session")
def engine_spec(tiny_model: Path) -> EngineSpec:
    return EngineSpec(
        model_path=str(tiny_model),
        device="cpu",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_bytes=128 * 2**20,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=1,
        enforce_eager=True,
    )


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A real vLLM engine in this process, and the event loop it lives on."""

    engine: Any
    runner: asyncio.Runner
    model_path: Path

    async def every_one_has(self, count: int, num_tokens: int) -> None:
        """Returns when `count` requests run, each with so many tokens at least."""

        def holds() -> bool:
            counts = self.engine._llm.output_counts().values()
            return len(counts) == count and min(counts) >= num_tokens

        await until(holds)

    async def settled_counts(self) -> dict[str, int]:
        """Tokens of each request of a frozen engine, whose last ones may come after the answer to the pause."""
        counts, before = self.engine._llm.output_counts(), None
        while counts != before:
            await asyncio.sleep(0.3)
            counts, before = self.engine._llm.output_counts(), counts
        return counts


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


async def start_as_if_busy(spec: EngineSpec) -> Any:
    """An engine whose outputs of one step are taken in few at a time, as those of hundreds of requests are: then the
    answer to a pause can overtake some of them."""
    from rollout.engines.vllm.engine import VllmEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "2")
        engine = VllmEngine(spec)
        engine._llm._run_output_handler()  # it reads that now
    return engine


@pytest.fixture(scope="session")
def engine_host(engine_spec: EngineSpec, tiny_model: Path) -> Iterator[EngineHost]:
    os.environ.update(engine_env(engine_spec))
    with asyncio.Runner() as runner:
        engine = runner.run(start_as_if_busy(engine_spec))
        yield EngineHost(engine, runner, tiny_model)
        engine.shutdown()


@pytest.fixture(scope="session")
def small_spec(engine_spec: EngineSpec) -> EngineSpec:
    """KV cache for a handful of sequences only."""
    return replace(engine_spec, kv_cache_bytes=2 * 2**20, max_model_len=512)


@pytest.fixture(scope="module")
def process_as_it_was() -> Iterator[None]:
    """For train workers in this process: one owns its process, and sets the environment and the number of threads."""
    environment, num_threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """Not of the session: in the same process other modules start clusters of their own."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
