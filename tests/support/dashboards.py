"""Run folders for the tests of the page: a simulated run with the records and events of a real one."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rollout.engines.virtual_clock import run_virtual
from rollout.events.driver import Write
from rollout.events.event import Stamped
from rollout.events.kinds import FleetEvent, FleetEventKind
from rollout.types import IntArray, TokenSequence, TrajectoryGroup, VersionSpan
from scripts.bench.common import LogNormalLengths
from scripts.bench.simulated_job import Job, run_job_here
from tests.support.event_runs import Trained
from tests.support.happenings import at, make_writer, write
from tests.support.recordings import Screen
from trainer.tokens import TrainedTokens, sampled_tokens
from trainer.tracking.coverage import Coverage
from trainer.tracking.events.kinds import RunEnded, RunStarted
from trainer.tracking.recorder import RunRecorder
from trainer.tracking.sinks import METRICS_FILE, JsonlSink, Tracker
from trainer.tracking.trajectories import TRAJECTORIES

EPOCH = 1_764_000_000.0
"""Virtual clocks begin at 0, runs do not."""
HOSTILE = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">\u202e\u0000\ud800"
"""A text as hostile as a prompt may be: markup, a change of direction, a control character, half of a surrogate
pair."""
JOB = Job(
    length_of=LogNormalLengths(mean=120, sigma=0.8, cap=600), num_steps=8, prompts_per_step=3, group_size=3, train_s=1.0
)
LIVE_JOB = dataclasses.replace(
    JOB, length_of=LogNormalLengths(mean=20, sigma=0.5, cap=60), num_steps=400, train_s=0.5, token_s=0.01
)
"""Longer than a test."""
LONG_JOB = dataclasses.replace(JOB, length_of=LogNormalLengths(mean=12, sigma=0.5, cap=30), num_steps=500)
CONFIG = "rollout:\n  max_staleness: 2\n  max_num_seqs: 64\n  num_replicas: 2\n"
BRANCHED = 7
"""The first trajectory of this step is a session of three sequences."""


class Recorded(Trained):
    """Writes every step into the run folder, as a real run does."""

    def __init__(self, run_dir: Path, write: Write):
        super().__init__(write)
        tracker = Tracker([JsonlSink(run_dir / METRICS_FILE)])
        coverage = Coverage(window=9, group_size=3)
        self._recorder = RunRecorder(run_dir, tracker, Screen(), record_tokens=True, coverage=coverage)

    def record_step(
        self, global_steps: int, metrics: Any, groups: Any, advantages: Any, tokens: Any = None, evidence: Any = None
    ) -> None:
        super().record_step(global_steps, metrics, groups, advantages)
        if global_steps == BRANCHED:
            groups = [with_branches(groups[0]), *groups[1:]]
        self._recorder.record_step(global_steps, metrics, groups, advantages, made_of(groups))


def with_branches(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group whose first trajectory has, besides its sequence, two that leave it at its half, and each other after
    four given tokens and two that the second sampled."""
    first, *others = group.trajectories
    (whole,) = first.sequences
    half = len(whole.response_ids) // 2
    version = whole.spans[-1].global_steps

    begun = np.concatenate([whole.prompt_ids, whole.response_ids[:half]])

    def branch(prompt_ids: IntArray, given: Sequence[int], sampled: Sequence[int]) -> TokenSequence:
        is_sampled = np.arange(len(given) + len(sampled)) >= len(given)
        return TokenSequence(
            prompt_ids=prompt_ids,
            response_ids=np.array([*given, *sampled], np.int32),
            loss_mask=is_sampled,
            rollout_logprobs=np.where(is_sampled, np.float32(-0.5), np.float32(0)),
            spans=(VersionSpan(len(given), len(is_sampled), version),),
        )

    second = branch(begun, [3, 3, 5, 5], [7, 8, 9])
    third = branch(second.token_ids[:-1], [], [6, 6])
    first = dataclasses.replace(first, sequences=(whole, second, third))
    return dataclasses.replace(group, trajectories=(first, *others))


def made_of(groups: Sequence[TrajectoryGroup]) -> TrainedTokens:
    """Return what a trainer near the rollouts makes of their tokens: every fifth clipped, every eleventh rejected."""
    logprobs = sampled_tokens(groups, 0).rollout_logprobs
    places = np.arange(len(logprobs))
    return TrainedTokens(
        logprobs=(logprobs + 0.25 * np.sin(places)).astype(np.float32),
        advantages=np.cos(places).astype(np.float32),
        is_clipped=places % 5 == 0,
        is_rejected=places % 11 == 0,
    )


def simulated_run(run_dir: Path, *, tells: bool = True, job: Job = JOB) -> Path:
    """A folder of eight steps of three groups of three on two replicas; prompts are HOSTILE. `tells`: it has events."""
    run_dir.mkdir(parents=True)
    stamped: list[Stamped] = []
    run_virtual(run_job_here(job, 2, write=stamped.extend, recorder=Recorded(run_dir, stamped.extend)))
    for path in (run_dir / TRAJECTORIES).glob("*.jsonl"):  # simulated prompts have no text
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        texts = {"prompt": f"Question {HOSTILE}", "response": f"Answer {HOSTILE}"}
        path.write_text("".join(json.dumps(row | texts) + "\n" for row in rows))
    (run_dir / "config.yaml").write_text(CONFIG)
    (run_dir / "driver.log").write_text("began\nended\n")
    if tells:
        lost = FleetEvent(FleetEventKind.GIVEN_UP, "replica-1", f"replica-1 is given up: {HOSTILE}")
        last = stamped[-1].time
        whole = [at(0.0, started(job)), *stamped, at(last, lost), at(last, RunEnded(exit_code=1, error="it broke"))]
        write(run_dir, [dataclasses.replace(one, time=EPOCH + one.time) for one in whole])
    return run_dir


def started(job: Job) -> RunStarted:
    return RunStarted(
        **{"global_steps": 0, "total_steps": job.num_steps, "prompts_per_step": 3, "group_size": 3},
        **{"max_staleness": 2, "num_replicas": 2, "num_ranks": 1, "host": "here"},
    )


class LiveRun:
    """A run on the clock of the wall, half a second a step, in a thread of its own."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the run as Ctrl-C does. Raises what the run has raised."""
        if self._thread.is_alive() and self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failed is not None:
            raise self._failed

    async def _run(self, write: Write) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await run_job_here(LIVE_JOB, 2, write=write, recorder=Recorded(self._run_dir, write))

    def _train(self) -> None:
        try:
            with make_writer(self._run_dir) as writer:
                writer.put([at(0.0, started(LIVE_JOB))])
                asyncio.run(self._run(writer.put))
        except asyncio.CancelledError:
            return  # it was ended
        except BaseException as error:
            self._failed = error


@contextmanager
def live_run(run_dir: Path) -> Iterator[LiveRun]:
    """Its folder is there before it begins. It ends with the test."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(CONFIG)
    live = LiveRun(run_dir)
    try:
        yield live
    finally:
        live.end()
