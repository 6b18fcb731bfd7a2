"""The teacher of a distillation: a model that no update reaches scores what the policy sampled, on its own replicas.

It is asked when a group is complete, before the buffer has it. The group holds its slot meanwhile, as it does while it
generates: so scoring hides inside the staleness window, and how much waits for the teacher is bounded as all else is.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from configs.runtime.deadline import within
from rollout.errors import ReplicaLostError
from rollout.events.event import Emit, nobody
from rollout.events.kinds import ScoringEnded, ScoringStarted
from rollout.fleet.fleet import ReplicaFleet
from rollout.replica.lifecycle import Replica
from rollout.types import FloatArray, IntArray, TokenSequence, TrajectoryGroup

ScoreOn = Callable[[Replica, Sequence[IntArray]], Awaitable[list[FloatArray]]]
"""Asks a replica for the log-probabilities [L - 1] of the tokens of each sequence [L], except its first. Raises
ReplicaLostError."""


class TeacherError(RuntimeError):
    """The teacher's answer is no logprobs. The message names its replica and the prompt."""


@dataclass(kw_only=True)
class Teacher:
    """Scores groups on the least loaded of its replicas. A score depends on nothing but the tokens: one that is lost
    with its replica is asked for again.

    Example:
        taught = await teacher.score(group)
        taught.trajectories[0].sequences[0].teacher_logprobs  # [R]
    """

    fleet: ReplicaFleet
    timeout_s: float
    """The value of teacher.timeout_s, the deadline for a group."""
    score_on: ScoreOn
    emit: Emit = nobody
    num_failures: int = field(default=0, init=False)
    _num_tokens: int = field(default=0, init=False)
    """The tokens that were read since the last call of `gauges`."""
    _window_start: float = field(default_factory=time.monotonic, init=False)

    async def score(self, group: TrajectoryGroup) -> TrajectoryGroup:
        """Return the group with `teacher_logprobs` in every sequence: at temperature 1, after all that precedes the
        token in its sequence.

        Raises TimeoutError past teacher.timeout_s, TooFewReplicasError when the last replica is lost and none may
        replace it, and TeacherError.
        """
        ordinal, began = group.prompt.ordinal, time.perf_counter()
        read = [_read(sequence) for sequence in group.sequences if sequence.loss_mask.any()]
        num_tokens = sum(map(len, read))
        self.emit(ScoringStarted(ordinal=ordinal))
        name, error = None, None
        try:
            async with within(self.timeout_s, "teacher.timeout_s", f"scoring prompt {ordinal}"):
                name, logprobs = await self._logprobs(read, len(group.trajectories))
            if not all(np.isfinite(some).all() for some in logprobs):
                raise TeacherError(f"{name} gave logprobs of prompt {ordinal} that are not finite")
        except BaseException as failure:
            error = failure
            self.num_failures += isinstance(failure, Exception)
            raise
        finally:
            text = None if error is None else repr(error)
            self.emit(ScoringEnded(ordinal=ordinal, replica=name, num_tokens=num_tokens, error=text))
        self._num_tokens += num_tokens
        return _taught(group, logprobs, time.perf_counter() - began)

    async def _logprobs(self, read: Sequence[IntArray], room: int) -> tuple[str, list[FloatArray]]:
        """Ask until a replica answers. Returns its name, too."""
        router = self.fleet.router
        while True:
            name = await router.acquire(room)
            try:
                return name, await self.score_on(self.fleet.replicas[name], read)
            except ReplicaLostError as error:
                self.num_failures += 1
                await self.fleet.lose(name, error)
            finally:
                router.release(name, room)

    def gauges(self) -> dict[str, float]:
        """Return the metrics. The throughput is since the last call."""
        now = time.monotonic()
        seconds, tokens = now - self._window_start, self._num_tokens
        self._window_start, self._num_tokens = now, 0
        fleet_gauges = self.fleet.gauges()
        return {
            "perf/throughput/scored": tokens / seconds if seconds else 0.0,
            "teacher/failures": float(self.num_failures),
            **{f"teacher/{name}": fleet_gauges[f"rollout/{name}"] for name in ("replicas_ready", "replicas_lost")},
        }


def _read(sequence: TokenSequence) -> IntArray:
    """Return the sequence's tokens up to the last that the policy sampled."""
    return sequence.token_ids[: len(sequence.prompt_ids) + np.flatnonzero(sequence.loss_mask)[-1] + 1]


def _taught(group: TrajectoryGroup, logprobs: Sequence[FloatArray], score_s: float) -> TrajectoryGroup:
    """Return the group with its scores. `logprobs`: of every sequence with a loss token, in order."""
    answers = iter(logprobs)

    def taught(sequence: TokenSequence) -> TokenSequence:
        mask, scores = sequence.loss_mask, np.zeros(len(sequence.response_ids), np.float32)
        if mask.any():
            response_scores = next(answers)[len(sequence.prompt_ids) - 1 :]
            scores[: len(response_scores)] = response_scores
        return replace(sequence, teacher_logprobs=np.where(mask, scores, np.float32(0)))

    trajectories = [
        replace(trajectory, sequences=tuple(map(taught, trajectory.sequences)), score_s=score_s)
        for trajectory in group.trajectories
    ]
    return replace(group, trajectories=tuple(trajectories))
