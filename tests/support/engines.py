"""A real vLLM engine in this process, requests for it, updates of it, and the truth its answers are held against."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from rollout.engines.base import EngineSpec
from rollout.replica.replica import RolloutReplica
from rollout.replica.replica_group import engine_env
from rollout.request_ids import RequestId
from rollout.types import Completion, GenerationRequest, SamplingParams
from tests.support.weights import FIRST_TOKEN, publish, release, tag_of
from trainer.tiny.model import build_tokenizer, save_tiny_model
from weight_sync.protocol import Manifest

MAX_NUM_SEQS = 16
request_numbers = count()


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A real vLLM engine in this process, and the event loop it lives on."""

    engine: Any
    runner: asyncio.Runner
    model_path: Path

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 120))

    async def every_one_has(self, count: int, num_tokens: int) -> None:
        """Returns when `count` requests run, each with so many tokens at least."""

        def holds() -> bool:
            counts = self.engine._llm.output_counts().values()
            return len(counts) == count and min(counts) >= num_tokens

        await until(holds)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


@contextmanager
def hosted(spec: EngineSpec) -> Iterator[EngineHost]:
    """An engine whose outputs of one step are taken in few at a time, as those of hundreds of requests are: then the
    answer to a pause can overtake some of them. The process has the environment of an engine while that starts, and not
    after: other tests compile."""

    async def start() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (engine_env(spec) | {"VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "2"}).items():
                patch.setenv(name, value)
            from rollout.engines.vllm.engine import VllmEngine

            engine = VllmEngine(spec)
            engine._llm._run_output_handler()  # it reads that now
        return engine

    with asyncio.Runner() as runner:
        engine = runner.run(start())
        yield EngineHost(engine, runner, Path(spec.model_path))
        engine.shutdown()


BOTH_SCHEDULERS = pytest.mark.parametrize("host", ["engine_host", "async_host"], indirect=True)


def request(prompt_ids: tuple[int, ...], **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | sampling))
    return GenerationRequest(
        request_id=RequestId(ordinal=next(request_numbers)), prompt_ids=prompt_ids, sampling=params
    )


def tiny_gpu_spec(folder: Path, **changes: Any) -> EngineSpec:
    """Save a tiny model, and return how an engine runs it on a GPU."""
    save_tiny_model(folder, build_tokenizer(["Question: 3+4\nAnswer: 7"]), seed=0)
    return gpu_spec(folder, **changes)


def gpu_spec(model_path: Path, *, engine_args: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> EngineSpec:
    """Return how an engine runs a model on a GPU: with captured graphs, and without the compiler."""
    spec = EngineSpec(
        model_path=str(model_path),
        device="cuda",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_bytes=256 * 2**20,
        gpu_memory_utilization=0.4,
        tensor_parallel_size=1,
        enforce_eager=False,
        engine_args={"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, **engine_args},
    )
    return replace(spec, **changes)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 250), k=length))


@asynccontextmanager
async def staged(
    engine: Any, weights: dict[str, torch.Tensor], version: int
) -> AsyncIterator[Callable[[bool], Coroutine[Any, Any, None]]]:
    """Stage weights, and yield the function that makes them live. Requests that begin now cannot end before, however
    slow staging is."""
    manifest = publish(weights, version)

    async def swap(clear_cache: bool) -> None:
        await pause(engine, clear_cache)
        tags = await engine.swap(version)
        assert tags == [tag_of(manifest)]
        await resume(engine)

    try:
        await engine.stage(manifest)
        yield swap
    finally:
        release()


async def update(engine: Any, weights: dict[str, torch.Tensor], version: int, clear_cache: bool = False) -> None:
    async with staged(engine, weights, version) as swap:
        await swap(clear_cache)


async def push(replica: RolloutReplica, manifest: Manifest) -> None:
    """Bring a replica to what was published, and remove that."""
    try:
        await replica.stage(manifest)
        await replica.commit(tag_of(manifest))
    finally:
        release()


async def pause(engine: Any, clear_cache: bool = False) -> None:
    await engine.admission.hold()
    await engine.freeze(clear_cache)


async def resume(engine: Any) -> None:
    await engine.thaw()
    engine.admission.release()


def reference_logprobs(host: EngineHost, weights: dict[str, torch.Tensor], tokens: list[int], start: int) -> np.ndarray:
    """Logprobs of tokens[start:] by transformers, with the same weights."""
    model = AutoModelForCausalLM.from_pretrained(host.model_path, dtype=torch.float32)
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return F.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[start - 1 :, 0].numpy()


def assert_tokens_equal_tags(completion: Completion) -> None:
    count = len(completion.token_ids)
    assert len(completion.logprobs) == count
    assert [0, *(span.end for span in completion.spans)] == [*(span.start for span in completion.spans), count]
    for span in completion.spans:
        assert set(completion.token_ids[span.start : span.end]) == {FIRST_TOKEN + span.global_steps}
