"""Everything of the rollouts that a checkpoint keeps, so that no prompt is lost and none is trained twice.

It is captured between a weight update and the freeing of the slots it was trained on, when every prompt of the stream
is trained, ready, under way, given up, or still to come; each of them in one place only.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rollout.buffer import TrajectoryBuffer
from rollout.failures import FailureBudget, GroupBudget
from rollout.progress import Attempt, PartialCompletion, Progress
from rollout.prompts import PromptStream
from rollout.request_ids import InGroup
from rollout.rollouter import GroupUnderWay, Rollouter
from rollout.types import Trajectory, TrajectoryGroup


class OtherPromptsError(ValueError):
    """The data, their order or the seed is not that of the checkpoint: its ordinals would mean other prompts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnderWay:
    """A group whose trajectories are not all complete."""

    ordinal: int
    claimed_version: int
    failures: int
    partials: dict[InGroup, PartialCompletion]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A group that waits for the trainer. Its prompt is what the stream has at the ordinal."""

    ordinal: int
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutState:
    prompts_checksum: int
    group_size: int
    next_ordinal: int
    returned: tuple[int, ...]
    """Ordinals before `next_ordinal` that were given back to the stream."""
    under_way: tuple[UnderWay, ...]
    """In the order of dispatch."""
    ready: tuple[Ready, ...]
    """In the order of becoming ready."""
    failed_groups: tuple[int, ...]
    failed_rewards: int
    counters: dict[str, int]
    """What the summary tells of the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The parts that the state is of."""

    stream: PromptStream
    buffer: TrajectoryBuffer
    rollouter: Rollouter
    progress: Progress
    failed_rewards: FailureBudget
    failed_groups: GroupBudget
    group_size: int


def capture(rollouts: Rollouts) -> RolloutState:
    """What there is now; the next await may change it."""
    ledger = rollouts.buffer.ledger
    return RolloutState(
        prompts_checksum=rollouts.stream.checksum,
        group_size=rollouts.group_size,
        next_ordinal=rollouts.stream.ordinal,
        returned=tuple(rollouts.stream.returned),
        under_way=tuple(
            UnderWay(
                ordinal=ordinal,
                claimed_version=group.slot.claimed_version,
                failures=group.failures,
                partials=rollouts.progress.partials(ordinal) or dict(group.attempt.partials),
            )
            for ordinal, group in rollouts.rollouter.under_way.items()
        ),
        ready=tuple(
            Ready(ordinal=group.prompt.ordinal, trajectories=group.trajectories, greedy=group.greedy)
            for group in rollouts.buffer.ready
        ),
        failed_groups=tuple(rollouts.failed_groups.failed),
        failed_rewards=rollouts.failed_rewards.num_failed,
        counters={"dropped": ledger.num_dropped, "filtered": ledger.num_filtered, **rollouts.rollouter.counters},
    )


def restore(state: RolloutState, rollouts: Rollouts) -> int:
    """Puts it back into parts that are new, of a run that has taken the checkpoint's steps. Returns how many groups do
    not fit, because the bound on staleness, or the size of groups, is another now: their prompts come first.

    Raises OtherPromptsError.
    """
    if rollouts.stream.checksum != state.prompts_checksum:
        raise OtherPromptsError("the prompts of the checkpoint are not those of the data and the seed of this run")
    same_groups = state.group_size == rollouts.group_size
    given_back: list[int] = []
    for ready in state.ready:
        prompt = rollouts.stream.at(ready.ordinal)
        group = TrajectoryGroup(prompt=prompt, trajectories=ready.trajectories, greedy=ready.greedy)
        if not (same_groups and rollouts.buffer.adopt(group)):
            given_back.append(ready.ordinal)
    for under_way in state.under_way:
        slot = rollouts.buffer.ledger.adopt(under_way.claimed_version) if same_groups else None
        if slot is None:
            given_back.append(under_way.ordinal)
        else:
            rollouts.rollouter.under_way[under_way.ordinal] = GroupUnderWay(
                slot=slot,
                prompt=rollouts.stream.at(under_way.ordinal),
                attempt=Attempt(partials=under_way.partials),
                failures=under_way.failures,
            )
    rollouts.stream.ordinal = state.next_ordinal
    rollouts.stream.returned = sorted([*state.returned, *given_back])
    rollouts.failed_groups.failed = list(state.failed_groups)
    rollouts.failed_rewards.num_failed = state.failed_rewards
    ledger = rollouts.buffer.ledger
    ledger.num_dropped, ledger.num_filtered = state.counters["dropped"], state.counters["filtered"]
    rollouts.rollouter.counters = {name: state.counters[name] for name in rollouts.rollouter.counters}
    return len(given_back)


def encode(state: RolloutState) -> bytes:
    return msgspec.msgpack.encode(state, enc_hook=_encode_array)


def decode(data: bytes) -> RolloutState:
    """Raises ValueError when it is none."""
    return msgspec.msgpack.decode(data, type=RolloutState, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}: {value!r:.100}")


def _decode_array(_: type, value: Any) -> Any:
    dtype, data = value
    return np.frombuffer(data, dtype)
