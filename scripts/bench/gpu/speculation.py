"""Speculative decoding by n-grams on one GPU: tokens per second with it and without, and how many drafts are taken."""

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from configs.schema import Staging
from rollout.engines.base import EngineSpec
from rollout.replica.replica_group import engine_env
from rollout.request_ids import RequestId
from rollout.types import GenerationRequest, SamplingParams
from scripts.bench.common import write_line
from scripts.bench.gpu.models import shape_of, write_config
from scripts.bench.gpu.outcome import Setting
from scripts.bench.gpu.updates import engine_spec

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
NUM_REQUESTS, NUM_TOKENS = 8, 1024
"""Few at once: drafts pay where an engine is not busy with a batch, as at the tail of a step."""


def measure_speculation(shape_name: str, setting: Setting) -> dict[str, float]:
    """Greedy answers of random weights repeat themselves, so that nearly all drafts are taken: an upper limit."""
    shape, dtype = shape_of(shape_name, setting), torch.float32 if setting.dry_run else torch.bfloat16
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    figures: dict[str, float] = {}
    with TemporaryDirectory(prefix="gpu_check-") as folder:
        write_config(shape, Path(folder), dtype)
        spec = replace(engine_spec(shape, Path(folder), Staging.host, setting.device), enforce_eager=setting.dry_run)
        for name, speculative in (("plain", None), ("ngram", NGRAM)):
            num_tokens = 64 if setting.dry_run else NUM_TOKENS
            found = asyncio.run(_of_engine(replace(spec, speculative=speculative), num_tokens))
            write_line(f"{name}: {found}")
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    figures["ngram_over_plain"] = figures["ngram_tokens_per_s"] / figures["plain_tokens_per_s"]
    return figures


async def _of_engine(spec: EngineSpec, num_tokens: int) -> dict[str, float]:
    os.environ.update(engine_env(spec))
    from rollout.engines.vllm.engine import VllmEngine  # vLLM, which reads the environment

    engine = VllmEngine(spec)
    try:
        return await _generate(engine, num_tokens, drafts=spec.speculative is not None)
    finally:
        engine.shutdown()


async def _generate(engine: Any, num_tokens: int, *, drafts: bool) -> dict[str, float]:
    await engine.tag_loaded(0)
    seconds = 0.0
    for round_number in range(2):  # the first captures and compiles
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            GenerationRequest(
                request_id=RequestId(ordinal=round_number, episode=index),
                prompt_ids=tuple(5 + (index + place) % 16 for place in range(64)),
                sampling=sampling,
            )
            for index in range(NUM_REQUESTS)
        ]
        before, started = engine.gauges(), time.perf_counter()
        await asyncio.gather(*map(engine.generate, requests))
        seconds, after = time.perf_counter() - started, engine.gauges()
    figures = {"tokens_per_s": NUM_REQUESTS * num_tokens / seconds}
    if drafts:
        drafted, accepted = (after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens"))
        figures |= {"drafted_tokens": drafted, "acceptance": accepted / max(1.0, drafted)}
    return figures
