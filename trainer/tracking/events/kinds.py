"""The kinds of events of the driver and the trainer: of the run, its steps, updates, evaluations and checkpoints."""

from dataclasses import dataclass
from enum import Enum

from rollout.events.event import Event, OfStep, kinds_in
from rollout.events.kinds import ROLLOUT_KINDS

# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A process of the run begins to train. A folder has one per process that worked in it."""

    global_steps: int
    """0, or the step that it goes on from."""
    total_steps: int
    prompts_per_step: int
    group_size: int
    max_staleness: int
    num_replicas: int
    num_ranks: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The run goes on from the checkpoint of `global_steps`. All before this line that belongs to a later step is
    superseded: it happened, and counts for nothing. -1: there was no checkpoint, and everything begins anew."""

    global_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The process ends by itself. One that was killed has none."""

    exit_code: int
    """0: it has taken all its steps, and its records prove it."""
    error: str | None


# -- the trainer -------------------------------------------------------------------------------------------------------


class StepPart(Enum):
    wait = "wait"
    """The wait for a batch."""
    assemble = "assemble"
    score = "score"
    train = "train"
    update = "update"
    """The wait of the step: for the end of the update before, and for the publication of its own weights."""
    checkpoint = "checkpoint"
    """The copy of the state. It is written in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartStarted(OfStep):
    part: StepPart


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPartEnded(OfStep):
    part: StepPart


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAssembled(OfStep):
    """The groups of a step are chosen."""

    ordinals: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorded(OfStep):
    """The step is settled: its weights are live, its record is written."""

    file: str
    """The file in the run folder that has what the step was trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSkipped(OfStep):
    """NaN or infinity broke the step, which only counts."""

    reason: str
    file: str
    """The file in the run folder that has its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPublished(OfStep):
    """A rank has offered its part of the weights to the replicas."""

    rank: int
    seconds: float
    """Since it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStarted(OfStep):
    """The weights are about to be published, and go to all replicas that are behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateEnded(OfStep):
    replicas: tuple[str, ...]
    """The replicas that were brought to it."""
    failures: int
    """Attempts that failed, on any replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainersRestarted(Event):
    """A train worker was lost, and what was done."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStarted(OfStep):
    """The held-out set is asked at this version, or at those that go live meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationEnded(OfStep):
    global_steps: int
    """The oldest version that answered."""
    accuracy: float
    pinned: bool
    file: str
    """The file in the run folder that has every sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStaged(OfStep):
    """The state of this version has been copied, and is written from here on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(OfStep):
    seconds: float
    """Since it was staged."""
    megabytes: float
    folder: str
    """The folder in the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFailed(OfStep):
    error: str


KINDS = ROLLOUT_KINDS | kinds_in(globals())
"""Every kind by its name in events.jsonl."""
