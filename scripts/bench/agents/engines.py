"""A real vLLM engine with a tiny untrained model."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.engines.base import Engine, EngineSpec
from scripts.bench.agents.episodes import MAX_RESPONSE_TOKENS, PROMPT_TOKENS, Job


@asynccontextmanager
async def started_vllm(job: Job) -> AsyncIterator[Engine]:
    from rollout.replica.replica_group import engine_env
    from trainer.tiny.model import build_tokenizer, save_tiny_model

    with TemporaryDirectory(prefix="bench_agents-") as folder:
        model = Path(folder) / "model"
        save_tiny_model(model, build_tokenizer(["2 + 2 = 4\n"] * 8), seed=0)
        spec = EngineSpec(
            model_path=str(model),
            device="cpu",
            dtype="float32",
            max_model_len=PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
            max_num_seqs=job.seats,
            kv_cache_bytes=2**28,
            gpu_memory_utilization=0.5,
            tensor_parallel_size=1,
            enforce_eager=True,
        )
        os.environ.update(engine_env(spec) | {"VLLM_LOGGING_LEVEL": "ERROR"})
        from rollout.engines.vllm.engine import VllmEngine  # reads the environment

        engine = VllmEngine(spec)
        try:
            yield engine
        finally:
            engine.shutdown()
