"""A teacher on simulated replicas, whose answers a test can work out by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rollout.errors import ReplicaLostError
from rollout.fleet.fleet import FleetKind, ReplicaFleet
from rollout.replica.lifecycle import Replica
from rollout.teacher.teacher import Teacher
from rollout.types import FloatArray, IntArray
from tests.support.fakes import AsyncTest, ClockedEngine, as_test, make_replica

SECONDS = 1.0
"""The time that an answer takes."""


def logprob_of(token_ids: Sequence[int]) -> float:
    """Return the teacher's logprob of the last of these tokens, which depends on all of them and on their order."""
    return -sum((place + 1) * token for place, token in enumerate(token_ids)) / 64


@dataclass
class TeacherSetup:
    """A teacher of replicas teacher-0, teacher-1, ..., with what its fleet told."""

    num_replicas: int = 2
    max_replacements: int = 1
    timeout_s: float = 100.0
    asked: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    """Replica, and the sequences that it was to score."""
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [f"teacher-{index}" for index in range(self.num_replicas)]
        self.engines = {name: ClockedEngine() for name in names}
        self.fleet = ReplicaFleet(
            [make_replica(name, engine) for name, engine in self.engines.items()],
            8,
            1,
            lambda event: self.told.append(event.text),
            serving=0,
            max_replacements=self.max_replacements,
            kind=FleetKind("teacher", "teacher"),
        )
        self.teacher = Teacher(fleet=self.fleet, timeout_s=self.timeout_s, score_on=self.score_on)

    async def score_on(self, replica: Replica, sequences: Sequence[IntArray]) -> list[FloatArray]:
        self.asked.append((replica.name, [ids.tolist() for ids in sequences]))
        lost = asyncio.ensure_future(self.engines[replica.name].wait_dead())
        await asyncio.wait({lost}, timeout=SECONDS)
        if lost.done():
            raise ReplicaLostError(f"{replica.name} died while it scored")
        lost.cancel()
        return [
            np.array([logprob_of(ids[: end + 1].tolist()) for end in range(1, len(ids))], np.float32)
            for ids in sequences
        ]

    async def replace(self) -> str:
        """Start what the fleet wants, as its operator does."""
        name = await self.fleet.wanted.get()
        self.engines[name] = ClockedEngine()
        self.fleet.register(make_replica(name, self.engines[name]))
        await self.fleet.admit(name, 0)
        return name

    @property
    def in_flight(self) -> float:
        return self.fleet.router.gauges()["rollout/inflight_trajectories"]


def with_teacher(**options: Any) -> Callable[[AsyncTest], Callable[..., None]]:
    """Makes a test of `async def test(setup, ...)`."""

    @asynccontextmanager
    async def given() -> AsyncIterator[tuple[TeacherSetup]]:
        yield (TeacherSetup(**options),)

    return partial(as_test, 1, given)
