"""Small stand-ins for the parts around the one under test, and a clock that does not tick by itself."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rollout.engines.base import WeightTag
from rollout.engines.simulated import SimulatedEngine
from rollout.replica import RolloutReplica
from rollout.types import GenerationRequest, Prompt, SamplingParams, Trajectory, TrajectoryGroup, VersionSpan
from scripts.virtual_clock import run_virtual as run_virtual


async def settle() -> None:
    """Let every other task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


# -- groups ------------------------------------------------------------------------------------------------------------


def make_prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal=ordinal, text=f"prompt {ordinal}", token_ids=(1, 2), ground_truth=str(ordinal))


def make_trajectory(*versions: int) -> Trajectory:
    """One token per version: make_trajectory(4, 4, 5) has the spans [0, 2) -> 4 and [2, 3) -> 5."""
    starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    spans = [VersionSpan(start, end, versions[start]) for start, end in zip(starts, ends, strict=True)]
    return Trajectory(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.zeros(len(versions), np.int32),
        loss_mask=np.ones(len(versions), np.bool_),
        rollout_logprobs=np.zeros(len(versions), np.float32),
        spans=tuple(spans),
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


# -- around the rollouter ----------------------------------------------------------------------------------------------


class FakeStream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.ordinal = 0

    def next(self) -> Prompt:
        self.ordinal += 1
        return make_prompt(self.ordinal - 1)


class FakeRunner:
    """Takes `seconds[ordinal]` of the clock, then gives a group or raises `errors[ordinal]`.

    The first token is of the version that was live at the start, the last of the one at the end. Its rewards are all
    equal where `is_flat(ordinal)`.
    """

    def __init__(
        self,
        seconds: list[float],
        errors: dict[int, BaseException] | None = None,
        is_flat: Callable[[int], bool] = lambda ordinal: True,
    ):
        self._is_flat = is_flat
        self.live = 0
        self.events: list[tuple[str, int, str]] = []
        self._seconds = seconds
        self._errors = errors or {}

    async def run_group(
        self, prompt: Prompt, replica: str, sampling: SamplingParams, group_size: int
    ) -> TrajectoryGroup:
        ordinal, first = prompt.ordinal, self.live
        self.events.append(("start", ordinal, replica))
        try:
            await asyncio.sleep(self._seconds[ordinal % len(self._seconds)])
        except asyncio.CancelledError:
            self.events.append(("cancel", ordinal, replica))
            raise
        self.events.append(("end", ordinal, replica))
        if ordinal in self._errors:
            raise self._errors[ordinal]
        if self._is_flat(ordinal):
            return make_group(ordinal, first, self.live, group_size=group_size)
        return make_mixed_group(ordinal, first, self.live)


# -- engines -----------------------------------------------------------------------------------------------------------


def make_request(name: str, num_tokens: int) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=(1, 2), sampling=SamplingParams(max_tokens=num_tokens))


def make_manifest(global_steps: int) -> dict[str, Any]:
    return {"global_steps": global_steps, "checksum": 1000 + global_steps, "nbytes": 4}


class ClockedEngine(SimulatedEngine):
    """One token per second of the clock and request, as many as `max_tokens` says. Notes its calls, and its steps."""

    def __init__(self, max_num_seqs: int = 8, swap_s: float = 0.0):
        super().__init__(
            length_of=lambda request: request.sampling.max_tokens,
            step_s=1.0,
            max_num_seqs=max_num_seqs,
            swap_s=swap_s,
            sleep=self._note_and_sleep,
        )
        self.events: list[str] = []
        self.step_starts: list[float] = []
        self.step_versions: list[int] = []
        """Of every step that has ended: the version that was live when it began."""
        self._live = -1

    async def pause(self) -> None:
        self.events.append("pause")
        await super().pause()

    async def resume(self) -> float:
        self.events.append("resume")
        return await super().resume()

    async def swap(self, global_steps: int) -> list[WeightTag]:
        self.events.append(f"swap {global_steps}")
        tags = await super().swap(global_steps)
        self._live = global_steps
        return tags

    async def _note_and_sleep(self, seconds: float) -> None:
        if seconds != 1.0:
            return await asyncio.sleep(seconds)
        version = self._live
        self.step_starts.append(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        self.step_versions.append(version)


async def update(target: ClockedEngine | RolloutReplica, global_steps: int, paused_s: float = 0.0) -> None:
    """Stage, pause, swap, stay paused for a while, resume."""
    await target.stage(make_manifest(global_steps))
    await target.pause()
    await target.swap(global_steps)
    await asyncio.sleep(paused_s)
    await target.resume()
