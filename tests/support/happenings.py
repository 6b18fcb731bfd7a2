"""Events as a run makes them, for tests of what writes and reads them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rollout.events.event import Event, Stamped
from rollout.events.kinds import GroupClaimed, TurnEnded, TurnStarted
from trainer.tracking.events.kinds import StepRecorded
from trainer.tracking.events.lines import event_files, from_line
from trainer.tracking.events.writer import EventWriter
from trainer.tracking.sinks import FailedWrites


def at(time: float, event: Event, who: str = "driver") -> Stamped:
    return Stamped(time, who, event)


def claims(ordinals: Iterable[int]) -> list[Stamped]:
    return [at(100.0 + ordinal, GroupClaimed(ordinal=ordinal, replica="replica-0")) for ordinal in ordinals]


def recorded(global_steps: int) -> Stamped:
    return at(global_steps, StepRecorded(global_steps=global_steps, file=f"trajectories/step_{global_steps:06d}.jsonl"))


def turn(ordinal: int, start: float, end: float, borders: Sequence[tuple[int, int]], who: str) -> list[Stamped]:
    of = {"ordinal": ordinal, "attempt": 0, "episode": 0, "is_evaluation": False, "turn": 0}
    ended = TurnEnded(
        **of, num_tokens=9, cached_tokens=0, finish_reason="stop", first_token_s=None, borders=tuple(borders)
    )
    return [
        at(start, TurnStarted(**of, prompt_tokens=3, known_tokens=0), who),
        at(end, ended, who),
    ]


def make_writer(run_dir: Path, max_mb: int = 100, max_waiting: int = 10_000) -> EventWriter:
    failed = FailedWrites(lambda message: None)
    return EventWriter(run_dir=run_dir, max_mb=max_mb, failed=failed, max_waiting=max_waiting)


def write(run_dir: Path, stamped: Sequence[Stamped], max_mb: int = 2048) -> EventWriter:
    with make_writer(run_dir, max_mb, max_waiting=10**7) as writer:
        writer.put(stamped)
    return writer


def read_events(run_dir: Path) -> list[Stamped]:
    """Return all events of a folder whose writer has ended."""
    return [from_line(line) for _, path in event_files(run_dir) for line in path.read_bytes().splitlines()]
