"""Inputs of a recorder, by hand: groups of two steps, an evaluation, a console that writes down what it shows."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from rollout.types import EvaluatedPrompt, FloatArray, TrajectoryGroup, VersionSpan
from tests.support.reference import make_group, make_trajectory
from trainer.tracking.live_console import ReplicaView


def example_groups() -> list[TrajectoryGroup]:
    """Versions 4 and 5 in one trajectory; a masked token of version 2, which staleness must not see; a solved group."""
    crossing = make_trajectory(
        [1, 2, 3],
        [7, 8, 9, 10],
        loss_mask=[False, True, True, True],
        spans=(VersionSpan(0, 1, 2), VersionSpan(1, 2, 4), VersionSpan(2, 4, 5)),
        reward=1.0,
        cached_tokens=2,
    )
    cut = make_trajectory([1, 2, 3], [7, 8], spans=(VersionSpan(0, 2, 5),), finish_reason="length")
    solved = make_trajectory([1], [9, 9], spans=(VersionSpan(0, 2, 6),), reward=1.0)
    return [make_group(30, [crossing, cut]), make_group(31, [solved, solved])]


def example_advantages() -> list[FloatArray]:
    return [np.array([0.7, -0.7], np.float32), np.zeros(2, np.float32)]


@dataclass
class Screen:
    """A console that writes down what it is shown."""

    events: list[str] = field(default_factory=list)

    def stage(self, text: str) -> None: ...

    def during(self, text: str) -> AbstractContextManager[Callable[[str], None]]:
        return nullcontext(self.message)

    def watch(self, replicas: Callable[[], Sequence[ReplicaView]]) -> None: ...

    def resumed(self, global_steps: int, accuracies: Sequence[tuple[int, float]]) -> None: ...

    def message(self, text: str) -> None: ...

    def end(self, state: str, text: str) -> None: ...

    def close(self) -> None: ...

    def step(self, global_steps: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"step {global_steps} {metrics['timing_s/step']:g}")

    def evaluation(self, global_steps: int, accuracy: float) -> None:
        self.events.append(f"evaluation {global_steps} {accuracy:g}")


@dataclass(frozen=True)
class Evaluated:
    accuracy: float
    mean_response_tokens: float = 11.5
    num_prompts: int = 256
    versions: tuple[int, ...] = (0,)
    pinned: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    agent_metrics: dict[str, float] = field(default_factory=dict)
    prompts: tuple[EvaluatedPrompt, ...] = ()
