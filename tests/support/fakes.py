"""Small stand-ins for the parts around the one under test, and a clock that does not tick by itself."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np

from configs.schema import Staging, WeightSyncConfig
from rollout.engines.simulated import SimulatedEngine, simulated_manifest
from rollout.engines.virtual_clock import run_virtual as run_virtual
from rollout.replica.replica import RolloutReplica
from rollout.request_ids import RequestId
from rollout.types import (
    Completion,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TokenSequence,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from weight_sync.protocol import Manifest, PublishOrder, WeightTag

AsyncTest = Callable[..., Awaitable[None]]
Given = Callable[[], AbstractAsyncContextManager[tuple[Any, ...]]]


def as_test(num_given: int, given: Given, test: AsyncTest) -> Callable[..., None]:
    """Return a test, on the virtual clock, whose first parameters are the first of what `given` gives. The others are
    pytest's."""

    async def main(params: dict[str, Any]) -> None:
        async with given() as arguments:
            await test(*arguments[:num_given], **params)

    @wraps(test)
    def run(**params: Any) -> None:
        run_virtual(main(params))

    del run.__wrapped__
    parameters = list(inspect.signature(test).parameters.values())
    run.__signature__ = inspect.Signature(parameters[num_given:])
    return run


async def settle() -> None:
    """Let every other task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()


# -- groups ------------------------------------------------------------------------------------------------------------


def make_prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal=ordinal, text=f"prompt {ordinal}", token_ids=(1, 2), ground_truth=str(ordinal))


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Of tokens that these versions sampled."""
    starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(VersionSpan(start, end, versions[start]) for start, end in zip(starts, ends, strict=False))


def make_trajectory(*versions: int) -> Trajectory:
    """One token per version: make_trajectory(4, 4, 5) has the spans [0, 2) -> 4 and [2, 3) -> 5."""
    sequence = TokenSequence(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.zeros(len(versions), np.int32),
        loss_mask=np.ones(len(versions), np.bool_),
        rollout_logprobs=np.zeros(len(versions), np.float32),
        spans=spans_of(versions),
    )
    return Trajectory(
        sequences=(sequence,),
        reward=0.0,
        finish_reason="stop",
        text="",
        replica="r0",
    )


def make_group(ordinal: int, *versions: int, group_size: int = 1) -> TrajectoryGroup:
    """All rewards are 0."""
    return TrajectoryGroup(prompt=make_prompt(ordinal), trajectories=(make_trajectory(*versions),) * group_size)


def make_mixed_group(ordinal: int, *versions: int) -> TrajectoryGroup:
    """One of two answers is right."""
    wrong = make_trajectory(*versions)
    return TrajectoryGroup(prompt=make_prompt(ordinal), trajectories=(wrong, replace(wrong, reward=1.0)))


def make_completion(
    tokens: Sequence[int], versions: Sequence[int], finish_reason: str, cached_tokens: int = 0
) -> Completion:
    """Logprobs are a tenth of the token, below zero."""
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32) / 10,
        spans=spans_of(versions),
        finish_reason=finish_reason,
        cached_tokens=cached_tokens,
    )


# -- engines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedId(RequestId):
    """Has the name that a test gives it, as a request over HTTP has the name that its client gives it."""

    name: str
    ordinal: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(NamedId, name=self.name, part=self.part), ()

    def __str__(self) -> str:
        return self.name


def make_request(name: str, num_tokens: int) -> GenerationRequest:
    """`name`: the text of a RequestId, or any other."""
    request_id = RequestId.parse(name) or NamedId(name=name)
    return GenerationRequest(request_id=request_id, prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=num_tokens))


def start(engine: SimulatedEngine, name: str, num_tokens: int) -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.generate(make_request(name, num_tokens)))


def answer(completion: Completion) -> tuple[int, str]:
    return len(completion.token_ids), completion.finish_reason


make_manifest = simulated_manifest


def make_tag(global_steps: int) -> WeightTag:
    """Of the weights of `make_manifest`."""
    checksum = make_manifest(global_steps).checksum
    assert checksum is not None
    return WeightTag(global_steps, checksum)


def make_order(global_steps: int) -> PublishOrder:
    """To nobody."""
    return PublishOrder(global_steps=global_steps, receivers={}, base=None, nonce=f"{global_steps:08x}", timeout_s=5.0)


class ClockedEngine(SimulatedEngine):
    """One token per second of the clock and request, as many as `max_tokens` says. Notes its control calls and steps.

    A call in `seconds` takes so long, one in `errors` raises, and both of them before it has had any effect; one in
    `late_errors` raises after.
    """

    def __init__(self, max_num_seqs: int = 8, swap_s: float = 0.0):
        super().__init__(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=1.0,
            max_num_seqs=max_num_seqs,
            swap_s=swap_s,
            sleep=self._note_and_sleep,
        )
        self.events: list[str] = []
        self.seconds: dict[str, float] = {}
        self.errors: dict[str, Exception] = {}
        self.late_errors: dict[str, Exception] = {}
        self.tags: list[WeightTag] | None = None
        """What the workers say after a swap; None is the truth."""
        self.workers = 1
        self.step_starts: list[float] = []
        self.step_versions: list[int] = []
        """Of every step that has ended: the version that was live when it began."""
        self._live = -1

    async def freeze(self, clear_cache: bool) -> None:
        await self._before("freeze", " clearing the cache" if clear_cache else "")
        await super().freeze(clear_cache)
        self._after("freeze")

    async def thaw(self) -> float:
        await self._before("thaw")
        frozen_s = await super().thaw()
        self._after("thaw")
        return frozen_s

    async def stage(self, manifest: Manifest) -> None:
        await self._before("stage", f" {manifest.global_steps}")
        await super().stage(manifest)

    async def swap(self, global_steps: int) -> list[WeightTag]:
        await self._before("swap", f" {global_steps}")
        tags = await super().swap(global_steps)
        self._after("swap")
        return tags if self.tags is None else self.tags

    async def load(self, manifest: Manifest) -> list[WeightTag]:
        if not self.events or self.events[-1] != f"swap {manifest.global_steps}":  # which comes by here too
            await self._before("load", f" {manifest.global_steps}")
        tags = await super().load(manifest)
        self._live = manifest.global_steps
        return tags if self.tags is None else self.tags

    @property
    def num_workers(self) -> int:
        return self.workers

    async def _before(self, call: str, details: str = "") -> None:
        self.events.append(call + details)
        if call in self.seconds:
            await asyncio.sleep(self.seconds[call])
        if call in self.errors:
            raise self.errors[call]

    def _after(self, call: str) -> None:
        if call in self.late_errors:
            raise self.late_errors[call]

    async def _note_and_sleep(self, seconds: float) -> None:
        if seconds != 1.0:
            return await asyncio.sleep(seconds)
        version = self._live
        self.step_starts.append(now())
        await asyncio.sleep(seconds)
        self.step_versions.append(version)


def make_replica(name: str, engine: ClockedEngine, **config: Any) -> RolloutReplica:
    deadlines = {"stage_timeout_s": 100.0, "pause_timeout_s": 10.0, "swap_timeout_s": 50.0}
    return RolloutReplica(name, engine, WeightSyncConfig(**deadlines | config))


def start_group(replica: RolloutReplica, *lengths: int, prefix: str = "") -> asyncio.Task[list[Completion]]:
    """Requests of so many tokens, named 0-0, 0-1, ... or, with a prefix, by it and their number."""
    requests = [make_request(f"{prefix or '0-'}{index}", length) for index, length in enumerate(lengths)]
    return asyncio.create_task(replica.generate_group(requests))


async def update_engine(engine: ClockedEngine, global_steps: int, frozen_s: float = 0.0) -> None:
    """Stage, stop, swap, stand still for a while, go on."""
    await engine.stage(make_manifest(global_steps))
    await engine.admission.hold()
    await engine.freeze(clear_cache=False)
    await engine.swap(global_steps)
    await asyncio.sleep(frozen_s)
    await engine.thaw()
    engine.admission.release()


async def update(replica: RolloutReplica, global_steps: int) -> None:
    """As the checkpoint manager does it."""
    if replica._config.staging is Staging.none:
        await replica.receive(make_manifest(global_steps))
    else:
        await replica.stage(make_manifest(global_steps))
        await replica.commit(make_tag(global_steps))
