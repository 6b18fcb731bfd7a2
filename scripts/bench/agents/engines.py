"""The engines of the benchmark: one on a virtual clock, and real vLLM with a tiny untrained model."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout.engines.base import Engine, EngineSpec
from scripts.bench.agents.episodes import MAX_RESPONSE_TOKENS, PROMPT_TOKENS, Job, Outcome, run_groups, started
from scripts.bench.simulated_engine import SimulatedEngine
from scripts.bench.virtual_clock import run_virtual

SIMULATED_TOKEN_S = 0.01


def run_simulated(job: Job, arm: str) -> Outcome:
    """The same job always has the same outcome."""

    async def run() -> Outcome:
        engine = SimulatedEngine(
            length_of=lambda request: request.sampling.max_tokens, step_s=SIMULATED_TOKEN_S, max_num_seqs=job.seats
        )
        return await run_groups(job, arm, await started(engine))

    return run_virtual(run())


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
