"""Shared between the system tests: one tiny model, a Ray cluster for each module."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout.engines.base import EngineSpec
from tests.support.engines import MAX_NUM_SEQS
from trainer.tiny.model import build_tokenizer, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    corpus = ["Question: Tom has 3 pens and buys 4 more.\nAnswer: 3+4=7\n#### 7"] * 4
    save_tiny_model(folder, build_tokenizer(corpus), seed=0)
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
