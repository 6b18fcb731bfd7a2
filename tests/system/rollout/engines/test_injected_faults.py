"""Bugs that other frameworks have shipped, each put back by a patch of one place, on a real engine: every one is
noticed by what always runs, at the start or at the update in which it happens. docs/proof.md lists them; those that
need no engine are in tests/unit/scripts/observe/test_injected_faults.py.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema import Config, Layout, WeightSyncConfig
from configs.validate import ConfigError
from rollout.engines.base import EngineSpec, ServedAdapter
from rollout.engines.vllm import engine as vllm_engine
from rollout.engines.vllm.engine import VllmEngine
from rollout.replica.lifecycle import Replica, ReplicaState
from rollout.replica.replica import RolloutReplica
from rollout.types import Completion, FloatArray, Prompt, SamplingParams
from scripts.launch.replica_check import ReplicaCheck, StalePrefixError
from tests.support.adapters import factors, published
from tests.support.compose import changed
from tests.support.engines import EngineHost, hosted, prompt, push, request
from tests.support.weights import publish, random_weights
from trainer.batch import StepBatch
from weight_sync.published import PublishedTensors

RECEIVER = "tests.support.faulty_receiver.FaultyReceiver"
CONFIG = changed(
    replace(Config(), weight_sync=WeightSyncConfig(check_every=1)),
    trainer__layout=Layout.rows,
    rollout__temperature=0.7,
)
PROMPT = Prompt(ordinal=0, text="", token_ids=prompt(1, 60), ground_truth="")
versions = count(1000)


@pytest.fixture(scope="module")
def faulty_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "RECEIVER", RECEIVER)
        with hosted(engine_spec) as host:
            yield host


@pytest.fixture(scope="module")
def faulty_adapter_host(engine_spec: EngineSpec) -> Iterator[EngineHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "RECEIVER", RECEIVER)
        with hosted(replace(engine_spec, adapter=ServedAdapter(max_rank=8, layers=None))) as host:
            yield host


@dataclass
class Trainer:
    """The trainer's side, by transformers."""

    model: Any
    temperature: float

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        rows = await self.next_token_logprobs(batch)
        targets = np.empty(batch.num_tokens, np.int64)
        for micro_batch in batch.micro_batches[0]:
            targets[micro_batch.index] = micro_batch.tokens.targets
        return rows[np.arange(batch.num_tokens), targets]

    async def next_token_logprobs(self, batch: StepBatch) -> FloatArray:
        every = np.empty((batch.num_tokens, self.model.config.vocab_size), np.float32)
        for micro_batch in batch.micro_batches[0]:
            with torch.no_grad():
                logits = self.model(torch.as_tensor(micro_batch.input_ids)).logits.float() / self.temperature
            every[micro_batch.index] = logits.log_softmax(-1)[micro_batch.rows, micro_batch.sources].numpy()
        return every


class Run:
    """A replica on the engine, a trainer that takes small steps, and the comparison of both."""

    def __init__(self, host: EngineHost, config: Config = CONFIG):
        self.weights = random_weights(host.model_path, 7)
        self.replica = RolloutReplica("r", host.engine, config.weight_sync)
        model = AutoModelForCausalLM.from_pretrained(host.model_path, dtype=torch.float32).eval()
        self.trainer = Trainer(model, config.rollout.temperature)
        handle: Any = self.replica
        self.record = Replica(name="r", state=ReplicaState.READY, handle=handle, version=-1, is_verified=True)
        fleet: Any = type("Fleet", (), {"replicas": {"r": self.record}})()
        workers: Any = self.trainer
        self.check = ReplicaCheck(
            config=config,
            fleet=fleet,
            workers=workers,
            publishing=asyncio.Lock(),
            published=PublishedTensors(),
            prompt=PROMPT,
            report=lambda text: None,
        )

    async def start(self) -> None:
        await self.step(by=0.0)
        await self.check.compare(self.record.version)

    async def step(self, by: float = 1e-7) -> None:
        """Change the weights by a share of each number, and bring them to the replica."""
        version = next(versions)
        self.weights = {name: tensor * (1 + by) for name, tensor in self.weights.items()}
        self.trainer.model.load_state_dict(self.weights, strict=False)
        await self.check.remember(version)
        await push(self.replica, publish(self.weights, version))
        self.record.version = version

    async def step_and_ask(self) -> dict[str, float]:
        await self.step()
        await self.check.ask(self.record.version)
        return self.check.gauges()


# -- before any other update of the engine -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "named"),
    [("layers.1.self_attn.k_proj", "model.layers.1.self_attn.qkv_proj.weight"), ("embed_tokens", "model.embed_tokens")],
)
def test_a_fused_or_tied_tensor_that_the_trainer_leaves_out(faulty_host: EngineHost, left_out: str, named: str) -> None:
    weights = random_weights(faulty_host.model_path, 3)
    fewer = {name: tensor for name, tensor in weights.items() if left_out not in name}
    replica = RolloutReplica("r", faulty_host.engine, WeightSyncConfig())
    with pytest.raises(Exception, match=f"(has written|lacks tensors of the one before:) {named}"):
        faulty_host.run(push(replica, publish(fewer, next(versions))))
    assert replica.global_steps == -1


# -- on an engine that has its weights ---------------------------------------------------------------------------------


def test_a_sound_run_is_compared_without_a_finding(faulty_host: EngineHost) -> None:
    async def main() -> list[dict[str, float]]:
        run = Run(faulty_host)
        await run.start()
        return [run.check.gauges(), *[await run.step_and_ask() for _ in range(3)]]

    gaps = [gauges["weight_sync/logprob_diff"] for gauges in faulty_host.run(main())]
    assert len(gaps) == 4 and max(gaps) < 2e-5


def test_a_tensor_that_a_later_version_lacks(faulty_host: EngineHost) -> None:
    async def main() -> None:
        run = Run(faulty_host)
        await run.start()
        before = run.record.version
        fewer = {name: tensor for name, tensor in run.weights.items() if "layers.1.mlp.up_proj" not in name}
        with pytest.raises(Exception, match="lacks tensors of the one before: model.layers.1.mlp.up_proj.weight"):
            await push(run.replica, publish(fewer, next(versions)))
        assert run.replica.global_steps == before

    faulty_host.run(main())


@pytest.mark.slow
def test_an_error_of_several_workers_is_the_answer_to_no_later_call(engine_spec: EngineSpec) -> None:
    """vLLM reads the answers of workers up to the first that failed, and has the others for those of the next call."""

    async def main(host: EngineHost) -> None:
        weights, replica = random_weights(host.model_path, 7), RolloutReplica("r", host.engine, WeightSyncConfig())
        await push(replica, publish(weights, version := next(versions)))
        fewer = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match="lacks tensors of the one before: model.layers.1.mlp.up_proj.weight"
            ):
                await push(replica, publish(fewer, next(versions)))
        assert replica.global_steps == version and not (await replica.status()).torn
        await push(replica, publish(weights, version := next(versions)))
        assert replica.global_steps == version

    with hosted(replace(engine_spec, tensor_parallel_size=2)) as host:
        host.run(main(host))


def test_weights_that_were_not_delivered_while_the_version_goes_up(faulty_host: EngineHost) -> None:
    """The swap does nothing. The replica stays frozen, and another update makes it whole."""

    async def main() -> None:
        run = Run(faulty_host)
        await run.start()
        before, llm = run.record.version, faulty_host.engine._llm
        await llm.on_every_worker("receiver_break_swaps", True)
        try:
            with pytest.raises(Exception, match="live are other weights than those that were staged: model.embed_tok"):
                await run.step(by=1e-3)
        finally:
            await llm.on_every_worker("receiver_break_swaps", False)
        status = await run.replica.status()
        assert status.torn and status.frozen and run.replica.global_steps == before
        assert (await run.step_and_ask())["weight_sync/logprob_diff"] < 2e-5

    faulty_host.run(main())


@pytest.mark.slow
def test_an_adapter_that_was_not_delivered_while_the_version_goes_up(faulty_adapter_host: EngineHost) -> None:
    host = faulty_adapter_host

    async def main() -> None:
        replica, llm = RolloutReplica("r", host.engine, WeightSyncConfig()), host.engine._llm
        await push(replica, published(factors(host.model_path, 1), version := next(versions)))
        await llm.on_every_worker("receiver_break_swaps", True)
        try:
            with pytest.raises(Exception, match="live is another adapter than the one that was staged: model.layers.0"):
                await push(replica, published(factors(host.model_path, 2), next(versions)))
        finally:
            await llm.on_every_worker("receiver_break_swaps", False)
        assert (await replica.status()).torn and replica.global_steps == version
        await push(replica, published(factors(host.model_path, 2), next(versions)))

    host.run(main())


def test_weights_that_the_trainer_did_not_publish(faulty_host: EngineHost) -> None:
    """All bytes arrive, and are those of another version than the trainer has."""

    async def main() -> None:
        run = Run(faulty_host)
        await run.start()
        run.trainer.model.load_state_dict(random_weights(faulty_host.model_path, 8), strict=False)
        version = next(versions)
        await run.check.remember(version)
        await push(run.replica, publish(run.weights, version))
        run.record.version = version
        with pytest.raises(ConfigError, match="r is off by .* over 8 tokens"):
            await run.check.ask(version)

    faulty_host.run(main())


def test_the_prefix_cache_of_old_weights(faulty_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have changed by 1e-7, so that no logprob shows it."""

    async def main() -> None:
        run = Run(faulty_host)
        monkeypatch.setattr(faulty_host.engine._llm, "salt_prefix_cache", False)
        await run.start()
        with pytest.raises(StalePrefixError, match="r has taken [0-9]+ tokens from its prefix cache in version"):
            await run.step_and_ask()

    faulty_host.run(main())


def test_logprobs_that_are_shifted_by_one(faulty_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    completion = VllmEngine._completion

    def shifted(engine: VllmEngine, *args: Any) -> Completion:
        right = completion(engine, *args)
        return replace(right, logprobs=np.roll(right.logprobs, 1))

    monkeypatch.setattr(VllmEngine, "_completion", shifted)
    with pytest.raises(ConfigError, match="r is off by .* over 64 tokens"):
        faulty_host.run(Run(faulty_host).start())


@pytest.mark.parametrize("at", ["start", "update"])
def test_logprobs_of_another_temperature(faulty_host: EngineHost, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    params = vllm_engine._sampling_params

    def warmer(sampling: SamplingParams, *args: Any) -> Any:
        return params(replace(sampling, temperature=1.0), *args)

    async def main() -> None:
        run = Run(faulty_host)
        if at == "update":
            await run.start()
        monkeypatch.setattr(vllm_engine, "_sampling_params", warmer)
        with pytest.raises(ConfigError, match=f"r is off by .* over {64 if at == 'start' else 8} tokens"):
            await (run.start() if at == "start" else run.step_and_ask())

    faulty_host.run(main())


@pytest.mark.slow
def test_an_abort_that_does_nothing(faulty_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ignored(self: Any, request_id: Any, *args: Any, **options: Any) -> None:
        """As vLLM does with names that it does not know."""

    async def main() -> None:
        run = Run(faulty_host)
        await run.start()
        running = request(prompt(3, 20), max_tokens=600)
        task = asyncio.create_task(run.replica.generate_group([running]))
        await faulty_host.every_one_has(1, 3)
        with monkeypatch.context() as patch:
            patch.setattr(type(faulty_host.engine._llm), "abort", ignored)
            with pytest.raises(RuntimeError, match=f"vLLM has ignored the abort of {running.request_id}, and runs on"):
                await run.replica.abort([str(running.request_id)])
        assert not task.done()
        assert await run.replica.abort([str(running.request_id)]) == [str(running.request_id)]
        assert [completion.finish_reason for completion in await task] == ["abort"]

    faulty_host.run(main())
