"""Every replica is compared with the trainer at the start and after updates, under one version of the weights."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from configs.model import LoraConfig, LoraServing
from configs.schema import Config, WeightSyncConfig
from configs.validate import ConfigError
from rollout.replica.lifecycle import Replica, ReplicaState
from rollout.types import Completion, FloatArray, Prompt, SamplingParams, VersionSpan
from scripts.launch.replica_check import CANARY_TOKENS, NUM_PLACES, NUM_TOKENS, ReplicaCheck, StalePrefixError
from tests.support.compose import changed
from tests.support.fakes import make_manifest
from trainer.batch import StepBatch
from weight_sync.protocol import TensorEntry
from weight_sync.published import PublishedTensors

PROMPT = Prompt(ordinal=0, text="", token_ids=tuple(range(10, 30)), ground_truth="")


VOCABULARY = 50


@dataclass
class Handle:
    """A replica that samples token 5 with logprob -1, off by `gap`."""

    version: int = 3
    gap: float = 0.0
    error: Exception | None = None
    cached: int = 0
    """Tokens that its prefix cache gives."""
    requests: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.may_answer.set()

    async def sample(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> Completion:
        self.requests.append((prompt_ids, sampling))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        length = sampling.max_tokens
        return Completion(
            token_ids=np.full(length, 5, np.int32),
            logprobs=np.full(length, -1 + self.gap, np.float32),
            spans=(VersionSpan(0, length, self.version),),
            finish_reason="length",
            cached_tokens=self.cached,
        )


@dataclass
class Workers:
    batches: list[StepBatch] = field(default_factory=list)
    texts: list[StepBatch] = field(default_factory=list)

    async def logprobs(self, batch: StepBatch) -> FloatArray:
        self.batches.append(batch)
        assert batch.num_trained == batch.num_tokens
        return np.full(batch.num_tokens, -1, np.float32)

    async def next_token_logprobs(self, batch: StepBatch) -> FloatArray:
        self.texts.append(batch)
        logprobs = np.full((batch.num_tokens, VOCABULARY), -9, np.float32)
        logprobs[:, 5] = -1
        return logprobs


class Fleet:
    def __init__(self, **handles: Handle):
        self.replicas = {name: self.record(name, handle) for name, handle in handles.items()}

    def record(self, name: str, handle: Handle, state: ReplicaState = ReplicaState.READY) -> Replica:
        version: Any = handle
        return Replica(name=name, state=state, handle=version, version=handle.version, is_verified=True)

    def serve(self, version: int) -> None:
        for replica in self.replicas.values():
            handle: Any = replica.handle
            replica.version = handle.version = version


def make(fleet: Fleet, config: Config | None = None) -> tuple[ReplicaCheck, Workers, list[str]]:
    workers, told = Workers(), []
    given: Any = {"fleet": fleet, "workers": workers, "published": PublishedTensors()}
    check = ReplicaCheck(
        config=config or Config(), publishing=asyncio.Lock(), prompt=PROMPT, report=told.append, **given
    )
    return check, workers, told


async def update(check: ReplicaCheck, fleet: Fleet, version: int) -> bool:
    """Return whether the update to the version was compared."""
    await check.remember(version)
    fleet.serve(version)
    before = check.num_requests
    await check.ask(version)
    return check.num_requests > before


async def test_all_replicas_are_compared_at_the_start_in_one_pass() -> None:
    first, second = Handle(), Handle(gap=1e-6)
    check, workers, told = make(
        Fleet(a=first, b=second), changed(Config(), rollout__top_p=0.5, rollout__temperature=0.7)
    )
    await check.compare(3)
    apart = "at most {} nats apart over 64 tokens"
    assert told == [
        f"{name} computes the trainer's logprobs: {apart.format(gap)}" for name, gap in (("a", "0"), ("b", "1e-06"))
    ]
    [batch] = workers.batches
    assert batch.num_tokens == 2 * NUM_TOKENS and check.num_requests == 2 * (1 + NUM_PLACES)
    prompt_ids, sampling = first.requests[0]
    assert prompt_ids == PROMPT.token_ids and sampling.max_tokens == NUM_TOKENS
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.ignore_eos) == (0.7, 1, -1, True)
    assert check.gauges() == {"weight_sync/logprob_diff": pytest.approx(1e-6, rel=0.1)} and check.gauges() == {}


async def test_a_replica_is_asked_in_places_of_a_text_that_the_trainer_computes_the_longest_part_first() -> None:
    fleet = Fleet(a=(handle := Handle()))
    check, workers, _ = make(fleet)
    await check.compare(3)
    text = [*reversed(PROMPT.token_ids), *PROMPT.token_ids] * 4
    lengths = [CANARY_TOKENS * number // NUM_PLACES for number in range(NUM_PLACES, 0, -1)]
    assert [ids for ids, _ in handle.requests[1:]] == [tuple(text[:length]) for length in lengths]
    assert {sampling.max_tokens for _, sampling in handle.requests[1:]} == {1}
    [batch] = workers.texts
    [[micro_batch]] = batch.micro_batches
    assert sorted(micro_batch.sources.tolist()) == sorted(length - 1 for length in lengths)
    assert micro_batch.input_ids[0, : CANARY_TOKENS - 1].tolist() == text[: CANARY_TOKENS - 1]


@pytest.mark.parametrize(
    ("every", "interval", "compared"),
    [(4, 1, [1, 4, 8]), (0, 1, []), (1, 1, list(range(1, 11))), (2, 2, [2, 4, 8])],
)
async def test_the_first_update_is_compared_and_every_nth(every: int, interval: int, compared: list[int]) -> None:
    sync = WeightSyncConfig(check_every=every, interval=interval)
    check, workers, _ = make(fleet := Fleet(a=Handle(version=0)), replace(Config(), weight_sync=sync))
    await check.compare(0)
    assert [version for version in range(1, 11) if await update(check, fleet, version)] == compared
    assert len(workers.texts) == 1 + len(compared) and len(workers.batches) == 1, "the trainer waits for no replica"


@pytest.mark.parametrize("prompt_ids", [(7, 5, 7, 5, 7), (0, 0, 0), (6,) * 40, (3, 4)])
async def test_the_text_begins_as_no_request_of_the_run(prompt_ids: tuple[int, ...]) -> None:
    """Not even where a prompt is the same backwards: what the run has computed must give nothing."""
    check, _, _ = make(Fleet(a=(handle := Handle())))
    check.prompt = replace(PROMPT, token_ids=prompt_ids)
    await check.compare(3)
    assert {ids[0] == prompt_ids[0] for ids, _ in handle.requests[1:]} == {False}


@pytest.mark.parametrize("at", ["start", "update"])
async def test_a_replica_that_computes_otherwise_is_refused_by_name(at: str) -> None:
    other = Handle(version=3)
    check, _, _ = make(fleet := Fleet(a=Handle(), b=other))
    if at == "update":
        await check.compare(3)
    other.gap = 0.13
    with pytest.raises(ConfigError, match=r"^trainer.max_logprob_diff=None: .* b is off by 0.13 nats .* 0.13 at most"):
        await (check.compare(3) if at == "start" else update(check, fleet, 4))


async def test_a_difference_names_the_tensors_that_were_published_without_a_change() -> None:
    check, _, _ = make(fleet := Fleet(a=(handle := Handle(version=0))))
    names = ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "model.layers.3.a.weight", "lm_head.w"]
    for version, frozen in ((0, 4), (1, 3)):
        entries = tuple(TensorEntry(name, "float32", (1,), 0, 4) for name in names)
        checksums = tuple(0 if index < frozen else version for index in range(4))
        manifest = replace(make_manifest(version), tensors=entries, checksums=(checksums,))
        check.published.note(manifest)
    await check.compare(0)
    handle.gap = 0.5
    with pytest.raises(ConfigError, match=r"change since version 0 or later: embedding, layer 3 \(2 tensors\); all ot"):
        await update(check, fleet, 1)


async def test_a_prefix_of_older_weights_is_refused() -> None:
    """However small the difference is: after a step with a small learning rate nothing else shows it."""
    check, _, _ = make(fleet := Fleet(a=(handle := Handle(version=0))))
    await check.compare(0)
    assert await update(check, fleet, 1)
    handle.cached = 96
    assert not await update(check, fleet, 2)
    with pytest.raises(
        StalePrefixError, match="^a has taken 96 tokens from its prefix cache in version 20, and nobody"
    ):
        await update(check, fleet, 20)


async def test_one_that_joins_is_compared_at_the_next_update() -> None:
    fleet = Fleet(a=Handle(version=4))
    check, _, _ = make(fleet, replace(Config(), weight_sync=WeightSyncConfig(interval=2, check_every=0)))
    await check.compare(4)
    assert not await update(check, fleet, 6)
    fleet.replicas["b"] = fleet.record("b", late := Handle(version=6, gap=0.5), ReplicaState.SYNCING)
    assert not check.is_due(8), "it is not in service"
    fleet.replicas["b"].state = ReplicaState.READY
    assert check.is_due(8) and not check.is_due(7), "there is no update"
    with pytest.raises(ConfigError, match="b is off by 0.5"):
        await update(check, fleet, 8)
    assert len(late.requests) == NUM_PLACES


async def test_what_cannot_answer_or_serves_newer_weights_by_then_is_compared_later() -> None:
    lost, newer = Handle(error=OSError("gone")), Handle(version=4)
    fleet = Fleet(a=lost, b=newer)
    fleet.replicas["b"].version = 3
    check, _, told = make(fleet, replace(Config(), weight_sync=WeightSyncConfig(check_every=0)))
    await check.compare(3)
    assert told and all(text.startswith("a was not compared with the trainer, and is after a l") for text in told)
    lost.error = None
    assert await update(check, fleet, 4)
    assert not await update(check, fleet, 5)


async def test_a_short_context_takes_less_of_the_prompt_and_of_the_text() -> None:
    config = changed(Config(), data__max_prompt_tokens=60, rollout__max_response_tokens=9)
    check, _, _ = make(Fleet(a=(handle := Handle())), config)
    await check.compare(3)
    prompt_ids, sampling = handle.requests[0]
    assert prompt_ids == PROMPT.token_ids[:5] and sampling.max_tokens == NUM_TOKENS
    assert len(handle.requests[1][0]) == CANARY_TOKENS
    tiny = changed(Config(), data__max_prompt_tokens=2, rollout__max_response_tokens=3)
    check, _, _ = make(Fleet(a=(handle := Handle())), tiny)
    await check.compare(3)
    assert handle.requests[0][1].max_tokens == 4
    assert [len(prompt_ids) for prompt_ids, _ in handle.requests[1:]] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("config", "is_on"),
    [
        (Config(), True),
        (changed(Config(), trainer__max_logprob_diff=0.0), False),
        (changed(Config(), rollout__engine_args={"quantization": "fp8"}), False),
        (changed(Config(), rollout__engine_args={"quantization": "fp8"}, trainer__max_logprob_diff=0.5), True),
        (changed(Config(), model__lora=LoraConfig(rank=8, serve=LoraServing.adapter, served_path="q")), False),
        (changed(Config(), model__lora=LoraConfig(rank=8, serve=LoraServing.adapter)), True),
    ],
)
async def test_replicas_that_serve_other_weights_by_choice_are_compared_only_where_a_key_says_so(
    config: Config, is_on: bool
) -> None:
    check, workers, _ = make(Fleet(a=Handle()), config)
    await check.compare(3)
    assert bool(workers.batches) is check.is_due(4) is is_on


async def test_a_text_that_an_update_overtook_says_nothing_about_the_prefix_cache_of_the_next_version() -> None:
    """It was computed in the version that is asked of next, and is rightly in the cache then."""
    check, _, _ = make(fleet := Fleet(a=(handle := Handle(version=0))), changed(Config(), weight_sync__check_every=1))
    await check.compare(0)
    await check.remember(1)
    fleet.serve(1)
    handle.version = 2
    await check.ask(1)
    handle.cached = 32
    assert await update(check, fleet, 2) and check.gauges()
    with pytest.raises(StalePrefixError, match="in version 3, and nobody"):
        await update(check, fleet, 3)


async def test_one_that_has_not_answered_is_not_asked_again_and_the_others_are() -> None:
    fleet = Fleet(a=(slow := Handle(version=0)), b=(other := Handle(version=0)))
    check, _, _ = make(fleet, changed(Config(), weight_sync__check_every=1))
    await check.compare(0)
    slow.may_answer.clear()
    await check.remember(1)
    fleet.serve(1)
    asking = asyncio.create_task(check.ask(1))
    await asyncio.sleep(0)
    assert not await update(check, fleet, 2), "both are being asked"
    while len(other.requests) < 1 + 2 * NUM_PLACES or check._asking != {"a"}:
        await asyncio.sleep(0)
    assert await update(check, fleet, 3)
    assert (len(slow.requests), len(other.requests)) == (2 + NUM_PLACES, 1 + 3 * NUM_PLACES)
    slow.cached = 32
    slow.may_answer.set()
    await asking
    assert await update(check, fleet, 4), "what it has computed meanwhile, it has computed in some version"
