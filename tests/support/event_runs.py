"""Simulated runs with events: the real scheduler on a virtual clock."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engines.virtual_clock import run_virtual
from rollout.events.event import Stamped
from scripts.bench.common import LogNormalLengths
from scripts.bench.simulated_job import Job, Outcome, run_job_here
from scripts.observe.view import RunView
from scripts.simulate.stand_ins import Nothing
from trainer.tracking.events.kinds import StepRecorded

JOB = Job(
    length_of=LogNormalLengths(mean=20, sigma=0.8, cap=120), num_steps=6, prompts_per_step=3, group_size=3, train_s=1.0
)


@dataclass
class Trained(Nothing):
    """Keeps what each step was trained on: (prompt, token ids, version spans). `write`: takes its events."""

    write: Callable[[Sequence[Stamped]], None] | None = None

    steps: list[list[tuple[int, bytes, Any]]] = field(default_factory=list)

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        rows = [
            (group.prompt.ordinal, sequence.token_ids.tobytes(), sequence.spans)
            for group in groups
            for trajectory in group.trajectories
            for sequence in trajectory.sequences
        ]
        self.steps.append(rows)
        if self.write is not None:
            event = StepRecorded(global_steps=global_steps, file=f"trajectories/step_{global_steps:06d}.jsonl")
            self.write([Stamped(asyncio.get_running_loop().time(), "driver", event)])


def simulated(job: Job = JOB, *, tells: bool = True) -> tuple[list[Stamped], Trained, Outcome]:
    """Events of a run, what it trained, and how long it took."""
    stamped: list[Stamped] = []
    write = stamped.extend if tells else None
    trained = Trained(write)
    outcome = run_virtual(run_job_here(job, 2, write=write, recorder=trained))
    return stamped, trained, outcome


def view_of(events: Iterable[Stamped]) -> RunView:
    """Return the view of a run that all of these events make."""
    view = RunView()
    for stamped in events:
        view.add(stamped)
    return view
